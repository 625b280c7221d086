"""Copies between device and host memory, and a bound on the bytes in flight."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from zenflow_jax._device.memory import HOST
from zenflow_jax.layerwise._optimizer import divide, join

_SPACES = {HOST: jax.memory.Space.Host, "device": jax.memory.Space.Device}


def bytes_here(x: Any) -> int:
    """Returns the bytes on one device of an array, or of a shape with a sharding."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def moved(tree: Any, kind: str) -> Any:
    """Starts to copy arrays to a memory kind of their devices, without a program or a wait."""
    leaves = jax.tree.leaves(tree)
    if all(x.is_fully_addressable for x in leaves):
        # A sharding for each array takes a third longer in Python.
        return jax.device_put(tree, _SPACES[kind]) if leaves else tree
    # `jax.device_put` cannot move arrays that span processes (jax 0.10.2 and 0.11.2).
    return jax.tree.map(lambda x: _shards_moved(x, kind), tree)


def large_moved(arrays: Sequence[jax.Array], large: Sequence[bool], kind: str) -> list[jax.Array]:
    """Starts to copy the large arrays to a memory kind; returns all arrays."""
    moving, staying = divide(arrays, large)
    return join(moved(moving, kind), staying, large)


def _shards_moved(x: jax.Array, kind: str) -> jax.Array:
    pieces = [
        jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind=kind))
        for shard in x.addressable_shards
    ]
    sharding = x.sharding.with_memory_kind(kind)
    return jax.make_array_from_single_device_arrays(x.shape, sharding, pieces)


class InFlight:
    """Bounds the device memory of arrays that are on their way to or from an update.

    They are fetched for it, updated in place, and copied to host memory. jax allocates memory when
    a copy is dispatched, so without a bound Python would fetch the state of all layers at once.
    """

    def __init__(self, limit: int):
        self._limit, self._bytes = limit, 0
        self._leaving: deque[tuple[int, Sequence[jax.Array]]] = deque()

    def admit(self, nbytes: int) -> None:
        """Counts arrays that are about to be fetched, after waiting for room."""
        while self._bytes + nbytes > self._limit and self._leaving:
            size, arrays = self._leaving.popleft()
            jax.block_until_ready(arrays)
            self._bytes -= size
        self._bytes += nbytes

    def leave(self, nbytes: int, arrays: Sequence[jax.Array]) -> None:
        """Notes the copies in host memory; the device's memory is free when they are ready."""
        self._leaving.append((nbytes, arrays))

    def fits_half(self, nbytes: int) -> bool:
        return nbytes <= self._limit // 2
