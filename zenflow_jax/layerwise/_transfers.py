"""Copies between device and host memory, which start without a program or a wait."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from zenflow_jax._device.memory import HOST
from zenflow_jax.layerwise._optimizer import is_large

_SPACES = {HOST: jax.memory.Space.Host, "device": jax.memory.Space.Device}


def bytes_here(x: Any) -> int:
    """Returns the bytes on one device of an array, or of a shape with a sharding."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def large_bytes(arrays: Sequence[Any]) -> int:
    """Returns the bytes on one device of the arrays that wait in host memory."""
    return sum(bytes_here(x) for x in arrays if is_large(x))


def moved(tree: Any, kind: str) -> Any:
    """Starts to copy arrays to a memory kind of their devices, unless they are there."""
    leaves = jax.tree.leaves(tree)
    if all(x.is_fully_addressable for x in leaves):
        # A sharding for each array takes a third longer in Python.
        return jax.device_put(tree, _SPACES[kind]) if leaves else tree
    # `jax.device_put` cannot move arrays that span processes (jax 0.10.2 and 0.11.2).
    return jax.tree.map(lambda x: _shards_moved(x, kind), tree)


def large_moved(arrays: Sequence[jax.Array], kind: str) -> list[jax.Array]:
    """Starts to copy the large arrays to a memory kind; returns all arrays."""
    large = [*map(is_large, arrays)]
    copies = iter(moved([*itertools.compress(arrays, large)], kind))
    return [next(copies) if moves else x for x, moves in zip(arrays, large, strict=True)]


def _shards_moved(x: jax.Array, kind: str) -> jax.Array:
    pieces = [
        jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind=kind))
        for shard in x.addressable_shards
    ]
    sharding = x.sharding.with_memory_kind(kind)
    return jax.make_array_from_single_device_arrays(x.shape, sharding, pieces)
