"""Shows whether anything but zenflow has changed the parameters.

The next update would undo other changes of deferred channels. Subnormal numbers and both zeros
count as equal: adding a zero may turn one into another.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from zenflow_jax._device.memory import fetch_layer
from zenflow_jax._device.shards import (
    REPLICATED,
    Layout,
    Shard,
    each_leaf,
    join,
    on_each_device,
    row,
    split,
)
from zenflow_jax._device.state import Reach, cut
from zenflow_jax._spec.leaf import LeafSpec


def fingerprints(weights: Sequence[Array], specs: Sequence[LeafSpec]) -> list[Array]:
    """A uint32 checksum of all bits of each leaf, the same on any mesh."""
    # Leaves that are alike share a program.
    bare = (dataclasses.replace(x.anonymous, k=0, transfer_dtype=None) for x in specs)
    return [_checksum(x, spec=spec) for x, spec in zip(weights, bare, strict=True)]


@partial(jax.jit, static_argnames="specs")
def samples(weights: Sequence[Array | None], *, specs: tuple[LeafSpec, ...]) -> Array:
    """A few hundred numbers from all over each leaf, or range of one, on each device: float32."""
    rows = each_leaf(
        lambda _, x: sample_row(x),
        specs,
        lambda lay: [lay.block],
        lambda lay: lay.each_device,
        map(cut, weights, specs),
    )
    return join(list(rows))


def split_samples(joined: Array, specs: Sequence[LeafSpec]) -> list[Array]:
    return split(joined, _widths(specs))


def sample_of(block: Array) -> Array:
    """Some values of one device's block of a leaf, always from the same places."""
    return block[places(block.shape)]


def sample_row(block: Array | None) -> Array:
    """The same as a row of float32; nothing of a parameter in host memory."""
    if block is None:
        return jnp.zeros((1, 0), jnp.float32)
    return row(sample_of(block).astype(jnp.float32))


def places(shape: Sequence[int]) -> tuple[slice, ...]:
    """Where samples of an array are."""
    # Of a stack all layers, or 32 to 63 of many; of a matrix about eight rows and columns.
    most = [32] * (len(shape) - 2) + [8, 8][max(2 - len(shape), 0) :]
    strides = [max(size // m, 1) for size, m in zip(shape, most, strict=True)]
    return tuple(slice(stride // 2, None, stride) for stride in strides)


def _widths(specs: Sequence[LeafSpec]) -> list[int]:
    shapes = [Shard(spec).block.shape for spec in specs]
    return [
        math.prod(len(range(n)[s]) for n, s in zip(shape, places(shape), strict=True))
        * (not spec.hosted)
        for shape, spec in zip(shapes, specs, strict=True)
    ]


def differ(x: Array, y: Array, dtype: Any) -> Array:
    """Bool: where two arrays hold different numbers of a leaf's dtype."""
    tiny = float(jnp.finfo(dtype).tiny)
    none = (jnp.abs(x) < tiny) & (jnp.abs(y) < tiny)
    return (x != y) & ~none & ~(jnp.isnan(x) & jnp.isnan(y))


def strays(new: Array, before: Array, reach: Reach, dtype: Any, window: int) -> Array:
    """Bool: where a weight is not where provisional steps since its last update can have left it.

    These are steps of nearly one length, up or down: a weight has moved by a multiple of it. In low
    precision each step is rounded, by more than its length if that is short.
    """
    steps, kind = 2 * window, jnp.finfo(dtype)
    far, last = jnp.abs(new - before), reach.last
    # What faded counts by more than a third.
    # A weight may have been further away in between, and was rounded there.
    largest = jnp.abs(new) + jnp.abs(before) + 3 * reach.total
    rounding = float(kind.eps) * largest + float(kind.smallest_subnormal)
    slack = steps * (3 * reach.drift + rounding)
    times = jnp.round(far / jnp.where(last > 0, last, 1))
    on_grid = jnp.abs(far - times * last) <= slack
    # A step that is rounded is at most twice as long as it should be, or nothing.
    return ~((far <= 6 * reach.total + slack) & on_grid)


@partial(jax.jit, static_argnames="spec")
def _checksum(weight: Array, *, spec: LeafSpec) -> Array:
    sum_bits = partial(_sum_bits, shape=spec.shape)

    def of_layers(shard: Shard, weight: Array) -> Array:
        def add_layer(total: Array, i: Array) -> tuple[Array, None]:
            layer = fetch_layer(weight, i)[None]
            return total + sum_bits(shard, layer, first_layer=i), None

        return jax.lax.scan(add_layer, jnp.zeros((), jnp.uint32), jnp.arange(len(weight)))[0]

    f = of_layers if spec.hosted else sum_bits
    return on_each_device(f, spec, [Layout(spec).block], REPLICATED)(weight)


def _sum_bits(
    shard: Shard, weight: Array, *, shape: tuple[int, ...], first_layer: jax.typing.ArrayLike = 0
) -> Array:
    small = jnp.abs(weight) < jnp.finfo(weight.dtype).tiny
    kind = np.dtype(f"uint{8 * weight.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(weight, kind).astype(jnp.uint32)
    bits = jnp.where(small, jnp.uint32(0), bits)
    # An odd factor loses no bit. Each place in the leaf has a different one, so that swapped values
    # show.
    factor, stride = jnp.ones((), jnp.uint32), 2
    for axis in reversed(range(weight.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, weight.shape, axis)
        first = shard.first(axis) if axis else first_layer + shard.first(axis)
        index += jnp.asarray(first, jnp.uint32)
        factor = factor + index * np.uint32(stride % 2**32)
        stride *= shape[axis]
    return shard.sum_blocks(jnp.sum(bits * factor))
