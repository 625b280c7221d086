"""What a machine has, read without jax: to ask jax is to take the GPU."""

import importlib.util
import os
import platform
import signal
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

#: What the stages import: names of modules, and of the packages that have them.
NEEDED = {
    "jax": "jax",
    "flax": "flax",
    "optax": "optax",
    "orbax.checkpoint": "orbax-checkpoint",
    "numpy": "numpy",
    "numba": "numba",
    "chex": "chex",
    "ml_dtypes": "ml_dtypes",
    "jaxtyping": "jaxtyping",
    "matplotlib": "matplotlib",
}

ROOT = Path(__file__).resolve().parents[2]
#: Share of host memory that jax may pin. Everything that an engine keeps besides is pageable.
_PINNED_SHARE = 0.75


class NoGPU(RuntimeError):
    """There is no GPU; the message is meant to be shown as it is."""


def ended(status: int | None) -> str:
    """How a process ended, by its exit status; None if it was killed as it took too long."""
    if status is None:
        return "killed: it had not ended in time"
    if status < 0:
        return f"died of {signal.Signals(-status).name}"
    return f"ended with status {status}"


def missing(modules: Iterable[str]) -> list[str]:
    """Those modules that cannot be imported, without importing them."""
    return [name for name in modules if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what it is a part of is missing
        return False


def host_bytes() -> int:
    """The host's memory, or what the control group of this process may have of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        text = path.read_text(encoding="ascii").strip() if path.exists() else ""
        if text.isdigit():
            total = min(total, int(text))
    return total


def cores() -> int:
    return len(os.sched_getaffinity(0))


def pinned_limit_gib(host: int) -> int:
    """What `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` is set to on a host with so many bytes."""
    return max(1, int(_PINNED_SHARE * host / 2**30))


def status_bytes(field: str) -> int:
    """A figure of this process's memory: "VmRSS" is what is resident, "VmHWM" the most ever."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise ValueError(f"expected {field} in /proc/self/status, got none; ask for VmRSS or VmHWM")


def gpu() -> dict[str, str]:
    """What nvidia-smi says of the first GPU; {} if there is none, or no nvidia-smi."""
    fields = ("name", "driver_version", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.strip().splitlines()[0].split(", ")
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}


def summary() -> dict[str, Any]:
    """The first lines of the report."""
    nvidia = gpu()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = {x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")}
    return {
        "GPU": nvidia.get("name", "none"),
        "GPU memory": nvidia.get("memory.total", "-"),
        "driver": nvidia.get("driver_version") or _kernel_module() or "-",
        "CPU": ", ".join(sorted(models)) or platform.machine(),
        "cores": cores(),
        "host memory": f"{host_bytes() / 2**30:.1f} GiB",
        "Python": platform.python_version(),
        **{name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy", "numba")},
        "commit": _commit(),
    }


def _kernel_module() -> str:
    """The driver's version as its kernel module has it; "" if there is none."""
    path = Path("/proc/driver/nvidia/version")
    return path.read_text(encoding="utf-8").splitlines()[0] if path.exists() else ""


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "not known"
    return done.stdout.strip()
