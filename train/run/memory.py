"""Rejects runs that cannot fit in memory, and explains out-of-memory errors in one message."""

from __future__ import annotations

import math
import os

import jax
import numpy as np
from jax.sharding import Mesh

from train.cli.settings import SettingsError, StepSettings, TrainingSettings
from train.run.optimizers import weight_dtype
from zenflow_jax.planning import gb


def check_memory(parameters: int, mesh: Mesh | None, run: StepSettings) -> None:
    """Rejects a run that cannot fit in any layout, based on the minimum memory that it needs."""
    adamw, trains = run.optimizer == "adamw", run.steps != 0
    weights = np.dtype(weight_dtype(run.optimizer, run.dtype)).itemsize * parameters
    # Weights, gradients if all exist at once and, with adamw, moments. Leaves that are not matrices
    # of a block are ignored.
    device = weights
    if trains and run.stream == "none":
        device = 2 * weights + (8 * parameters if adamw else 0)
    # Masters and moments of the deferred channels, divided among the processes.
    deferred = 1 - min(max(run.topk_ratio, 0.0), 1.0) if run.optimizer == "zenflow" else 1.0
    state = 6 if run.host_state == "compact" else 12
    host = 0.0 if adamw or not trains else state * deferred * parameters
    if jax.local_devices()[0].platform == "cpu":
        host += device
    device /= 1 if mesh is None else mesh.size
    host /= jax.process_count()
    memory = device_bytes() or math.inf
    other = "--optimizer zenflow" if adamw else "--host-state compact"
    for needed, room, use, more in (
        (device, memory, "weights and gradients on each device", "devices"),
        (host, host_bytes(), "state on the host", "machines"),
    ):
        if needed > room:
            raise SettingsError(
                f"`model`: not enough memory for {use}: needs {gb(needed)}, has {gb(room)}, with "
                f"{run.optimizer} and {parameters:,} parameters. Use a smaller one, {other}, more "
                f"{more}, or --force to start anyway."
            )


def host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_bytes() -> int | None:
    """Returns a device's memory (a CPU's share of the machine's memory); None if unknown."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if jax.local_devices()[0].platform == "cpu":
        return host_bytes() // jax.local_device_count()
    return None


def find_oom(error: BaseException) -> BaseException | None:
    """Returns the out-of-memory error in the chain of causes, if any."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, MemoryError):
        text = str(cause).lower()
        lacks = "resource_exhausted" in text or "out of memory" in text
        if lacks and isinstance(cause, jax.errors.JaxRuntimeError):
            break
        cause = cause.__cause__
    return cause


def describe_oom(error: BaseException, run: TrainingSettings) -> str:
    other = "--optimizer zenflow" if run.optimizer == "adamw" else "a smaller model"
    reason = str(error).partition("\n")[0]
    return (
        f"out of memory with batches of {run.batch_size} x {run.sequence_length} tokens in "
        f"{run.micro_batches} micro-batches and {run.optimizer}: {reason} Use a --batch-size below "
        f"{run.batch_size}, more --micro-batches, --remat, or {other}."
    )
