"""Memory kinds: what lies in pinned host memory, and copies between NumPy and devices.

Mail leaves the device inside the user's jitted step as a whole-array copy; everything else that
crosses does so here, between steps.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from zenflow_jax._plan.leaf import LeafSpec

HOST = "pinned_host"


def mail_rank(specs: Sequence[LeafSpec]) -> int:
    """Rank of everything in host memory: above that of any array on the device.

    When shardings are left to jit, a donated buffer may be aliased to an output of the same shape
    and dtype in the *other* memory, and the process aborts. Leading unit axes up to a rank that no
    leaf has make such a pair impossible. One unit axis alone would not, beside a leaf
    `(1, *shape)`; and arrays that are donated without being in this state (another optimizer's
    leaves, batches) are not known here, so the rank is one that those do not have either.
    """
    return max(8, *(1 + len(spec.shape) for spec in specs), 0)


def mail_shape(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (1,) * (rank - len(shape)) + shape


def to_host(x: jax.Array, rank: int) -> jax.Array:
    """A whole array to pinned host memory; under jit an asynchronous copy."""
    return jax.device_put(x.reshape(mail_shape(x.shape, rank)), jax.memory.Space.Host)


def host_zeros(shape: tuple[int, ...], dtype: Any, rank: int, like: Any) -> jax.Array:
    """Zeros in pinned host memory, beside the device that holds `like`."""
    shape = mail_shape(shape, rank)
    if isinstance(like, Tracer) or not isinstance(like, jax.Array):
        return jax.device_put(jnp.zeros(shape, dtype), jax.memory.Space.Host)
    return jax.device_put(np.zeros(shape, dtype), beside(like, HOST))


def copy_to_host(pieces: Any) -> Any:
    """Starts to copy a tree of arrays, each on one device, to pinned host memory beside it.

    Not by a program, which would wait its turn among the device's: copies run beside those.
    """
    return jax.device_put(pieces, jax.tree.map(lambda x: beside(x, HOST), pieces))


def beside(like: jax.Array, memory_kind: str | None) -> jax.sharding.Sharding:
    (device,) = like.sharding.device_set
    return jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind)


def commit(tree: Any, like: Any) -> Any:
    """`tree` with its arrays bound to the device that holds `like`, if that is one device.

    What a jitted step returns is bound to a device. A state that is not would look different at
    the first step than at the second, and the step would be compiled twice.
    """
    if isinstance(like, Tracer) or not isinstance(like, jax.Array):
        return tree
    if len(like.sharding.device_set) > 1 or not like.committed:
        return tree  # beside uncommitted parameters, an uncommitted state is what stays the same

    def one(x: Any) -> Any:
        if isinstance(x, Tracer) or x.committed:
            return x
        return jax.device_put(x, beside(like, x.sharding.memory_kind))

    return jax.tree.map(one, tree)


def view(x: jax.Array) -> np.ndarray:
    """A NumPy view of an array in host memory, without a copy; read-only.

    Drop it once it is read: it keeps the buffer alive, and on a GPU it blocks donation of the array
    if the user's program still has it.
    """
    return np.asarray(x.addressable_data(0))


def read(x: jax.Array) -> np.ndarray:
    """What this process's first device has of an array that others go on with; read-only.

    A view where that is in host memory: copy what is kept. Unlike after `view`, nothing stays with
    the array: jax keeps what it gives to NumPy with the array object that was asked, a host copy
    always, a view since jax 0.11 (checked on a CPU: 0.10.2 does not, 0.11.2 does), and a view that
    is kept blocks donation. So another object of the same buffer is asked.
    """
    piece = x.addressable_data(0)
    alias = jax.make_array_from_single_device_arrays(piece.shape, piece.sharding, [piece])
    return np.asarray(alias)


def upload(tree: Any, device: Any) -> Any:
    """A tree of NumPy arrays on the device, never sharing memory with them.

    The copies may still run when this returns: nothing may change before the result is ready.
    """
    if device.platform == "cpu":
        # The CPU backend aliases aligned NumPy memory, `may_alias=False` notwithstanding
        # (jax 0.10.0 to 0.11.2), and later changes would show in the result.
        tree = jax.tree.map(np.copy, tree)
    return jax.device_put(tree, jax.sharding.SingleDeviceSharding(device))


def zeros_like(x: jax.Array) -> jax.Array:
    """Zeros placed as `x` is, in its memory; `x` may have been donated."""
    return _zeros(x, x.sharding)


def in_host_memory(blank: jax.Array) -> jax.Array:
    """A blank array in host memory: itself if it is there, else zeros in place of it."""
    sharding = blank.sharding
    return blank if sharding.memory_kind == HOST else _zeros(blank, sharding.with_memory_kind(HOST))


def _zeros(x: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    return _put_everywhere(np.zeros(sharding.shard_shape(x.shape), x.dtype), x.shape, sharding)


def put_everywhere(piece: np.ndarray | np.generic, like: jax.Array) -> jax.Array:
    """An array like `like`, each of whose pieces is `piece`.

    Nothing is asked of other processes; `jax.device_put` would make sure that they do the same.
    """
    return _put_everywhere(piece, like.shape, like.sharding)


def _put_everywhere(
    piece: np.ndarray | np.generic, shape: Sequence[int], sharding: jax.sharding.Sharding
) -> jax.Array:
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return jax.device_put(piece, sharding)
    kind = sharding.memory_kind
    pieces = [
        jax.device_put(piece, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))
        for device in sharding.addressable_devices
    ]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, pieces)
