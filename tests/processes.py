"""Processes of their own for tests that need another set-up, or that may hang or die."""

import ast
import contextlib
import importlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

# A seventh of the time that XLA takes for a step by default. The last one, which is no flag of its
# own, leaves out what writes each fused loop by way of MLIR. Checked on jax 0.10.2 and 0.11.2, with
# `xla_backend_extra_options` and without; a version that does not know it ignores it.
QUICK_TO_COMPILE = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)


def start_process(
    module: str, function: str, *args: Any, devices: int | None = None
) -> subprocess.Popen:
    """Calls a function of one of the test modules in a new interpreter."""
    code = f"import tests.{module} as module; module.{function}(*{args!r})"
    return _python(code, devices, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _python(code: str, devices: int | None, **streams: Any) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        env=environment(devices),
        text=True,
        **streams,
    )


def environment(devices: int | None = None) -> dict[str, str]:
    """The environment of a process whose CPU is so many devices to jax."""
    if devices is None:
        return dict(os.environ)
    flags = f"--xla_force_host_platform_device_count={devices} {QUICK_TO_COMPILE}"
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def assert_ends(process: subprocess.Popen, code: int = 0, timeout_s: float = 120) -> str:
    """It ends by itself, with that exit code; what it wrote."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout_s} s:\n{output[-3000:]}") from None
    assert process.returncode == code, f"code {process.returncode}:\n{output[-3000:]}"
    return output


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that the kernel gives to nobody else, and that JAX's service can share."""
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as holder:
        # As the service binds: all addresses of both families, and ready to share.
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("::", 0))
        yield holder.getsockname()[1]


class Outcome(NamedTuple):
    """What became of a process in a function."""

    code: int | None  # its exit code; None if it lives on, and is there for another function
    output: str


class Group:
    """Processes in which functions of these tests run together, one function after the other.

    To start and to meet takes a process longer than most functions take. A function that raises
    ends its process, one that is not over in time all of them; then the group is good for nothing.
    """

    def __init__(self, count: int, devices: int):
        self.size = (count, devices)
        self._stack = contextlib.ExitStack()
        self._port = self._stack.enter_context(reserved_port())
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._pool = self._stack.enter_context(ThreadPoolExecutor(count))
        self._processes = [self._start(me) for me in range(count)]

    def _start(self, me: int) -> subprocess.Popen:
        code, pipe = "from tests import processes; processes.serve()", subprocess.PIPE
        with self._output(me).open("ab") as output:
            return _python(code, self.size[1], stdin=pipe, stdout=pipe, stderr=output)

    def _output(self, me: int) -> Path:
        return self._folder / f"{me}.txt"

    def run(self, module: str, function: str, *args: Any, timeout_s: float = 300) -> list[Outcome]:
        """Calls `function(me, port, count, *args)` of a module of these tests in every process."""
        before = [self._output(me).stat().st_size for me in range(len(self._processes))]
        for me, process in enumerate(self._processes):
            call = (module, function, me, self._port, len(self._processes), *args)
            process.stdin.write(f"{call!r}\n")
            process.stdin.flush()
        said = [self._pool.submit(process.stdout.readline) for process in self._processes]
        try:
            over = [future.result(timeout_s) == "over\n" for future in said]
        except TimeoutError:
            for process in self._processes:
                process.kill()
            over = [False] * len(said)
        outcomes = []
        for me, process in enumerate(self._processes):
            code = None if over[me] else process.wait(timeout_s)
            with self._output(me).open(encoding="utf-8", errors="replace") as file:
                file.seek(before[me])
                outcomes.append(Outcome(code, file.read()))
        return outcomes

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def close(self) -> None:
        """Lets the processes end, which has to go well for those that are left."""
        left = [process for process in self._processes if process.poll() is None]
        try:
            for process in left:
                process.stdin.close()
            codes = [process.wait(timeout=120) for process in left]
            texts = [self._output(me).read_text("utf-8") for me in range(len(self._processes))]
            assert not any(codes), f"codes {codes}:\n{texts}"
        finally:
            for process in self._processes:
                process.kill()
                process.wait()
                process.stdin.close()
                process.stdout.close()
            self._stack.close()


def serve() -> None:
    """A process of a `Group`: runs what it is told to, until its stdin ends."""
    # What functions print goes where errors go; this is for the group alone.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            module, function, *args = ast.literal_eval(line)
            getattr(importlib.import_module(f"tests.{module}"), function)(*args)
            answers.write("over\n")
            answers.flush()
