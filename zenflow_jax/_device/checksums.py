"""Checksums of parameters, to detect changes by other code.

Subnormal numbers and both zeros count as equal, because adding zero may convert between them.
"""

import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def checksums(weights: Sequence[Array]) -> list[Array]:
    """Returns a uint32 checksum over all bits of each array, which does not depend on the mesh."""
    return list(map(_checksum, weights))


def checksum(weights: Sequence[Array]) -> int:
    """Returns a positive checksum over all bits of the parameters, the same on any mesh."""
    sums = np.array(jax.device_get(checksums(weights)), np.uint32)
    return (zlib.crc32(sums.tobytes()) & 0x7FFFFFFF) or 1


@jax.jit
def _checksum(weight: Array) -> Array:
    small = jnp.abs(weight) < jnp.finfo(weight.dtype).tiny
    kind = np.dtype(f"uint{8 * weight.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(weight, kind).astype(jnp.uint32)
    bits = jnp.where(small, jnp.uint32(0), bits)
    # An odd factor does not lose bits. Each position in the leaf has a different factor, to detect
    # swaps.
    factor, stride = jnp.ones((), jnp.uint32), 2
    for axis in reversed(range(weight.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, weight.shape, axis)
        factor = factor + index * np.uint32(stride % 2**32)
        stride *= weight.shape[axis]
    return jnp.sum(bits * factor)
