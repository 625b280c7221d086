"""Copies between device and host memory, which start without a program or a wait."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Private: the call that `jax.device_put` makes for shardings, in a fifth of its time in
# Python, also for arrays that span processes. With a memory space, `jax.device_put` runs a program
# for each array, which waits for its turn among the device's programs (jax 0.10.2 to 0.12.0).
from jax._src.interpreters import pxla
from jaxlib import xla_client

from zenflow_jax._device.memory import HOST

_SPACES = {HOST: jax.memory.Space.Host, "device": jax.memory.Space.Device}


def moved(kind: str, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Starts to copy arrays to a memory kind of their devices, except keys and what `stays`."""
    if any(x.is_deleted() for x in arrays):  # otherwise the process could crash (jax 0.10.2)
        raise RuntimeError("An array was deleted, for instance by a donation. Pass a copy.")
    targets = [_target(x.aval, x.sharding, kind) for x in arrays]
    if None in targets:
        pairs = [*zip(arrays, targets, strict=True)]
        copies = iter(moved(kind, [x for x, target in pairs if target]))
        return [next(copies) if target else x for x, target in pairs]
    shardings, devices = [x[0] for x in targets], [x[1] for x in targets]
    reuse = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(targets)
    copy = xla_client.batched_copy_array_to_devices_with_sharding
    copies = copy([*arrays], devices, shardings, reuse)
    return [typed(x) for (_, _, typed), x in zip(targets, copies, strict=True)]


@functools.lru_cache(maxsize=4096)
def _target(aval: Any, sharding: Any, kind: str) -> Any:
    """Returns a copy's sharding and devices, and a function that gives it its type."""
    if stays(aval) or jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return None
    new = sharding.with_memory_kind(kind)
    aval = aval.update(memory_space=_SPACES[kind])
    return new, new._internal_device_list, pxla.global_aval_to_result_handler(aval, new, True)


def stays(x: Any) -> bool:
    """Returns whether an array is always on its device: a number, such as a count, or empty."""
    # Copies of any size take about as long; empty arrays in host memory fail on GPUs.
    return math.prod(x.shape) < 2


def bytes_here(x: Any) -> int:
    """Returns the bytes on one device of an array, or of a shape."""
    sharding = getattr(x, "sharding", None)
    shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


def nbytes(x: Any) -> int:
    """Returns the bytes of an array or a shape, on all devices together."""
    return math.prod(x.shape) * x.dtype.itemsize
