"""The static facts of one leaf: its shape, its channel axis, how many channels are selected."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from zenflow_jax._spec.mesh import Placement

#: Dtypes a leaf may have. Wider ones would lose bits to the float32 arithmetic.
DTYPES = tuple(np.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """The static facts of one leaf; hashable, because the state's treedef carries them."""

    name: str  # key path, as `plain_name` writes it
    shape: tuple[int, ...]
    dtype: np.dtype
    axis: int | None  # channel axis, counted from the front; None for a resident leaf
    k: int  # selected channels in each stack entry; 0 for a resident leaf
    decay: bool  # whether weight decay applies
    placement: Placement | None = None  # None on one device
    transfer_dtype: np.dtype | None = None  # dtype of its mail; None for the leaf's own
    # With which group each range of its first stack axis closes its windows; as a rule it has one.
    groups: tuple[int, ...] = (0,)
    start: int | None = None  # of a range of a stacked leaf: the entry at which it begins
    hosted: bool = False  # the parameter is in host memory; layers, fetched one after the other

    @property
    def anonymous(self) -> "LeafSpec":
        """The spec that all leaves like this one have in common, so that they share programs."""
        return dataclasses.replace(self, name="", decay=False, groups=(0,))

    @property
    def group(self) -> int:
        """The group of a leaf that is not cut, or of a range."""
        (group,) = self.groups
        return group

    @property
    def ranges(self) -> tuple["LeafSpec", ...]:
        """The specs of the ranges of its first stack axis, in order; of an uncut leaf itself."""
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

    def range_of(self, group: int) -> "LeafSpec":
        """The range that closes its windows with `group`, which must be one of `groups`."""
        return self.ranges[self.groups.index(group)]

    @property
    def mail_dtype(self) -> np.dtype:
        return self.transfer_dtype or self.dtype

    @property
    def copies(self) -> int:
        """How many devices hold each part of it, and send its gradient in a step."""
        place = self.placement
        return 1 if place is None else place.mesh.size // math.prod(map(place.count, place.part))

    @property
    def resident(self) -> bool:
        return self.axis is None

    @property
    def keeps_master(self) -> bool:
        """Whether the device holds a float32 master of the parameter."""
        return self.hosted or self.dtype != np.float32

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
        """The number of pieces of its channel axis, each of which selects among its own."""
        assert self.axis is not None
        place = self.placement
        return 1 if place is None else place.count(place.block[self.axis])

    @property
    def selected_shape(self) -> tuple[int, ...]:
        """Shape of the arrays of selected channels: the leaf's, with `k` channels."""
        assert self.axis is not None
        return (*self.shape[: self.axis], self.k, *self.shape[self.axis + 1 :])

    def view4(self, channels: int) -> tuple[int, int, int, int]:
        """The shape as `(entries, rows, channels, tail)`, with so many channels, for the host.

        `entries` of the stack axes; rows only if the channel axis is the last, else a tail.
        """
        assert self.axis is not None
        return (
            math.prod(self.stack),
            math.prod(self.shape[len(self.stack) : self.axis]),
            channels,
            math.prod(self.shape[self.axis + 1 :]),
        )


def is_hosted(x: Any) -> bool:
    """Whether an array, traced or abstract ones too, is in host memory."""
    if isinstance(x, Tracer):
        return jax.typeof(x).memory_space == jax.memory.Space.Host
    # The type of a shape, or of what savers put together, may not say so (jax 0.10.2).
    return getattr(getattr(x, "sharding", None), "memory_kind", None) == "pinned_host"


def plain_name(path: tuple[Any, ...]) -> str:
    """The key path of a leaf as text, whether or not flax nnx has wrapped the leaf."""
    if len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path)
