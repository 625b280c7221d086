"""Arrays in pinned host memory, and copies between NumPy and devices.

With "during_step", the user's jitted step copies its mail to the host (`to_host`). Everything else
is copied between steps.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import PyTree

from zenflow_jax._spec.leaf import LeafSpec

HOST = "pinned_host"

T = TypeVar("T")


def mail_rank(specs: Sequence[LeafSpec]) -> int:
    """Returns the rank of all arrays in host memory, which exceeds the rank of any device array.

    If jit chooses shardings, XLA may alias a donated buffer to an output of the same shape and
    dtype in the *other* memory, and the process aborts. Unit axes make such a pair impossible.
    """
    return max(8, *(1 + len(spec.shape) for spec in specs), 0)


def with_rank(x: jax.Array, rank: int) -> jax.Array:
    """Adds unit axes to `x`."""
    return x.reshape(shape_with_rank(x.shape, rank))


def shape_with_rank(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Adds unit axes before the last two axes, so that a scan's stacked axis stays first."""
    return (*shape[:-2], *[1] * (rank - len(shape)), *shape[-2:])


def without_units(entries: Sequence[T], rank: int) -> tuple[T, ...]:
    """Drops the entries for mail's unit axes, which leaves one entry per leaf axis."""
    return (*entries[: rank - 2], *entries[-2:])


def to_host(x: jax.Array, rank: int) -> jax.Array:
    """Copies a whole array to pinned host memory; asynchronously under jit."""
    return jax.device_put(with_rank(x, rank), jax.memory.Space.Host)


def to_device(tree: T) -> T:
    """Copies arrays in host memory to their devices; other arrays stay."""
    where = jax.tree.map(lambda x: x.sharding.with_memory_kind("device"), tree)
    return jax.device_put(tree, where)


def copy_to_host(pieces: PyTree) -> Any:
    """Starts copying a tree of single-device arrays to pinned host memory next to each device.

    Plain copies run at any time; a device program would wait for its turn.
    """
    return jax.device_put(pieces, jax.tree.map(lambda x: x.sharding.with_memory_kind(HOST), pieces))


def view(x: jax.Array) -> np.ndarray:
    """Returns a read-only NumPy view of an array in host memory, without a copy.

    Drop the view after reading: it keeps the buffer alive and, on a GPU, blocks its donation.
    """
    return np.asarray(x.addressable_data(0))


def read(x: jax.Array) -> np.ndarray:
    """Reads this process's first piece of an array that remains in use; read-only.

    The result is a view if the piece is in host memory: copy it to keep it. jax caches the NumPy
    value (a view since jax 0.11) in the array object that was read, which would block the array's
    donation. So this function, unlike `view`, goes through another array object.
    """
    piece = x.addressable_data(0)
    alias = jax.make_array_from_single_device_arrays(piece.shape, piece.sharding, [piece])
    return np.asarray(alias)


def upload(tree: PyTree, device: Any, memory_kind: str | None = None) -> Any:
    """Copies a tree of NumPy arrays to the device; the result never shares memory with them.

    The copies may still be running on return: do not change an array until the result is ready.
    """
    if device.platform == "cpu":
        # The CPU backend aliases aligned NumPy memory even with `may_alias=False` (jax 0.10.0 to
        # 0.11.2); later changes would show in the result.
        tree = jax.tree.map(np.copy, tree)
    return jax.device_put(tree, SingleDeviceSharding(device, memory_kind=memory_kind))


def nbytes(tree: PyTree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def zeros_like(x: jax.Array) -> jax.Array:
    """Makes zeros placed like `x`, which may have been donated."""
    piece = np.zeros(x.sharding.shard_shape(x.shape), x.dtype)
    return put_everywhere(piece, x.shape, x.sharding)


def put_everywhere(
    piece: np.ndarray | np.generic, shape: Sequence[int], sharding: jax.sharding.Sharding
) -> jax.Array:
    """Makes an array with this piece on every device.

    This needs no communication; `jax.device_put` would check that all processes agree.
    """
    if isinstance(sharding, SingleDeviceSharding):
        return jax.device_put(piece, sharding)
    kind = sharding.memory_kind
    pieces = [
        jax.device_put(piece, SingleDeviceSharding(device, memory_kind=kind))
        for device in sharding.addressable_devices
    ]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, pieces)
