"""Blocks: layers, or the outer weights, with the arrays of their leaves.

Large arrays wait in pinned host memory. No array ever changes: an update makes new ones. So a save,
or a caller of `params`, may keep the old ones.
"""

import dataclasses
import itertools
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from zenflow_jax._device.memory import HOST
from zenflow_jax._exchange.pinned import check_pinned
from zenflow_jax._spec.leaf import DTYPES
from zenflow_jax._spec.rules import UnfitRunError
from zenflow_jax.layerwise._optimizer import Control, Parts, Updater, flat, is_large, unflat
from zenflow_jax.layerwise._separable import check_separable, leaf_name
from zenflow_jax.layerwise._transfers import bytes_here, large_bytes, large_moved, moved

#: Neighbouring leaves are updated together, by one program, up to this size.
_BUNDLE_BYTES = 32 * 1024**2


@dataclasses.dataclass(eq=False)
class Bundle:
    """Neighbouring leaves of a block that are updated together."""

    places: tuple[int, ...]
    number: np.int32  # the first leaf's, among all trained leaves
    shapes: tuple[Parts, ...]  # with shardings in device memory
    nbytes: int  # of the large arrays, and of the weights among them, on one device
    weights_nbytes: int
    arrays: list[jax.Array] = dataclasses.field(default_factory=list)  # the current ones, `flat`
    program: Any = None  # `Updater.update`, because a look-up takes as long as a call

    @property
    def weights(self) -> list[jax.Array]:
        return self.arrays[: len(self.places)]

    @property
    def others(self) -> list[jax.Array]:
        return self.arrays[len(self.places) :]

    @property
    def leaves(self) -> list[Parts]:
        return unflat(self.arrays, self.shapes)


@dataclasses.dataclass(eq=False)
class Block:
    """A layer, or the outer weights."""

    name: str
    treedef: Any
    trains: bool
    names: Sequence[tuple[str, ...]]  # each leaf's, and those of its optimizer state
    bundles: Sequence[Bundle]
    updater: Updater

    def __post_init__(self) -> None:
        self.shapes = [x for bundle in self.bundles for x in bundle.shapes]
        self.weights_nbytes = sum(bundle.weights_nbytes for bundle in self.bundles)
        for bundle in self.bundles if self.trains else ():
            bundle.program = self.updater.update(self.treedef, bundle.places, bundle.shapes)

    def weights(self) -> list[jax.Array]:
        return [x for bundle in self.bundles for x in bundle.weights]

    def fill(self, bundle: Bundle, given: Sequence[Any], saved: Any) -> None:
        """Makes a bundle's arrays from the user's leaves or, if it trains, from a saved state."""
        paths = [self.names[i][0] for i in bundle.places]
        if self.trains and saved is not None:
            arrays = saved.read(int(bundle.number), paths, bundle.shapes)
        else:
            weights = map(_on_device, paths, [given[i] for i in bundle.places])
            arrays = self.updater.init(self.treedef, bundle.places, bundle.shapes)([*weights])
        # The user may reuse NumPy's memory, and the device holds one bundle at a time.
        bundle.arrays = jax.block_until_ready(large_moved(arrays, HOST))

    def update(self, bundle: Bundle, arrays: Any, gradients: Any, control: Control) -> jax.Array:
        """Updates a bundle from its `flat` arrays on the device; returns the new report.

        The large arrays are donated, and their copies in host memory may still be on their way.
        """
        new, report = bundle.program(gradients, control, bundle.number, *arrays)
        bundle.arrays = large_moved(new, HOST)
        return report


def make_blocks(
    params: Any,
    frozen: Collection[int | str],
    updater: Updater,
    saved: Any,
    *,
    gradients: bool,
) -> list[Block]:
    """Makes all blocks, in order, with their arrays where they wait.

    `gradients` is whether gradients may wait in pinned memory, too.
    """
    if not isinstance(params, Mapping) or params.keys() != {"outer", "layers"}:
        raise TypeError('`params` must be a mapping with the keys "outer" and "layers".')
    if isinstance(frozen, str):
        raise TypeError(f"`frozen` is a string. Pass a list, such as [{frozen!r}].")
    numbers: Iterable[int] = getattr(params["layers"], "numbers", itertools.count())
    layers = enumerate(zip(numbers, params["layers"], strict=False))
    named = ((i, f"layers.{number}", tree) for i, (number, tree) in layers)
    made: list[Block] = []
    checked, number, fits = set[Any](), 0, True
    for key, name, tree in itertools.chain([("outer", "outer", params["outer"])], named):
        trains = key not in frozen
        block, given = _described(name, tree, updater, number, checked, trains=trains)
        made.append(block)
        number += trains * len(given)
        try:
            if fits:
                _check_pinned(made, gradients=gradients)
        except UnfitRunError:
            fits = False  # the other blocks are only counted, for the error
        for bundle in block.bundles if fits else ():
            block.fill(bundle, given, saved)
    if not fits:
        _check_pinned(made, gradients=gradients)
    if len(made) == 1:
        raise ValueError(
            '`params["layers"]` has no layers. Pass at least one; an iterator works only once.'
        )
    check_names(frozen, len(made) - 1)
    return made


def _described(
    name: str, tree: Any, updater: Updater, number: int, checked: set[Any], *, trains: bool
) -> tuple[Block, list[Any]]:
    """Returns a block without arrays, and the user's leaves; `checked` are kinds of trees."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    paths, given = [leaf_name(name, path) for path, _ in pairs], [x for _, x in pairs]
    weights = [*map(_shape_of, paths, given)]
    shapes, names = [Parts(x, ()) for x in weights], [(path,) for path in paths]
    kind = treedef, tuple((x.shape, x.dtype) for x in weights)
    if trains and weights and kind not in checked:
        check_separable(updater.optimizer, name, treedef.unflatten(weights))
        checked.add(kind)
    if trains:
        leaves = [(treedef, i, x) for i, x in enumerate(weights)]
        shapes = [updater.shapes(*leaf) for leaf in leaves]
        names = [(path, *updater.names(*x)) for path, x in zip(paths, leaves, strict=True)]
    bundles = [*bundles_of(shapes, number)]
    return Block(name, treedef, trains, names, bundles, updater), given


def bundles_of(shapes: Sequence[Parts], number: int) -> Iterator[Bundle]:
    """Yields the bundles of a block, whose first leaf has this number."""
    sizes = [sum(map(bytes_here, flat([leaf]))) for leaf in shapes]
    begin = 0
    for end in range(1, len(shapes) + 1):
        if end < len(shapes) and sum(sizes[begin : end + 1]) <= _BUNDLE_BYTES:
            continue
        chosen = tuple(shapes[begin:end])
        nbytes = large_bytes(flat(chosen)), large_bytes([x.weight for x in chosen])
        yield Bundle(tuple(range(begin, end)), np.int32(number + begin), chosen, *nbytes)
        begin = end


def _check_pinned(blocks: Sequence[Block], *, gradients: bool) -> None:
    """Raises an error if one device needs more pinned memory than jax has for it."""
    trained = [x.weight for block in blocks if block.trains for x in block.shapes]
    more = _bytes_by_device(trained)
    for device, size in bytes_at_rest(blocks).items():
        needs = {"weights and state": size, "gradients": gradients * more[device]}
        check_pinned({name: x for name, x in needs.items() if x}, device.platform)


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
    """Returns the bytes of large arrays for each of this process's devices."""
    sizes = Counter[Any]()
    for x in filter(is_large, shapes):
        sizes.update(dict.fromkeys(x.sharding.addressable_devices, bytes_here(x)))
    return sizes


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
