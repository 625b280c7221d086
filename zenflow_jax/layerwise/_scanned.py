"""`ScannedModel`: cuts a loss that scans its layers into the three functions of a trainer.

The loss is traced, and its jaxpr is evaluated twice: up to the scan over the layers, and with the
last carry in place of the scan. A layer is the scan's body. Its carry also contains the scan's
outputs so far, and an index, which selects inputs other than weights, such as a layer's random key.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jaxtyping import PyTree

from zenflow_jax._device.memory import HOST, upload
from zenflow_jax._device.scans import Evaluation, Scan, Stack, is_stack, layer_sharding
from zenflow_jax._spec.leaf import as_pure, plain_name
from zenflow_jax.layerwise._tracing import key_of, live_inputs, text_of, types_of

_CHOOSER = "layerwise.ScannedModel"


class ScannedModel:
    """The model of a `Trainer`, from a loss that scans over its layers.

    The scan may come from jax, flax, haliax, haiku or Equinox, and be inside `jax.jit`, `jax.vmap`
    or `jax.checkpoint`, which is dropped. Layers are numbered in the scan's order: with
    `reverse=True`, layer 0 is the last in the stacks.

    Args:
        loss_fn: Function of (params, batch) that returns a loss, as `Trainer`'s `last` does. Random
            keys, and arrays that are not trained, belong in the batch.
        params: A tree of arrays or `ShapeDtypeStruct`s; only their shapes are used.
        batch: A batch or its shapes. Later batches may have other shapes.
        where: Function of (key path, leaf) that returns whether a leaf is a stack. By default, all
            leaves that a scan reads along the first axis are stacks.

    Attributes:
        functions: The arguments `first`, `layer` and `last` of `Trainer` and `plan_layerwise`.

    Raises:
        ValueError: If the loss does not scan each stack exactly once, all in the same scan, or
            reads a stack elsewhere. The message names the leaf and the line in the model's code.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, optax
        >>> from zenflow_jax import layerwise
        >>> def loss_fn(params, x):
        ...     x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
        ...     return jnp.mean((x @ params["head"]) ** 2)
        >>> params = {"layers": np.ones((3, 8, 8), "float32"), "head": np.ones((8, 2), "float32")}
        >>> batch = jnp.ones((4, 8))
        >>> model = layerwise.ScannedModel(loss_fn, params, batch)
        >>> with layerwise.Trainer(
        ...     model.split(params), **model.functions, optimizer=optax.sgd(1e-3)
        ... ) as trainer:
        ...     losses = [float(trainer.step(batch)) for _ in range(5)]
        ...     params = model.join(trainer.params())
        >>> params["layers"].shape
        (3, 8, 8)
    """

    def __init__(
        self,
        loss_fn: Callable[[PyTree, PyTree], PyTree],
        params: PyTree,
        batch: PyTree,
        *,
        where: Callable[[jax.tree_util.KeyPath, jax.Array], bool] | None = None,
    ):
        self._names, pairs = _names(params), jax.tree_util.tree_leaves_with_path(as_pure(params))
        leaves, self._treedef = jax.tree.flatten(params)
        self._loss_fn, self._shapes, batch = loss_fn, _shapes_of(leaves), _shapes_of(batch)
        traced = self._traced(batch)
        if where is None:
            finding, others = _Finding(_CHOOSER), len(traced[0].in_avals) - len(pairs)
            finding.run(traced[0], [*map(Stack, range(len(pairs)), self._names), *[None] * others])
            stacks = sorted(finding.lines)
        else:
            stacks = [i for i, pair in enumerate(pairs) if where(*pair)]
        if not stacks:
            raise ValueError(
                "The loss scans no parameter layer by layer. Scan stacked parameters, or pass "
                "`first`, `layer` and `last` to `layerwise.Trainer` (docs/layerwise.md)."
            )
        self._stacks, self._length = tuple(stacks), (*self._shapes[stacks[0]].shape, 0)[0]
        cut = self._cut(batch, *traced)
        self._cuts, self._reverse = {key_of(batch): cut}, cut.scan.reverse
        layers = [_layer] * self._length  # a trainer with fewer layers is an error
        self.functions = {"first": self._first, "layer": layers, "last": self._last}

    def split(self, params: PyTree) -> dict[str, Any]:
        """Returns parameters in the form that `Trainer` takes, without copies to a device.

        `params` is a tree like the constructor's, with NumPy arrays, jax arrays in any memory, or
        `ShapeDtypeStruct`s with shardings that leave the layer axis whole. Each tree in the result
        has the structure of `params`, with None in place of all other leaves.
        """
        leaves, treedef = jax.tree.flatten(params)
        new = {*zip(_names(params), map(text_of, leaves), strict=True)}
        if different := new ^ {*zip(self._names, map(text_of, self._shapes), strict=True)}:
            raise ValueError(f"Other parameters than the constructor's: {sorted(different)}.")
        stacks = {i: _slices(self._names[i], leaves[i]) for i in self._stacks}
        outer = (None if i in stacks else x for i, x in enumerate(leaves))
        numbers = range(self._length)[:: -1 if self._reverse else 1]
        layers = _Layers(
            numbers,
            lambda n: treedef.unflatten(
                stacks[i](n) if i in stacks else None for i in range(len(leaves))
            ),
        )
        return {"outer": treedef.unflatten(outer), "layers": layers}

    def join(self, params: Mapping[str, PyTree]) -> Any:
        """Returns the result of `Trainer.params` as a tree like the constructor's, in NumPy."""
        layers = [*params["layers"]][:: -1 if self._reverse else 1]
        stacks = jax.tree.map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *layers)
        return jax.tree.map(
            lambda x, stack: stack if x is None else np.array(x),
            params["outer"],
            stacks,
            is_leaf=lambda x: x is None,
        )

    def _first(self, outer: PyTree, batch: PyTree) -> tuple[Any, Any]:
        cut = self._cut_of(batch)
        carry, shared = cut.front(jax.tree.leaves(outer), batch)
        outputs = {i: jnp.zeros(x.shape, x.dtype) for i, x in cut.outputs.items()}
        index = self._length - 1 if self._reverse else 0
        return (jnp.int32(index), carry, outputs), shared

    def _last(self, outer: PyTree, carry: PyTree, batch: PyTree) -> Any:
        cut, (_, carry, outputs) = self._cut_of(batch), carry
        if missing := cut.outputs.keys() - outputs.keys():
            raise ValueError(
                f"This `last` reads output {min(missing)} of the scan at {cut.scan.line}, which "
                "the trained loss does not read, so it is not kept. Let that loss read it, too."
            )
        return cut.behind(jax.tree.leaves(outer), batch, carry, outputs)

    def _cut_of(self, batch: PyTree) -> "_Cut":
        shapes = _shapes_of(batch)
        if (key := key_of(shapes)) not in self._cuts:
            self._cuts[key] = cut = self._cut(shapes, *self._traced(shapes))
            if cut.scan.reverse != self._reverse:
                raise ValueError("The order of the layers depends on the batch's shape.")
        return self._cuts[key]

    def _traced(self, batch: PyTree) -> tuple[Any, Any]:
        params = self._treedef.unflatten(self._shapes)
        return jax.make_jaxpr(self._loss_fn, return_shape=True)(params, batch)

    def _cut(self, batch: PyTree, traced: Any, loss: Any) -> "_Cut":
        """Cuts the traced loss; `batch` and `loss` are shapes."""

        def inputs(outer: PyTree, batch: PyTree) -> list[Any]:
            rest, names = iter(outer), enumerate(self._names)
            leaves = [Stack(i, x) if i in self._stacks else next(rest) for i, x in names]
            return [*leaves, *jax.tree.leaves(batch)]

        def front(outer: PyTree, batch: PyTree) -> tuple[Any, Any]:
            evaluation = _Cutting(_CHOOSER)
            with contextlib.suppress(_Reached):
                evaluation.run_whole(traced, inputs(outer, batch))
            (scan,) = evaluation.scans
            layers = [x if is_stack(x) else None for x in scan.layers]
            empty = dataclasses.replace(scan, consts=(), carry=(), layers=layers)
            layer_inputs = [x for x in scan.layers if not is_stack(x)]
            return scan.carry, _Shared(scan.consts, layer_inputs, empty, self._stacks)

        def behind(outer: PyTree, batch: PyTree, carry: PyTree, outputs: dict[int, Any]) -> Any:
            unread = {i: jnp.zeros(x.shape, x.dtype) for i, x in made.items()}
            evaluation = _Cutting(_CHOOSER, results=[*carry, *(unread | outputs).values()])
            results = evaluation.run_whole(traced, inputs(outer, batch))
            return jax.tree.unflatten(jax.tree.structure(loss), results)

        outer = [x for i, x in enumerate(self._shapes) if i not in self._stacks]
        carry, shared = jax.eval_shape(front, outer, batch)
        outputs = enumerate(shared.scan.body.out_avals[len(carry) :])
        made = {i: jax.ShapeDtypeStruct((self._length, *x.shape), x.dtype) for i, x in outputs}
        closed = jax.make_jaxpr(behind)(outer, batch, carry, made)
        begin = len(jax.tree.leaves((outer, batch, carry)))
        live = live_inputs(closed.jaxpr)
        read = {i: x for i, x in made.items() if begin + i in live}
        return _Cut(front, behind, shared.scan, read)


@dataclasses.dataclass(frozen=True, eq=False)
class _Layers:
    """Makes one layer at a time, in each iteration again."""

    numbers: range
    layer: Callable[[int], Any]

    def __iter__(self) -> Iterator[Any]:
        return map(self.layer, self.numbers)


@dataclasses.dataclass(frozen=True, eq=False)
class _Cut:
    """A loss for batches of one shape."""

    front: Callable[..., Any]  # (outer leaves, batch) -> carry, shared
    behind: Callable[..., Any]  # (outer leaves, batch, carry, outputs) -> loss
    scan: Scan  # without values
    outputs: dict[int, Any]  # shapes of the scan's outputs that the loss depends on


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Shared:
    """The data that all layers read."""

    consts: Sequence[Any]
    inputs: Sequence[Any]  # stacked inputs for each layer, except weights
    scan: Scan = dataclasses.field(metadata={"static": True})  # without values
    stacks: tuple[int, ...] = dataclasses.field(metadata={"static": True})


def _layer(weights: PyTree, carry: PyTree, shared: _Shared) -> Any:
    index, carry, outputs = carry
    entries = dict(zip(shared.stacks, jax.tree.leaves(weights), strict=True))
    inputs = (jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for x in shared.inputs)
    layer = [entries[x.index] if is_stack(x) else next(inputs) for x in shared.scan.layers]
    carry, made = shared.scan.run_body(shared.consts, carry, layer)
    outputs = {i: x.at[index].set(made[i]) for i, x in outputs.items()}
    return index + (-1 if shared.scan.reverse else 1), carry, outputs


class _Finding(Evaluation):
    """Finds the leaves that scans read layer by layer, without values."""

    checks = False  # a scan's body may also read outer weights

    def scan(self, scan: Scan) -> Sequence[Any]:
        return [None] * len(scan.body.out_avals)

    def other(self, equation: JaxprEqn, inputs: Sequence[object]) -> Sequence[Any]:
        return [None] * len(equation.outvars)


class _Reached(Exception):
    """Ends an evaluation at the scan."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cutting(Evaluation):
    """Ends at the scan over the layers, unless the scan's results are given."""

    results: Sequence[Any] | None = None
    scans: list[Scan] = dataclasses.field(default_factory=list)

    def scan(self, scan: Scan) -> Sequence[Any]:
        self.scans.append(scan)
        if self.results is None:
            raise _Reached
        if len(self.scans) > 1:
            pairs = [(next(filter(is_stack, x.layers)).name, x.line) for x in self.scans]
            raise ValueError(
                f"The loss scans {' and '.join(f'{name} at {line}' for name, line in pairs)}, but "
                "only one scan can run layer by layer. Choose its stacks with "
                f"`{_CHOOSER}(where=...)`; the device then holds the other stacks as outer weights."
            )
        return self.results


def _names(params: PyTree) -> list[str]:
    return [plain_name(x) for x, _ in jax.tree_util.tree_leaves_with_path(as_pure(params))]


def _shapes_of(tree: PyTree) -> Any:
    return jax.tree.map(lambda x: x.update(sharding=None), types_of(tree))


def _slices(name: str, x: Any) -> Callable[[int], Any]:
    """Returns a function that returns a layer of a stack, in host memory."""
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return np.asarray(x).__getitem__
    shape, sharding = x.shape[1:], layer_sharding(x.sharding)
    if sharding is None:
        raise ValueError(
            f"The layers of {name} are divided over devices, or it has no `NamedSharding`. Place "
            "it with a `NamedSharding` that leaves the first axis whole."
        )
    if isinstance(x, jax.ShapeDtypeStruct):
        return lambda _: jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
    in_host = sharding.with_memory_kind(HOST)
    shards = [(np.asarray(shard.data), shard.device) for shard in x.addressable_shards]

    def layer(i: int) -> jax.Array:
        pieces = [upload(shard[i], device, HOST) for shard, device in shards]
        return jax.make_array_from_single_device_arrays(shape, in_host, pieces)

    return layer
