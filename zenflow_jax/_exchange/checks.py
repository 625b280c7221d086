"""Checks what users pass to `HostEngine` and says what is wrong with it."""

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from zenflow_jax._device.memory import read
from zenflow_jax._device.state import ZenFlowState

#: How the host keeps moments.
HOST_STATES = ("float32", "compact")


def check_budget(prefetch_bytes: Any) -> None:
    whole = isinstance(prefetch_bytes, Integral) and not isinstance(prefetch_bytes, bool)
    if prefetch_bytes is not None and (not whole or prefetch_bytes < 0):
        raise ValueError(
            f"`prefetch_bytes` must be a whole number from 0 or None, got {prefetch_bytes!r}. Pass "
            "the bytes that updates may take on each device before their boundary, or None for "
            "all they need."
        )


def check_host_state(host_state: Any) -> bool:
    """Whether moments are to be compact."""
    if host_state not in HOST_STATES:
        raise ValueError(
            f"`host_state` must be one of {', '.join(map(repr, HOST_STATES))}, got {host_state!r}. "
            "Leave it at 'float32', or pass 'compact' for moments of 8 bits, which take a quarter "
            "of the memory."
        )
    return host_state == HOST_STATES[1]


def check_max_skipped(max_skipped: Any) -> None:
    whole = isinstance(max_skipped, Integral) and not isinstance(max_skipped, bool)
    if max_skipped is not None and (not whole or max_skipped < 1):
        raise ValueError(
            f"`max_skipped` must be a whole number from 1 or None, got {max_skipped!r}. Pass how "
            "many skipped steps in a row are an error, or None for a warning only."
        )


def check_not_flattened(params: Any, state: ZenFlowState) -> None:
    """Refuses the state of a single vector that joins all parameters."""
    leaves, specs = jax.tree.leaves(params), [leaf.spec for leaf in state.leaves]
    if len(specs) != 1 or len(specs[0].shape) != 1:
        return
    shapes = [tuple(getattr(x, "shape", ())) for x in leaves]
    if specs[0].shape not in shapes and specs[0].shape == (sum(map(math.prod, shapes)),):
        raise ValueError(
            f"expected a state with the leaves of `params`, {len(leaves)} of them, got one of a "
            f"single vector of {specs[0].shape[0]}, as `optax.flatten` makes: it has no channels, "
            "so that nothing would leave the device. Leave `optax.flatten` out."
        )


def check_not_numpy(tree: Any) -> None:
    if any(isinstance(x, np.ndarray | np.generic) for x in jax.tree.leaves(tree)):
        raise TypeError(
            "expected a state of jax arrays, got NumPy's ndarray, as from `jax.device_get` and "
            "some checkpoints: it does not say on which device and in which memory it was. Put "
            "each array where that of its name is in `tx.init(params)`, by `jax.device_put(x, "
            "like.sharding)`, as docs/checkpoints.md does; or go on from the arrays that it is a "
            "copy of."
        )


def check_one_run(state: ZenFlowState) -> None:
    """Refuses what `jax.vmap(tx.init)` makes: scalars with axes."""
    shape = np.shape(state.step)
    if shape:
        raise ValueError(
            f"expected the state of one run, got those of {math.prod(shape)} in one, as "
            "`jax.vmap(tx.init)` makes them. Train them with `zenflow(..., offload=False)`, which "
            "needs no engine, or give each its own state, step and engine; a stacked layer needs "
            "no `vmap`, its leading axes are told from its channels."
        )


def check_fresh(state: ZenFlowState) -> None:
    if not state.offload:
        raise ValueError(
            "expected a state of `zenflow(..., offload=True)`, got one that keeps its deferred "
            "half on the device. It needs no engine: leave it out, or drop `offload=False`."
        )
    arrays = [x for x in jax.tree.leaves(state) if not isinstance(x, jax.Array)]
    if arrays or isinstance(state.step, Tracer):
        raise ValueError(
            f"expected a state of arrays, got {type((arrays or [state.step])[0]).__name__}. Make "
            "the engine outside of jit, from what `tx.init(params)` returned for real parameters."
        )
    step = int(read(state.step))
    if step:
        raise ValueError(
            f"expected a state from `tx.init`, got one after {step} steps: the deferred "
            "channels' moments are with the engine that made them. Make the engine before the "
            "first step and keep it for the whole run; or pass what was saved of it beside this "
            "state, `engine_state=...`. If nothing was, go on from the parameters alone, with "
            "`tx.init(params)`: Adam begins anew."
        )


def check_devices(weights: Sequence[jax.Array], state: ZenFlowState) -> None:
    """Refuses parameters on other devices than their state, or on the same in another order."""
    for weight, leaf in zip(weights, state.leaves, strict=True):
        mine, its = _devices(weight.sharding), _devices(leaf.mu.sharding)
        if mine != its:
            raise ValueError(
                f"expected {leaf.spec.name} on the devices of its state, {its}, got it on {mine}. "
                "Make the state with `tx.init` from the parameters that the engine gets, where "
                "they are."
            )


def _devices(sharding: jax.sharding.Sharding) -> list[Any]:
    if isinstance(sharding, jax.sharding.NamedSharding):
        devices: Any = sharding.mesh.devices
        return list(devices.flat)
    return sorted(sharding.device_set, key=lambda device: device.id)


def check_pinned(
    mail_bytes: int, mails: float, selected_bytes: int, platform: str, limit_gib: str | None
) -> None:
    """Raises before training if a run needs more pinned memory than jax gives, and says how much.

    Args:
        mail_bytes: Bytes of one step's mail.
        mails: How many mails exist at most.
        selected_bytes: Bytes that a hand-over takes from the device.
        platform: Of the device; only GPUs have the limit.
        limit_gib: The environment's `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`, if it is set.
    """
    if platform not in ("gpu", "cuda", "rocm"):
        return
    try:
        limit = float(limit_gib) if limit_gib else 64.0  # XLA's own default
    except ValueError:
        raise ValueError(
            "expected a number of GiB in XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, got "
            f"{limit_gib!r}. Correct the environment variable, or unset it for 64."
        ) from None
    needed = (mail_bytes * mails + selected_bytes) / 2**30
    if needed > limit:
        raise ValueError(
            f"expected room for {mails:.3g} mails of {mail_bytes / 2**30:.1f} GiB and a hand-over "
            f"of {selected_bytes / 2**30:.1f} GiB in pinned host memory, got a limit of {limit:g} "
            "GiB. Set the environment variable "
            f"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB={math.ceil(needed) + 1} before jax starts."
        )
