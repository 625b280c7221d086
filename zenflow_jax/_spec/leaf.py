"""The static metadata of a leaf: its shape, channel axis and number of selected channels."""

import dataclasses
import math
import sys
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from zenflow_jax._spec.mesh import Placement

T = TypeVar("T", jax.Array, np.ndarray)
Axis = TypeVar("Axis")

#: Dtypes that a leaf may have. Wider dtypes would lose bits in float32 arithmetic. In float16, most
#: gradients underflow unless the loss is scaled, and no 16 bits complete a weight to its master.
DTYPES = tuple(np.dtype(d) for d in (jnp.float32, jnp.bfloat16))


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """The static metadata of a leaf; hashable, because it is part of the state's treedef."""

    name: str  # key path, formatted by `plain_name`
    shape: tuple[int, ...]
    dtype: np.dtype
    axis: int | None  # channel axis, counted from the front; None for a resident leaf
    k: int  # selected channels in each stack entry; 0 for a resident leaf
    decay: bool = True  # whether weight decay applies
    placement: Placement | None = None  # None on one device
    transfer_dtype: np.dtype | None = None  # dtype of its mail; None for the leaf's own dtype
    # The group of each range on its first stack axis; usually there is only one range.
    groups: tuple[int, ...] = (0,)
    start: int | None = None  # for a range of a stacked leaf: its first entry
    lr_scale: float = 1.0  # multiplies the learning rate

    @property
    def anonymous(self) -> "LeafSpec":
        """Returns a spec that all similar leaves have in common, so that they share programs."""
        return dataclasses.replace(self, name="", decay=False, groups=(0,), lr_scale=1.0)

    @property
    def group(self) -> int:
        """Returns the group of an uncut leaf, or of a range."""
        (group,) = self.groups
        return group

    @property
    def ranges(self) -> tuple["LeafSpec", ...]:
        """Returns the specs of the leaf's ranges, in order, or the leaf itself if it is not cut."""
        count = len(self.groups)
        if count == 1:
            return (self,)
        ends = [self.shape[0] * i // count for i in range(count + 1)]
        return tuple(
            dataclasses.replace(
                self, shape=(high - low, *self.shape[1:]), groups=(group,), start=low
            )
            for group, low, high in zip(self.groups, ends[:-1], ends[1:], strict=True)
        )

    @property
    def mail_dtype(self) -> np.dtype:
        return self.transfer_dtype or self.dtype

    @property
    def copies(self) -> int:
        """Returns how many devices hold each part and send its gradient in a step."""
        place = self.placement
        return 1 if place is None else place.mesh.size // math.prod(map(place.count, place.part))

    @property
    def resident(self) -> bool:
        return self.axis is None

    @property
    def keeps_master(self) -> bool:
        """Returns whether the device holds a separate float32 master."""
        return self.dtype != np.float32

    @property
    def stack(self) -> tuple[int, ...]:
        assert self.axis is not None
        return self.shape[: min(self.axis, len(self.shape) - 2)]

    @property
    def n(self) -> int:
        assert self.axis is not None
        return self.shape[self.axis]

    @property
    def pieces(self) -> int:
        """Returns the number of the channel axis's pieces, which select channels independently."""
        assert self.axis is not None
        place = self.placement
        return 1 if place is None else place.count(place.block[self.axis])

    @property
    def selected_shape(self) -> tuple[int, ...]:
        """Returns the shape of selected arrays: the leaf's, with `k` channels."""
        assert self.axis is not None
        return (*self.shape[: self.axis], self.k, *self.shape[self.axis + 1 :])

    @property
    def trailing(self) -> bool:
        """Returns whether channels are the last axis; the host then has the last two exchanged."""
        return self.axis == len(self.shape) - 1 > 0

    def exchanged(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Returns one value per axis, such as a shape, in the host's axis order."""
        return (*axes[:-2], axes[-1], axes[-2]) if self.trailing else axes

    def turned(self, x: T) -> T:
        """Returns a jax or NumPy array of this leaf in the host's axis order, or the reverse."""
        return x.swapaxes(-2, -1) if self.trailing else x

    @property
    def on_host(self) -> "LeafSpec":
        """Returns the leaf in the host's axis order, in which a channel's elements are neighbours.

        Mail, the host's arrays, uploads and the engine's saved state have this order.
        """
        if not self.trailing:
            return self
        place = self.placement and self.placement.map(self.exchanged)
        shape = self.exchanged(self.shape)
        return dataclasses.replace(self, shape=shape, axis=len(shape) - 2, placement=place)

    def view3(self, channels: int) -> tuple[int, int, int]:
        """Returns the shape as `(entries, channels, width)`; `entries` covers the stack axes."""
        assert self.axis is not None
        assert not self.trailing
        return math.prod(self.stack), channels, math.prod(self.shape[self.axis + 1 :])


def as_pure(tree: PyTree) -> PyTree:
    """Returns a flax nnx tree as a tree of arrays, and any other tree unchanged."""
    nnx = sys.modules.get("flax.nnx")  # the caller imported flax to make such a tree
    return tree if nnx is None else nnx.as_pure(tree)


def plain_name(path: jax.tree_util.KeyPath) -> str:
    """Formats a leaf's key path in the same way with or without a flax nnx wrapper."""
    if len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path)
