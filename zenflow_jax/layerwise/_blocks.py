"""Blocks: layers, or the outer weights, with the arrays of their leaves.

They wait in pinned host memory. No array ever changes: an update makes new ones. So a save,
or a caller of `params`, may keep the old ones.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding
from jaxtyping import PyTree

from zenflow_jax._device.memory import HOST
from zenflow_jax._exchange.pinned import check_pinned
from zenflow_jax._spec.checks import UnfitRunError
from zenflow_jax._spec.leaf import DTYPES
from zenflow_jax.layerwise._optimizer import Bundle, Kind
from zenflow_jax.layerwise._separable import check_separable, leaf_name
from zenflow_jax.layerwise._transfers import moved


@dataclasses.dataclass(eq=False)
class Block:
    """A layer, or the outer weights."""

    name: str
    kind: Kind
    number: int  # the first leaf's, among all leaves
    arrays: list[list[jax.Array]] = dataclasses.field(default_factory=list)  # of each bundle

    @property
    def bundles(self) -> Iterator[tuple[Bundle, list[jax.Array]]]:
        return zip(self.kind.bundles, self.arrays, strict=True)

    def tree(self, leaves: Sequence[Any]) -> Any:
        return self.kind.treedef.unflatten(leaves)

    def weights(self) -> list[jax.Array]:
        return [x for bundle, arrays in self.bundles for x in arrays[: len(bundle.places)]]

    def paths(self) -> list[str]:
        return [leaf_name(self.name, path) for path in self.kind.paths]

    def fill(self, given: Sequence[Any], saved: Any) -> None:
        """Makes the arrays from the user's leaves or from a saved state."""
        paths = self.paths()
        for bundle in self.kind.bundles:
            if saved is None:
                arrays = bundle.init([_on_device(given[i]) for i in bundle.places])
                arrays = moved(HOST, arrays)
            else:
                shapes = zip(bundle.places, *bundle.shapes, strict=True)
                read = [saved.read(self.number + i, paths[i], leaf) for i, *leaf in shapes]
                arrays = [x for x, *_ in read] + [x for _, *others in read for x in others]
            # The user may reuse NumPy's memory, and the device holds one bundle at a time.
            self.arrays.append(jax.block_until_ready(arrays))


def make_blocks(
    params: PyTree,
    optimizer: optax.GradientTransformation | None,
    jit: Any,
    saved: PyTree,
    *,
    gradients: bool,
) -> list[Block]:
    """Makes all blocks, in order, with their arrays where they wait.

    `gradients` is whether gradients may wait in pinned memory, too.
    """
    numbers: Iterable[int] = getattr(params["layers"], "numbers", itertools.count())
    layers = zip(numbers, params["layers"], strict=False)
    named = ((f"layers.{number}", tree) for number, tree in layers)
    made: list[Block] = []
    kinds, number = dict[Any, Kind](), 0
    for name, tree in itertools.chain([("outer", params["outer"])], named):
        pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
        shapes = tuple(_shape_of(leaf_name(name, path), x) for path, x in pairs)
        if (alike := (treedef, shapes)) not in kinds:
            if optimizer and shapes:
                check_separable(optimizer, name, treedef.unflatten(shapes))
            kinds[alike] = Kind(treedef.unflatten(shapes), optimizer, jit)
        made.append(Block(name, kinds[alike], number))
        number += len(shapes)
        try:
            _check_pinned(made, gradients=gradients)
        except UnfitRunError:
            continue  # only counts the other blocks, for the error below
        made[-1].fill([x for _, x in pairs], saved)
    _check_pinned(made, gradients=gradients)
    if len(made) == 1:
        raise ValueError(
            '`params["layers"]` has no layers. Pass at least one; an iterator works only once.'
        )
    return made


def _check_pinned(blocks: Sequence[Block], *, gradients: bool) -> None:
    """Raises an error if one device needs more pinned memory than jax has for it."""
    kinds = [block.kind for block in blocks]
    sent = gradients * sum(kind.weights_nbytes for kind in kinds)
    needs = {"weights and state": sum(kind.nbytes for kind in kinds), "gradients": sent}
    for device in devices_of(blocks[-1:]):
        check_pinned({name: x for name, x in needs.items() if x}, device.platform)


def devices_of(blocks: Sequence[Block]) -> set[Any]:
    return {x for block in blocks for w in block.kind.weights for x in w.sharding.device_set}


def _shape_of(path: str, x: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(x, "dtype") or x.dtype not in DTYPES:
        raise TypeError(
            f"{path} is {getattr(x, 'dtype', x)}, but weights must be float32 or bfloat16 arrays. "
            "Pass others in the batch; with equinox, use `eqx.filter(block, eqx.is_inexact_array)`."
        )
    first_device = SingleDeviceSharding(jax.local_devices()[0])
    where: Any = getattr(x, "sharding", first_device)
    if where is None:
        raise TypeError(f"{path} has a shape without a sharding. Pass `sharding=` to its struct.")
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where.with_memory_kind("device"))


def _on_device(x: Any) -> jax.Array:
    if isinstance(x, jax.Array):
        return x if x.sharding.memory_kind == "device" else moved("device", [x])[0]
    return jax.device_put(x, jax.local_devices()[0])


def checksum_of_names(blocks: Sequence[Block]) -> np.ndarray:
    """Returns a checksum of the leaves' names, also in the optimizer's state.

    Equal shapes prove too little.
    """
    names = []
    for block in blocks:
        for path, (_, state) in zip(block.paths(), block.kind.others, strict=True):
            inner = (jax.tree_util.keystr(x) for x, _ in jax.tree_util.tree_leaves_with_path(state))
            names.append("/".join((path, *inner)))
    # flax nnx adds the suffix, or not, to the same parameter.
    return np.array(zlib.crc32("\n".join(names).replace(".value", "").encode()), np.uint32)
