"""Lack of memory: refused before anything is allocated, or explained in one message."""

from __future__ import annotations

import math
import os
import re

import jax
import numpy as np
from jax.sharding import Mesh

from train.optimizers import weight_dtype
from train.settings import Settings, SettingsError
from train.sharding import batch_parts
from zenflow_jax.planning import gb


def check_memory(settings: Settings, parameters: int, vocabulary: int, mesh: Mesh | None) -> None:
    """Refuses a run that cannot fit, by the least that it needs however it is laid out."""
    devices, processes = 1 if mesh is None else mesh.size, jax.process_count()
    adamw, trains = settings.optimizer == "adamw", settings.steps != 0
    weights = np.dtype(weight_dtype(settings.optimizer, settings.dtype)).itemsize * parameters
    # Weights and gradients; with adamw its moments too.
    device = (2 * weights + (8 * parameters if adamw else 0)) if trains else weights
    # Master and moments of the deferred channels, divided among the processes.
    ratio = settings.topk_ratio if settings.optimizer == "zenflow" else 0.0
    state = 6 if settings.host_state == "compact" else 12
    host = 0.0 if adamw or not trains else state * (1 - min(max(ratio, 0.0), 1.0)) * parameters
    if jax.local_devices()[0].platform == "cpu":
        host += device
    logits = 4 * vocabulary * settings.batch_size * settings.sequence_length
    logits /= settings.micro_batches * batch_parts(mesh)
    model = f"a model of {parameters:,} parameters with {settings.optimizer}"
    smaller = "Take a smaller one" + (", --optimizer zenflow" if adamw else "")
    memory = device_bytes() or math.inf
    if device / devices > memory:
        raise SettingsError(
            f"`model`: expected one that fits in {gb(memory)} on each of {devices} device(s), "
            f"got {model}, which takes {gb(device)} without anything else. {smaller} or more "
            "devices (--mesh); --force starts it all the same."
        )
    if host / processes > host_bytes():
        raise SettingsError(
            f"`model`: expected one whose state fits in the host's {gb(host_bytes())}, got "
            f"{model}, which takes {gb(host / processes)} there. {smaller}, --host-state compact, "
            "or more machines (docs/multi_host.md); --force starts it all the same."
        )
    if logits > memory:
        raise SettingsError(
            f"`batch_size`: expected a micro-batch whose logits fit in the device's {gb(memory)}, "
            f"got {settings.batch_size} x {settings.sequence_length} tokens in "
            f"{settings.micro_batches} micro-batches, whose logits alone take {gb(logits)}."
        )


def host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_bytes() -> int | None:
    """The memory of a device, of a CPU its share of the machine's; None if it is unknown."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if jax.local_devices()[0].platform == "cpu":
        return host_bytes() // jax.local_device_count()
    return None


def lack_behind(error: BaseException) -> BaseException | None:
    """The lack of memory that is this error or a cause of it; None if there is none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, MemoryError):
        text = str(cause).lower()
        lacks = "resource_exhausted" in text or "out of memory" in text
        if lacks and isinstance(cause, jax.errors.JaxRuntimeError):
            break
        cause = cause.__cause__
    return cause


def lack_of_memory(error: BaseException, settings: Settings) -> str:
    host = isinstance(error, MemoryError)
    asked = re.search(r"\d[\d.,]* ?(?:[KMGT]i?B|bytes)\b.*?(?= for|[.:\n]|$)", str(error), re.I)
    kind = jax.local_devices()[0].device_kind
    room = f" ({kind}: {gb(memory)})" if (memory := device_bytes()) else ""
    other = "--optimizer zenflow" if settings.optimizer == "adamw" else "a smaller model"
    return (
        f"expected memory enough on the {'host' if host else 'device'} for batches of "
        f"{settings.batch_size} x {settings.sequence_length} tokens in {settings.micro_batches} "
        f"micro-batches and {settings.optimizer}, got none for "
        f"{asked[0] if asked else 'what was asked for'}{room}. Take a --batch-size below "
        f"{settings.batch_size}, more --micro-batches, --remat, or {other}."
    )
