"""Finds a stage's device, and reads its allocator's statistics."""

import resource

import jax

from benchmarks.gpu_stages.notes import Stage
from benchmarks.machine import NoGPU


def require_gpu(stage: Stage) -> jax.Device:
    """Returns the first device, which must be a GPU unless this is a rehearsal.

    Raises:
        NoGPU: If the device is not a GPU.
    """
    device = jax.devices()[0]
    if device.platform == "cpu" and not stage.rehearse:
        raise NoGPU(
            f"There is no GPU: jax {jax.__version__} has {jax.devices()}. Install jax with CUDA, "
            '`pip install ".[cuda12]"`, or pass --rehearse to run the stages on this CPU.'
        )
    return device


def usable_bytes(device: jax.Device) -> int | None:
    """Returns the device memory of jax's allocator; None if unknown (on a CPU)."""
    stats = device.memory_stats()
    return stats["bytes_limit"] if stats else None


def peak_bytes(device: jax.Device) -> int | None:
    """Returns the allocator's peak in this process; None if unknown."""
    stats = device.memory_stats()
    return stats["peak_bytes_in_use"] if stats else None


def out_of_memory(error: BaseException | None) -> bool:
    """Returns whether this is XLA's out-of-memory error, or was caused by it."""
    while error is not None:
        if "RESOURCE_EXHAUSTED" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def host_peak_bytes() -> int:
    """Returns this process's peak memory in RAM, including pinned memory."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
