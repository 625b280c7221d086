"""Channels: their axis, their scores, and their selection.

A leaf is `(*stack, *rows, n, *tail)`: each stack entry has `n` channels along the channel axis, and
`k` of them are selected. There are rows only if the channel axis is a matrix's last axis, and a
tail only if it is not. Through `shards.py`, these functions get one device's piece, which selects
among its own channels.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from zenflow_jax._spec.leaf import LeafSpec


def broadcast_channels(per_channel: Shaped[Array, "..."], spec: LeafSpec) -> Shaped[Array, "..."]:
    """Adds unit axes to an array `(*stack, channels)`, so that it broadcasts against the leaf."""
    assert spec.axis is not None
    rows = spec.axis - len(spec.stack)
    tail = len(spec.shape) - spec.axis - 1
    *stack, channels = per_channel.shape
    return per_channel.reshape(*stack, *[1] * rows, channels, *[1] * tail)


def sum_squares(g: Float[Array, "..."], spec: LeafSpec) -> Float[Array, "..."]:
    """Sums squares in float32: `(*stack, n)` per channel, `()` for a resident leaf."""
    axes = range(len(spec.shape))
    if not spec.resident:
        axes = [a for a in axes if a >= len(spec.stack) and a != spec.axis]
    return jnp.sum(jnp.square(g.astype(jnp.float32)), axis=tuple(axes))


def take(x: Shaped[Array, "..."], index: Int[Array, "..."], spec: LeafSpec) -> Shaped[Array, "..."]:
    """Takes slices of `x` at `index` `(*stack, m)`, along the channel axis, per stack entry."""
    assert spec.axis is not None
    axis = spec.axis - len(spec.stack)

    def take_entry(x, index):
        # "clip" is the cheapest mode; a selection's indices are always in range.
        return jnp.take(x, index, axis=axis, mode="clip")

    for _ in spec.stack:
        take_entry = jax.vmap(take_entry)
    return take_entry(x, index)


def positions(channels: Int[Array, "... k"], n: int) -> Int[Array, "... n"]:
    """Returns each channel's place among the selected channels, or -1 for a deferred channel."""

    def in_entry(channels):
        place = jnp.arange(channels.shape[0], dtype=jnp.int32)
        return jnp.full((n,), -1, jnp.int32).at[channels].set(place, unique_indices=True)

    for _ in channels.shape[:-1]:
        in_entry = jax.vmap(in_entry)
    return in_entry(channels)


def gather_to_channels(
    x: Shaped[Array, "..."], place: Int[Array, "... n"], spec: LeafSpec
) -> Shaped[Array, "..."]:
    """Spreads the selected slices `x` to their channels; other channels get arbitrary slices.

    This is a gather, not a scatter: XLA fuses a gather into its reader, so it never writes a whole
    leaf for a few channels.
    """
    if spec.k == 0:
        return jnp.zeros(spec.shape, x.dtype)
    return take(x, jnp.maximum(place, 0), spec)


def top_channels(scores: Float[Array, "... n"], k: int) -> Int[Array, "... k"]:
    """Returns the k channels with the highest scores, ascending; ties go to the lower index."""
    # lax.top_k puts the lower index first among equal values.
    return jnp.sort(jax.lax.top_k(scores, k)[1].astype(jnp.int32), axis=-1)


def contains(channels: Int[Array, "... k"], n: int) -> Bool[Array, "... n"]:
    return positions(channels, n) >= 0
