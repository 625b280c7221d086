"""Checksums of parameters, to detect changes by other code.

Subnormal numbers and both zeros count as equal, because adding zero may convert between them.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from zenflow_jax._device.shards import BLOCK, REPLICATED, Shard, on_each_device
from zenflow_jax._spec.leaf import LeafSpec


def fingerprints(weights: Sequence[Array], specs: Sequence[LeafSpec]) -> list[Array]:
    """Returns a uint32 checksum over all bits of each leaf, which does not depend on the mesh."""
    # Similar leaves share a program.
    bare = (dataclasses.replace(x.anonymous, k=0, transfer_dtype=None) for x in specs)
    return [_checksum(x, spec=spec) for x, spec in zip(weights, bare, strict=True)]


@partial(jax.jit, static_argnames="spec")
def _checksum(weight: Array, *, spec: LeafSpec) -> Array:
    sum_bits = partial(_sum_bits, shape=spec.shape)
    return on_each_device(sum_bits, spec, [BLOCK], REPLICATED, weight)


def _sum_bits(shard: Shard, weight: Array, *, shape: tuple[int, ...]) -> Array:
    small = jnp.abs(weight) < jnp.finfo(weight.dtype).tiny
    kind = np.dtype(f"uint{8 * weight.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(weight, kind).astype(jnp.uint32)
    bits = jnp.where(small, jnp.uint32(0), bits)
    # An odd factor does not lose bits. Each position in the leaf has a different factor, to detect
    # swaps.
    factor, stride = jnp.ones((), jnp.uint32), 2
    for axis in reversed(range(weight.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, weight.shape, axis)
        index += jnp.asarray(shard.first(axis), jnp.uint32)
        factor = factor + index * np.uint32(stride % 2**32)
        stride *= shape[axis]
    return shard.sum_blocks(jnp.sum(bits * factor))
