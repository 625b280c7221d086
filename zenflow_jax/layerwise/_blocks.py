"""Blocks: layers, or the outer weights, with the arrays of their leaves.

Large arrays wait in pinned host memory. No array ever changes: an update makes new ones. So a save,
or a caller of `params`, may keep the old ones.
"""

import dataclasses
import functools
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

from zenflow_jax._device.memory import HOST
from zenflow_jax._exchange.pinned import check_pinned
from zenflow_jax._spec.leaf import DTYPES
from zenflow_jax.layerwise._optimizer import (
    Control,
    Parts,
    Updater,
    divide,
    flat,
    is_large,
    join,
    others,
    unflat,
)
from zenflow_jax.layerwise._separable import check_separable, leaf_name
from zenflow_jax.layerwise._transfers import bytes_here, moved

#: Neighbouring leaves are updated together, by one program, up to this size.
_BUNDLE_BYTES = 32 * 1024**2


@dataclasses.dataclass(frozen=True, eq=False)
class Bundle:
    """Neighbouring leaves of a block that are updated together."""

    places: tuple[int, ...]
    number: np.int32  # the first leaf's, among all trained leaves
    shapes: Sequence[Parts]
    program: Callable[..., Any]
    large: Sequence[bool]  # for each of the `flat` arrays
    # Of the large arrays, and of those that are weights, on one device.
    nbytes: int
    weights_nbytes: int


@dataclasses.dataclass(eq=False)
class Block:
    """A layer, or the outer weights."""

    name: str
    treedef: Any
    trains: bool
    paths: Sequence[str]
    shapes: Sequence[Parts]  # with shardings in device memory
    bundles: Sequence[Bundle]  # none if frozen
    leaves: list[Parts]  # the current arrays

    @property
    def abstract(self) -> Any:
        """Returns the weights' shapes and placements, as the user's tree."""
        return self.treedef.unflatten([x.weight for x in self.shapes])

    @functools.cached_property
    def weights_nbytes(self) -> int:
        """Returns the bytes of the large weights on one device."""
        return _large_bytes([x.weight for x in self.shapes])

    @functools.cached_property
    def _large(self) -> list[bool]:
        return [is_large(x.weight) for x in self.shapes]

    def weights(self) -> list[jax.Array]:
        return [leaf.weight for leaf in self.leaves]

    def fetch_weights(self) -> list[jax.Array]:
        """Starts to copy the large weights to the device, where the small ones are."""
        return _large_moved(self.weights(), self._large, "device")

    def fetch_others(self, bundle: Bundle) -> list[jax.Array]:
        """Starts to copy the large arrays that only an update reads."""
        arrays = others([self.leaves[i] for i in bundle.places])
        return _large_moved(arrays, bundle.large[len(bundle.places) :], "device")

    def fetch_all(self, bundle: Bundle) -> list[jax.Array]:
        """Starts to copy all large arrays of a bundle to the device; returns `flat` arrays."""
        return _large_moved(flat([self.leaves[i] for i in bundle.places]), bundle.large, "device")

    def fetch_sent(self, bundle: Bundle, gradient: Sequence[jax.Array]) -> list[jax.Array]:
        """Starts to copy a bundle's gradient, from `sent`, back to the device."""
        return _large_moved(gradient, bundle.large[: len(gradient)], "device")

    def sent(self, gradient: Sequence[jax.Array]) -> list[jax.Array]:
        """Starts to copy the gradient of large weights to host memory."""
        return _large_moved(gradient, self._large, HOST)

    def update(
        self,
        bundle: Bundle,
        arrays: Sequence[jax.Array],
        gradients: Sequence[jax.Array],
        control: Control,
    ) -> tuple[list[jax.Array], jax.Array]:
        """Updates a bundle; returns its copies in host memory, and the control's new report.

        `arrays` are the leaves' `flat` arrays, on the device; the large ones are donated.
        """
        moving, staying = divide(arrays, bundle.large)
        moving, staying, report = bundle.program(moving, staying, gradients, control, bundle.number)
        moving = moved(moving, HOST)
        self.replace(bundle, join(moving, staying, bundle.large))
        return moving, report

    def replace(self, bundle: Bundle, arrays: Sequence[jax.Array]) -> None:
        """Replaces the leaves of a bundle by `flat` arrays."""
        for i, leaf in zip(bundle.places, unflat(arrays, bundle.shapes), strict=True):
            self.leaves[i] = leaf


class BlockMaker:
    """Makes blocks, one at a time, in order."""

    def __init__(self, optimizer: optax.GradientTransformation, updater: Updater, saved: Any):
        self._optimizer, self._updater, self._saved = optimizer, updater, saved
        self._number = 0  # trained leaves so far
        self._checked: set[Any] = set()

    def make(self, name: str, tree: Any, *, trains: bool) -> Block:
        """Makes a block from the user's tree or, if it trains, from the saved state."""
        pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
        paths = [leaf_name(name, path) for path, _ in pairs]
        given = [x for _, x in pairs]
        weights = [_shape_of(path, x) for path, x in zip(paths, given, strict=True)]
        if not trains:
            shapes = [Parts(x, ()) for x in weights]
            _check_values(paths, given)
            leaves = [Parts(x, ()) for x in _at_rest([*map(_copied, given, weights)], weights)]
            return Block(name, treedef, trains, paths, shapes, (), leaves)
        kind = treedef, tuple((x.shape, x.dtype) for x in weights)
        if kind not in self._checked:
            check_separable(self._optimizer, name, tree=treedef.unflatten(weights))
            self._checked.add(kind)
        shapes = [self._updater.shapes(treedef, i, x) for i, x in enumerate(weights)]
        bundles = [*self._bundles(treedef, shapes)]
        block = Block(name, treedef, trains, paths, shapes, bundles, [*shapes])
        for bundle in bundles:
            if self._saved is None:
                _check_values(paths, given)
                program = self._updater.init(treedef, bundle.places, bundle.shapes)
                arrays = program([_on_device(given[i], weights[i]) for i in bundle.places])
            else:
                names = [paths[i] for i in bundle.places]
                arrays = self._saved.read(int(bundle.number), names, bundle.shapes)
            block.replace(bundle, _at_rest(arrays, flat(bundle.shapes)))
        self._number += len(paths)
        return block

    def _bundles(self, treedef: Any, shapes: Sequence[Parts]) -> Iterator[Bundle]:
        sizes = [sum(map(bytes_here, flat([leaf]))) for leaf in shapes]
        begin = 0
        for end in range(1, len(shapes) + 1):
            if end < len(shapes) and sum(sizes[begin : end + 1]) <= _BUNDLE_BYTES:
                continue
            places, chosen = tuple(range(begin, end)), shapes[begin:end]
            arrays = flat(chosen)
            yield Bundle(
                places,
                np.int32(self._number + begin),
                chosen,
                self._updater.update(treedef, places, chosen),
                [*map(is_large, arrays)],
                _large_bytes(arrays),
                _large_bytes([x.weight for x in chosen]),
            )
            begin = end


def make_blocks(
    params: Any, frozen: Collection[int | str], maker: BlockMaker, *, at_once: bool
) -> list[Block]:
    """Makes all blocks, with their arrays in host memory."""
    if not isinstance(params, Mapping) or params.keys() != {"outer", "layers"}:
        raise TypeError('`params` must be a mapping with the keys "outer" and "layers".')
    if isinstance(params["layers"], Mapping):
        raise TypeError('`params["layers"]` is a mapping. Pass a list with one tree per layer.')
    if isinstance(frozen, str):
        raise TypeError(f"`frozen` is a string. Pass a list, such as [{frozen!r}].")
    made = [maker.make("outer", params["outer"], trains="outer" not in frozen)]
    numbers: Iterable[int] = getattr(params["layers"], "numbers", itertools.count())
    for i, (number, tree) in enumerate(zip(numbers, params["layers"], strict=False)):
        made.append(maker.make(f"layers.{number}", tree, trains=i not in frozen))
        # Checked after every layer, so that this error is raised before jax's own error.
        _check_pinned(made, at_once=at_once)
    if len(made) == 1:
        raise ValueError(
            '`params["layers"]` has no layers. Pass at least one; an iterator works only once.'
        )
    check_names(frozen, len(made) - 1)
    return made


def check_names(names: Collection[int | str], layers: int) -> None:
    if unknown := set(names) - {"outer", *range(layers)}:
        raise ValueError(
            f"There is no layer {sorted(map(str, unknown))}: the layers are 0 to {layers - 1}. Use "
            'these numbers, and "outer" for the outer weights.'
        )


def bytes_at_rest(blocks: Sequence[Block]) -> Counter[Any]:
    """Returns the bytes in pinned host memory between steps, for each of this process's devices."""
    sizes = Counter[Any]()
    for x in (x for block in blocks for x in flat(block.shapes) if is_large(x)):
        sizes.update(dict.fromkeys(x.sharding.addressable_devices, bytes_here(x)))
    return sizes


def _check_pinned(blocks: Sequence[Block], *, at_once: bool) -> None:
    """Rejects arrays that exceed a GPU's pinned-memory limit."""
    gradients = Counter[Any]()
    for x in (leaf.weight for block in blocks if block.trains for leaf in block.shapes):
        gradients.update(dict.fromkeys(x.sharding.addressable_devices, bytes_here(x)))
    for device, size in bytes_at_rest(blocks).items():
        needs = {"weights and state": size} | ({} if at_once else {"gradients": gradients[device]})
        check_pinned(needs, device.platform)


def _large_bytes(shapes: Sequence[Any]) -> int:
    return sum(bytes_here(x) for x in shapes if is_large(x))


def _shape_of(path: str, x: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(x, "dtype") and not isinstance(x, float | int | list | tuple):
        raise TypeError(
            f"{path} is a {type(x).__name__}, not an array. Pass only arrays; with equinox, "
            "`eqx.filter(block, eqx.is_inexact_array)`."
        )
    if (dtype := jnp.result_type(x)) not in DTYPES:
        raise TypeError(
            f"{path} is {dtype.name}, but weights must be float32, bfloat16 or float16. Pass "
            "arrays that are not weights in the batch, or return them from `first` in `shared`."
        )
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        where: Any = SingleDeviceSharding(jax.local_devices()[0])
    elif (where := x.sharding) is None:
        raise TypeError(f"{path} has a shape without a sharding. Pass `sharding=` to its struct.")
    where = where.with_memory_kind("device")
    return jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=where)


def _check_values(paths: Sequence[str], given: Sequence[Any]) -> None:
    for path, x in zip(paths, given, strict=True):
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(f"{path} has a shape but no values. Pass an array, or pass `state`.")


def _on_device(x: Any, shape: Any) -> jax.Array:
    if isinstance(x, jax.Array):
        return x if x.sharding.memory_kind == "device" else moved(x, "device")
    return jax.device_put(np.asarray(x, shape.dtype), shape.sharding)


def _copied(x: Any, shape: Any) -> jax.Array:
    """Returns a copy on the device, which shares no memory with the caller's array."""
    return jnp.copy(_on_device(x, shape))


def _at_rest(arrays: Sequence[jax.Array], shapes: Sequence[Any]) -> list[jax.Array]:
    """Copies the large arrays to host memory, and waits for the copies.

    The user may reuse NumPy's memory for the next layer, and the device holds one layer at a time.
    """
    return jax.block_until_ready(_large_moved(arrays, [*map(is_large, shapes)], HOST))


def _large_moved(arrays: Sequence[jax.Array], large: Sequence[bool], kind: str) -> list[jax.Array]:
    """Starts to copy the large arrays to a memory kind; returns all arrays."""
    moving, staying = divide(arrays, large)
    return join(moved(moving, kind), staying, large)


def checksum_of_names(blocks: Sequence[Block], updater: Updater) -> np.ndarray:
    """Returns a checksum of the trained leaves' names, also in the optimizer's state.

    Equal shapes prove too little.
    """
    names = (
        "/".join((path, *updater.names(block.treedef, i, shape.weight)))
        for block in blocks
        if block.trains
        for i, (path, shape) in enumerate(zip(block.paths, block.shapes, strict=True))
    )
    # flax nnx adds the suffix, or not, to the same parameter.
    text = "\n".join(name.replace(".value", "") for name in names)
    return np.array(zlib.crc32(text.encode()), np.uint32)
