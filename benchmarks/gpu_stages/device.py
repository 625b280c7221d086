"""The device that a stage works on, and what its allocator says."""

import resource

import jax

from benchmarks.gpu_stages.notes import Stage
from benchmarks.machine import NoGPU


def require_gpu(stage: Stage) -> jax.Device:
    """The first device, which must be a GPU unless this is a rehearsal.

    Raises:
        NoGPU: If it is none.
    """
    device = jax.devices()[0]
    if device.platform == "cpu" and not stage.rehearse:
        raise NoGPU(
            f"expected a GPU, got jax {jax.__version__} with {jax.devices()}. Install jax with "
            'CUDA, `pip install ".[cuda12]"`, or pass --rehearse to see the stages on this CPU.'
        )
    return device


def usable_bytes(device: jax.Device) -> int | None:
    """Device memory that jax's allocator may give; None where it does not say (on a CPU)."""
    stats = device.memory_stats()
    return stats["bytes_limit"] if stats else None


def peak_bytes(device: jax.Device) -> int | None:
    """The most that was ever given at a time in this process; None likewise."""
    stats = device.memory_stats()
    return stats["peak_bytes_in_use"] if stats else None


def out_of_memory(error: BaseException | None) -> bool:
    """Whether it is XLA's error about device memory, or was caused by it."""
    while error is not None:
        if "RESOURCE_EXHAUSTED" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def host_peak_bytes() -> int:
    """Returns the most memory that this process ever had in RAM, pinned memory included."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
