"""Channels: which axis they lie on, how they score, which of them are selected.

A leaf is read as `(*stack, *rows, n, *tail)`: `n` channels along the channel axis, separately in
each entry of the stack axes. Rows are there only when the channel axis is the last one of a
matrix, the tail only when it is not. What is done with a selection is `_adam.py` (device) and
`_host_half.py` (host); this file only makes it and moves slices along it.

On a mesh whose axes divide the channel axis, each piece of it selects the same number of channels,
among its own. `_shards.py` sees to it that the functions below meet one device's piece only.

Letters: `n` channels in a stack entry, `k` of them selected.
"""

import dataclasses
import math
from collections.abc import Callable
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from zenflow_jax._mesh import Placement, divide_blocks, placement_of

#: Dtypes a leaf may have. Wider ones would lose bits to the float32 arithmetic.
DTYPES = tuple(np.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16))


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """What is static about one leaf; rides in the state's treedef, so it is hashable."""

    name: str  # key path, as `plain_name` writes it
    shape: tuple[int, ...]
    dtype: np.dtype
    axis: int | None  # channel axis, counted from the front; None for a resident leaf
    k: int  # selected channels in each stack entry; 0 for a resident leaf
    decay: bool  # whether weight decay applies
    placement: Placement | None = None  # None on one device
    transfer_dtype: np.dtype | None = None  # of its mail; None for the leaf's own

    @property
    def anonymous(self) -> "LeafSpec":
        """Equal for leaves that are alike, so that what is compiled for one serves the others."""
        return dataclasses.replace(self, name="", decay=False)

    @property
    def mail_dtype(self) -> np.dtype:
        return self.transfer_dtype or self.dtype

    @property
    def resident(self) -> bool:
        return self.axis is None

    @property
    def keeps_master(self) -> bool:
        """Whether the device holds a float32 master beside the parameter."""
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
    def selected_shape(self) -> tuple[int, ...]:
        """Shape of what the device keeps: the leaf's, with `k` channels."""
        assert self.axis is not None
        return (*self.shape[: self.axis], self.k, *self.shape[self.axis + 1 :])

    def view4(self, channels: int) -> tuple[int, int, int, int]:
        """The leaf as `(groups, rows, channels, tail)`, for host kernels."""
        assert self.axis is not None
        return (
            math.prod(self.stack),
            math.prod(self.shape[len(self.stack) : self.axis]),
            channels,
            math.prod(self.shape[self.axis + 1 :]),
        )


def plain_name(path: tuple[Any, ...]) -> str:
    """The key path of a leaf, the same whether flax nnx has wrapped the leaf or not."""
    if len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path)


def resolve(
    path: tuple[Any, ...],
    leaf: Any,
    *,
    topk_ratio: float,
    channel_axis: int | Callable[[tuple[Any, ...], Any], int],
    resident: Callable[[tuple[Any, ...], Any], bool] | None,
    partition_replicated: bool | Callable[[tuple[Any, ...], Any], bool],
    sharding: Any,
    decay: bool,
    transfer_dtype: np.dtype | None,
) -> LeafSpec:
    """Decides what kind of leaf this is; the only place that reads the user's callables."""
    name = plain_name(path)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TypeError(
            f"expected parameters that are arrays, got {leaf!r} at {name}. Make it one with "
            "`jnp.asarray`, or keep it out with `optax.masked`."
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"expected parameters that can be trained, got a random key ({leaf.dtype}) at {name}. "
            "Keep it out: of an nnx model train `nnx.state(model, nnx.Param)`; elsewhere use "
            "`optax.masked` or `optax.partition`."
        )
    shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
    if dtype not in DTYPES:
        raise ValueError(
            f"zenflow trains float32, bfloat16 and float16 leaves, but {name} is {dtype.name}: "
            "its arithmetic is float32. Cast the leaf, or keep it out with `optax.masked` or "
            "`optax.partition` (of an nnx model, train `nnx.state(model, nnx.Param)`)."
        )
    place = placement_of(leaf, sharding)
    if place is not None:
        _check_even(name, shape, place)
    alone = LeafSpec(name, shape, dtype, axis=None, k=0, decay=decay, placement=place)
    if len(shape) < 2 or 0 in shape or (resident is not None and bool(resident(path, leaf))):
        return alone
    axis = channel_axis(path, leaf) if callable(channel_axis) else channel_axis
    if not isinstance(axis, Integral) or not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"`channel_axis` must be an axis of the leaf, got {axis} for {name} of shape {shape}. "
            "Pass a function of (key path, leaf) where leaves differ, or keep the leaf on the "
            "device with `resident`."
        )
    if transfer_dtype is None and dtype == np.float16:
        # Unscaled gradients are what float16 has no room for: most are too small, some too large.
        transfer_dtype = np.dtype(np.float32)
    elif transfer_dtype == dtype:
        transfer_dtype = None
    spec = dataclasses.replace(alone, axis=int(axis) % len(shape), transfer_dtype=transfer_dtype)
    pieces = 1 if place is None else place.count(place.block[int(axis)])
    # Rounded first: 0.07 * 100 is 7.000000000000001, and the user meant 7.
    k = pieces * math.ceil(round(topk_ratio * (spec.n // pieces), 6))
    if k >= spec.n:
        return alone  # With every channel selected nothing would travel: that is a resident leaf.
    cut = partition_replicated
    if place is not None and (bool(cut(path, leaf)) if callable(cut) else cut):
        # Not along the channels, which are selected among all that a block has; and the last axis
        # first, because a stack (of scanned layers) is filled one entry after the other.
        rest = range(len(spec.stack), len(shape))
        place = divide_blocks(place, shape, [i for i in reversed(rest) if i != spec.axis])
    return dataclasses.replace(spec, k=k, placement=place)


def _check_even(name: str, shape: tuple[int, ...], place: Placement) -> None:
    for axis, names in enumerate(place.block):
        if place.explicit.intersection(names) not in (set(), set(names)):
            raise ValueError(
                f"expected mesh axes of one kind along axis {axis} of {name}, got {names} of "
                f"{dict(zip(place.mesh.axis_names, place.mesh.axis_types, strict=True))}. Make all "
                "of them Auto or all Explicit, or divide another axis of it by one of them."
            )
        if shape[axis] % place.count(names):
            raise ValueError(
                f"expected axis {axis} of {name} to divide evenly over the mesh axes {names}, got "
                f"a size of {shape[axis]} for {place.count(names)} devices. Pad the leaf, or shard "
                "another axis of it."
            )


def along(per_channel: Shaped[Array, "..."], spec: LeafSpec) -> Shaped[Array, "..."]:
    """`(*stack, channels)` with unit axes, so that it broadcasts against the leaf."""
    assert spec.axis is not None
    rows = spec.axis - len(spec.stack)
    tail = len(spec.shape) - spec.axis - 1
    *stack, channels = per_channel.shape
    return per_channel.reshape(*stack, *[1] * rows, channels, *[1] * tail)


def sum_squares(g: Float[Array, "..."], spec: LeafSpec) -> Float[Array, "..."]:
    """Sum of squares in float32: `(*stack, n)` per channel, `()` for a resident leaf."""
    axes = range(len(spec.shape))
    if not spec.resident:
        axes = [a for a in axes if a >= len(spec.stack) and a != spec.axis]
    return jnp.sum(jnp.square(g.astype(jnp.float32)), axis=tuple(axes))


def take(x: Shaped[Array, "..."], index: Int[Array, "..."], spec: LeafSpec) -> Shaped[Array, "..."]:
    """The slices of `x` at `index` `(*stack, m)`, along the channel axis, per stack entry."""
    assert spec.axis is not None
    axis = spec.axis - len(spec.stack)

    def one(x, index):
        # Indices come from a selection: in range, so nothing need be filled or checked.
        return jnp.take(x, index, axis=axis, mode="clip")

    for _ in spec.stack:
        one = jax.vmap(one)
    return one(x, index)


def positions(channels: Int[Array, "... k"], n: int) -> Int[Array, "... n"]:
    """For each of `n` channels its place among the selected ones, -1 if it is deferred."""

    def one(channels):
        place = jnp.arange(channels.shape[0], dtype=jnp.int32)
        return jnp.full((n,), -1, jnp.int32).at[channels].set(place, unique_indices=True)

    for _ in channels.shape[:-1]:
        one = jax.vmap(one)
    return one(channels)


def spread(
    x: Shaped[Array, "..."], place: Int[Array, "... n"], spec: LeafSpec
) -> Shaped[Array, "..."]:
    """Selected slices `x` at the places of their channels; elsewhere any of them.

    A gather rather than a scatter: XLA fuses it into what reads it, so a whole leaf is never
    written for the sake of a few channels.
    """
    if spec.k == 0:
        return jnp.zeros(spec.shape, x.dtype)
    return take(x, jnp.maximum(place, 0), spec)


def first_channels(spec: LeafSpec) -> Int[Array, "... k"]:
    """The first k channels, which stand in until the first selection."""
    return jnp.broadcast_to(jnp.arange(spec.k, dtype=jnp.int32), (*spec.stack, spec.k))


def top_channels(scores: Float[Array, "... n"], k: int) -> Int[Array, "... k"]:
    """The k channels with the highest score, ascending; of equal scores the lower index."""
    # lax.top_k puts the lower index first among equal values.
    return jnp.sort(jax.lax.top_k(scores, k)[1].astype(jnp.int32), axis=-1)


def contains(channels: Int[Array, "... k"], n: int) -> Bool[Array, "... n"]:
    return positions(channels, n) >= 0
