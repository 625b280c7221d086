"""Copies between device and host memory, which start without a program or a wait."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax

# Private: the call that `jax.device_put` makes for shardings, in a fifth of its time in
# Python, also for arrays that span processes. With a memory space, `jax.device_put` runs a program
# for each array, which waits for its turn among the device's programs (jax 0.10.2 to 0.12.0).
from jax._src.interpreters import pxla
from jaxlib import xla_client

from zenflow_jax._device.memory import HOST

_SPACES = {HOST: jax.memory.Space.Host, "device": jax.memory.Space.Device}
#: Smaller arrays stay on the device, because copies of any size take about as long.
SMALL_BYTES = 64 * 1024


class Bus:
    """Moves arrays between device and host memory, and counts one device's bytes."""

    def __init__(self) -> None:
        self.to_host = self.to_device = 0

    def to(self, kind: str, arrays: Sequence[Any], moves: Sequence[bool]) -> list[Any]:
        """Starts to copy the arrays that move to a memory kind; returns all arrays."""
        size = sum(map(bytes_here, itertools.compress(arrays, moves)))
        if kind == "device":
            self.to_device += size
        else:
            self.to_host += size
        return moved(kind, arrays, moves)


def moved(kind: str, arrays: Sequence[Any], moves: Sequence[bool]) -> list[Any]:
    """Starts to copy the arrays that move to a memory kind; returns all arrays."""
    copies = iter(copied(kind, [*itertools.compress(arrays, moves)]))
    return [next(copies) if m else x for x, m in zip(arrays, moves, strict=True)]


def copied(kind: str, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Starts to copy arrays to a memory kind of their devices."""
    if any(x.is_deleted() for x in arrays):  # otherwise the process could crash (jax 0.10.2)
        raise RuntimeError("An array was deleted, for instance by a donation. Pass a copy.")
    targets = [_target(x.aval, x.sharding, kind) for x in arrays]
    reuse = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(targets)
    shardings, devices = [x[0] for x in targets], [x[1] for x in targets]
    copy = xla_client.batched_copy_array_to_devices_with_sharding
    copies = copy([*arrays], devices, shardings, reuse)
    return [typed(x) for (_, _, typed), x in zip(targets, copies, strict=True)]


@functools.lru_cache(maxsize=1024)
def _target(aval: Any, sharding: Any, kind: str) -> tuple[Any, Any, Any]:
    """Returns a copy's sharding and devices, and a function that gives it its type."""
    new = sharding.with_memory_kind(kind)
    aval = aval.update(memory_space=_SPACES[kind])
    return new, new._internal_device_list, pxla.global_aval_to_result_handler(aval, new, True)


def bytes_here(x: Any) -> int:
    """Returns the bytes on one device of an array, or of a shape with a sharding."""
    return _size_here(x.sharding, x.shape) * x.dtype.itemsize


@functools.lru_cache(maxsize=256)
def _size_here(sharding: Any, shape: tuple[int, ...]) -> int:
    return math.prod(sharding.shard_shape(shape))


def is_large(x: Any) -> bool:
    """Returns whether an array waits in host memory between its uses."""
    return math.prod(x.shape) * x.dtype.itemsize >= SMALL_BYTES


def large_bytes(arrays: Sequence[Any]) -> int:
    """Returns the bytes on one device of the arrays that wait in host memory."""
    return sum(bytes_here(x) for x in arrays if is_large(x))
