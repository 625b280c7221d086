"""Processes of their own for tests that need another set-up, or that may hang or die."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def start_process(
    module: str, function: str, *args: Any, devices: int | None = None
) -> subprocess.Popen:
    """`function` of a module of these tests in an interpreter of its own, with so many devices."""
    code = f"from tests import {module}; {module}.{function}(*{args!r})"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        env=environment(devices),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def environment(devices: int | None = None) -> dict[str, str]:
    """That of a process whose CPU is so many devices to jax."""
    if devices is None:
        return dict(os.environ)
    flags = f"--xla_force_host_platform_device_count={devices}"
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def assert_ends_well(process: subprocess.Popen, timeout_s: float = 120) -> None:
    """It ends by itself, with code 0; else its output is shown."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout_s} s:\n{output[-3000:]}") from None
    assert process.returncode == 0, f"code {process.returncode}:\n{output[-3000:]}"


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that the kernel gives to nobody else, and that JAX's service can share."""
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as holder:
        # As the service binds: all addresses of both families, and ready to share.
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("::", 0))
        yield holder.getsockname()[1]
