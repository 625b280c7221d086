"""Reads facts about the machine without jax, which would occupy the GPU."""

import os
import platform
import signal
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "numba")
ROOT = Path(__file__).resolve().parents[1]


def ended(status: int | None) -> str:
    """Describes an exit status; None means that the process was killed after its time limit."""
    if status is None:
        return "killed: it had not finished in time"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def host_bytes() -> int:
    """Returns the host's memory, or the limit of this process's control group if it is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        text = path.read_text(encoding="ascii").strip() if path.exists() else ""
        if text.isdigit():
            total = min(total, int(text))
    return total


def cores() -> int:
    return len(os.sched_getaffinity(0))


def gpu() -> dict[str, str]:
    """Returns nvidia-smi's facts about the first GPU; {} without a GPU or nvidia-smi."""
    fields = ("name", "driver_version", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.strip().splitlines()[0].split(", ")
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}


def summary() -> dict[str, Any]:
    """Returns the machine and package versions, for the top of a report."""
    nvidia = gpu()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = {x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")}
    return {
        "GPU": nvidia.get("name", "none"),
        "GPU memory": nvidia.get("memory.total", "-"),
        "driver": nvidia.get("driver_version", "-"),
        "CPU": ", ".join(sorted(models)) or platform.machine(),
        "cores": cores(),
        "host memory": f"{host_bytes() / 2**30:.1f} GiB",
        "Python": platform.python_version(),
        **{name: metadata.version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "not known"
    return done.stdout.strip()
