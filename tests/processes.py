"""Separate processes for tests that need another set-up, or that may hang or die."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# With these flags, XLA compiles a step seven times as fast as by default. The last option, which
# has no flag of its own, disables the MLIR emitters for fused loops. Checked on jax 0.10.2 and
# 0.11.2, with `xla_backend_extra_options` and without; other versions ignore it.
QUICK_TO_COMPILE = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)


def start(*command: str | Path, devices: int | None = 1) -> subprocess.Popen:
    """Starts Python with these arguments; `devices` is the number of CPU devices, if set."""
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=Path(__file__).parents[1],
        env=environment(devices),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_process(
    module: str, function: str, *args: Any, devices: int | None = None
) -> subprocess.Popen:
    """Calls a test module's function in a new interpreter."""
    code = f"import tests.{module} as module; module.{function}(*{args!r})"
    return start("-c", code, devices=devices)


def output(process: subprocess.Popen, timeout_s: float = 300) -> tuple[int, str]:
    """Waits for a process to end by itself; returns its exit code and remaining output."""
    try:
        text, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        raise AssertionError(f"still running after {timeout_s} s:\n{text[-3000:]}") from None
    return process.returncode, text


def environment(devices: int | None = None) -> dict[str, str]:
    """Returns the environment for a process with `devices` CPU devices."""
    if devices is None:
        return dict(os.environ)
    flags = f"--xla_force_host_platform_device_count={devices} {QUICK_TO_COMPILE}"
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def assert_ends(process: subprocess.Popen, code: int | None = 0) -> str:
    """Checks that a process ends with this exit code (None: any but 0); returns its output."""
    ended, text = output(process)
    assert ended if code is None else ended == code, f"code {ended}:\n{text[-3000:]}"
    return text


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yields a port that the kernel gives to no other process, and that JAX's service can share."""
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as holder:
        # Binds like the service: to all addresses of both families, ready to share.
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("::", 0))
        yield holder.getsockname()[1]


def run_together(
    module: str, function: str, count: int, devices: int, *args: Any, code: int | None = 0
) -> list[str]:
    """Returns the outputs of processes that each call `function(me, port, count, *args)`."""
    with reserved_port() as port:
        processes = [
            start_process(module, function, me, port, count, *args, devices=devices)
            for me in range(count)
        ]
        try:
            return [assert_ends(process, code) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
