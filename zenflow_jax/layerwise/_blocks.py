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
from zenflow_jax._spec.rules import UnfitRunError
from zenflow_jax.layerwise._optimizer import (
    Control,
    Parts,
    Updater,
    divide,
    flat,
    is_large,
    join,
    unflat,
)
from zenflow_jax.layerwise._separable import check_separable, leaf_name
from zenflow_jax.layerwise._transfers import bytes_here, large_moved, moved

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
    nbytes: int  # of the large arrays, and of the weights among them, on one device
    weights_nbytes: int


@dataclasses.dataclass(eq=False)
class Block:
    """A layer, or the outer weights."""

    name: str
    treedef: Any
    trains: bool
    names: Sequence[tuple[str, ...]]  # each leaf's, and those of its optimizer state
    shapes: Sequence[Parts]  # with shardings in device memory
    bundles: Sequence[Bundle]  # none if frozen
    leaves: list[Parts]  # the current arrays

    @functools.cached_property
    def large(self) -> list[bool]:
        """Returns which weights wait in host memory."""
        return [is_large(x.weight) for x in self.shapes]

    @functools.cached_property
    def weights_nbytes(self) -> int:
        """Returns the bytes of these weights on one device."""
        return _large_bytes([x.weight for x in self.shapes])

    def weights(self) -> list[jax.Array]:
        return [leaf.weight for leaf in self.leaves]

    def arrays(self, bundle: Bundle) -> list[jax.Array]:
        """Returns the `flat` arrays of a bundle."""
        return flat([self.leaves[i] for i in bundle.places])

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

    def make(self, name: str, tree: Any, *, trains: bool) -> tuple[Block, Callable[[], None]]:
        """Returns a block without arrays, and a function that makes them.

        They come from the user's tree or, if the block trains, from the saved state.
        """
        pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
        paths, given = [leaf_name(name, path) for path, _ in pairs], [x for _, x in pairs]
        weights = [_shape_of(path, x) for path, x in zip(paths, given, strict=True)]
        kind = treedef, tuple((x.shape, x.dtype) for x in weights)
        if trains and weights and kind not in self._checked:
            check_separable(self._optimizer, name, treedef.unflatten(weights))
            self._checked.add(kind)
        shapes, names = [Parts(x, ()) for x in weights], [(path,) for path in paths]
        if trains:
            leaves = [(treedef, i, x) for i, x in enumerate(weights)]
            shapes = [self._updater.shapes(*leaf) for leaf in leaves]
            names = [
                (path, *self._updater.names(*x)) for path, x in zip(paths, leaves, strict=True)
            ]
        bundles = [*self._bundles(treedef, shapes)]
        block = Block(name, treedef, trains, names, shapes, bundles if trains else (), [*shapes])
        self._number += trains * len(paths)

        def fill() -> None:
            for bundle in bundles:
                chosen = [paths[i] for i in bundle.places]
                if trains and self._saved is not None:
                    arrays = self._saved.read(int(bundle.number), chosen, bundle.shapes)
                else:
                    program = self._updater.init(treedef, bundle.places, bundle.shapes)
                    arrays = program([_on_device(paths[i], given[i]) for i in bundle.places])
                # The user may reuse NumPy's memory, and the device holds one bundle at a time.
                arrays = large_moved(arrays, bundle.large, HOST)
                block.replace(bundle, jax.block_until_ready(arrays))

        return block, fill

    def _bundles(self, treedef: Any, shapes: Sequence[Parts]) -> Iterator[Bundle]:
        sizes = [sum(map(bytes_here, flat([leaf]))) for leaf in shapes]
        begin = 0
        for end in range(1, len(shapes) + 1):
            if end < len(shapes) and sum(sizes[begin : end + 1]) <= _BUNDLE_BYTES:
                continue
            places, chosen = tuple(range(begin, end)), shapes[begin:end]
            yield Bundle(
                places,
                np.int32(self._number + begin),
                chosen,
                self._updater.update(treedef, places, chosen),
                [*map(is_large, flat(chosen))],
                _large_bytes(flat(chosen)),
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
    made: list[Block] = []
    unfit: UnfitRunError | None = None
    pinned, gradients = Counter[Any](), Counter[Any]()
    numbers: Iterable[int] = getattr(params["layers"], "numbers", itertools.count())
    layers = enumerate(zip(numbers, params["layers"], strict=False))
    named = ((i, f"layers.{number}", tree) for i, (number, tree) in layers)
    for key, name, tree in itertools.chain([("outer", "outer", params["outer"])], named):
        block, fill = maker.make(name, tree, trains=key not in frozen)
        made.append(block)
        pinned.update(bytes_at_rest([block]))
        if block.trains and not at_once:
            gradients.update(_bytes_by_device([x.weight for x in block.shapes]))
        # Once memory is too small, the other blocks are only counted, for the error.
        unfit = unfit or _unfit(pinned, gradients)
        if unfit is None:
            fill()
    if unfit is not None:
        raise _unfit(pinned, gradients) or unfit
    if len(made) == 1:
        raise ValueError(
            '`params["layers"]` has no layers. Pass at least one; an iterator works only once.'
        )
    check_names(frozen, len(made) - 1)
    return made


def _unfit(pinned: Counter[Any], gradients: Counter[Any]) -> UnfitRunError | None:
    """Returns an error if one device needs more pinned memory than jax has for it."""
    for device, size in pinned.items():
        needs = {"weights and state": size, "gradients": gradients[device]}
        try:
            check_pinned({name: x for name, x in needs.items() if x}, device.platform)
        except UnfitRunError as error:
            return error
    return None


def check_names(names: Collection[int | str], layers: int) -> None:
    if unknown := set(names) - {"outer", *range(layers)}:
        raise ValueError(
            f"There is no layer {sorted(map(str, unknown))}: the layers are 0 to {layers - 1}. Use "
            'these numbers, and "outer" for the outer weights.'
        )


def bytes_at_rest(blocks: Sequence[Block]) -> Counter[Any]:
    """Returns the bytes in pinned host memory between steps, for each of this process's devices."""
    return _bytes_by_device([x for block in blocks for x in flat(block.shapes)])


def _bytes_by_device(shapes: Sequence[Any]) -> Counter[Any]:
    sizes = Counter[Any]()
    for x in filter(is_large, shapes):
        sizes.update(dict.fromkeys(x.sharding.addressable_devices, bytes_here(x)))
    return sizes


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
            f"{path} is {dtype.name}, but weights must be float32 or bfloat16. Pass "
            "arrays that are not weights in the batch, or return them from `first` in `shared`."
        )
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        where: Any = SingleDeviceSharding(jax.local_devices()[0])
    elif (where := x.sharding) is None:
        raise TypeError(f"{path} has a shape without a sharding. Pass `sharding=` to its struct.")
    where = where.with_memory_kind("device")
    return jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=where)


def _on_device(path: str, x: Any) -> jax.Array:
    if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(f"{path} has a shape but no values. Pass an array, or pass `state`.")
    if isinstance(x, jax.Array):
        return x if x.sharding.memory_kind == "device" else moved(x, "device")
    shape = _shape_of(path, x)
    return jax.device_put(np.asarray(x, shape.dtype), shape.sharding)


def checksum_of_names(blocks: Sequence[Block]) -> np.ndarray:
    """Returns a checksum of the trained leaves' names, also in the optimizer's state.

    Equal shapes prove too little.
    """
    names = ["/".join(name) for block in blocks if block.trains for name in block.names]
    # flax nnx adds the suffix, or not, to the same parameter.
    return np.array(zlib.crc32("\n".join(names).replace(".value", "").encode()), np.uint32)
