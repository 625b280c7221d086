"""Interpreters that have imported what the scripts import, for tests that start processes.

Most of what a short process does is to import jax and all that stands on it, 2 s each time. Here
one process imports, starts no backend, and splits itself for each that is wanted. What comes of
that is a process like any other: it runs a module or a command as its main program, with arguments,
environment, folder and streams of its own, hears signals, and ends by way of the interpreter's own
end. Tests of imports and of the interpreter itself start a cold one.

    python -m tests.warm serve SOCKET         # that process; until its stdin ends
    python tests/warm.py SOCKET -m MODULE ... # starts a process there, and stands for it here

The second imports nothing that takes time. It passes on signals and ends as the process does; when
it is killed, so is the process.
"""

import array
import atexit
import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading

# Other imports stand where they are used: what stands for a process is started for each anew.

ROOT = os.path.dirname(os.path.dirname(__file__))

_sockets: dict[tuple[tuple[str, str], ...], str] = {}


# Where jax keeps compiled programs: what it has read, a new process is told anew.
_CACHE = "JAX_COMPILATION_CACHE_DIR"
# In the environment of a process, the file that stands for its interpreter.
_EXECUTABLE = "ZENFLOW_JAX_TESTS_PYTHON"


def interpreter(environment: dict[str, str]) -> list[str]:
    """What stands for `sys.executable` in a command that is started with this environment."""
    # Read when jax is imported; all else when it is used.
    read = tuple(
        sorted(x for x in environment.items() if x[0].startswith("JAX_") and x[0] != _CACHE)
    )
    if read not in _sockets:
        _sockets[read] = _begin(environment)
    return [sys.executable, "-S", "-E", __file__, _sockets[read]]


def executable(environment: dict[str, str]) -> str:
    """A file that does: for code that starts `sys.executable`, and what that starts in turn."""
    command = interpreter(environment)
    path = os.path.join(os.path.dirname(command[-1]), "python")
    if not os.path.exists(path):
        import shlex

        with open(path, "x", encoding="utf-8") as file:
            words = shlex.join(command)
            file.write(f'#!/bin/sh\n{_EXECUTABLE}={shlex.quote(path)} exec {words} "$@"\n')
        os.chmod(path, 0o700)
    return path


def _begin(environment: dict[str, str]) -> str:
    """Starts the process that imports; gives its socket."""
    import shutil
    import subprocess
    import tempfile

    folder = tempfile.mkdtemp(prefix="warm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = os.path.join(folder, "socket")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.warm", "serve", path],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"ready\n"
    atexit.register(process.communicate)  # which ends its stdin
    return path


# --- the process that has imported ----------------------------------------------------------


def serve(path: str) -> list[str]:
    """Returns in each new process, with what it is to run; where it is called, never."""
    _import()
    # Whoever splits itself may have no other thread. Those of OpenBLAS, which NumPy starts, see to
    # themselves.
    import gc

    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()  # what is looked through by nobody stays shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        os.write(1, b"ready\n")
        while True:
            readable, _, _ = select.select([listener, 0], [], [])
            with contextlib.suppress(ChildProcessError):  # there is none
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if 0 in readable:
                os._exit(0)
            client, _ = listener.accept()
            if _fork() == 0:
                listener.close()
                return _start(client)
            client.close()


def _import() -> None:
    import importlib

    for name in ("numba", "pytest", "tests.elastic"):
        importlib.import_module(name)
    importlib.import_module("tests.shared_context").share_context()
    # For what it imports: it is itself run as a main program, for which it must be new.
    train = importlib.import_module("train.finetune")
    del sys.modules[train.__name__]
    del sys.modules["train"].finetune


def _fork() -> int:
    import warnings

    with warnings.catch_warnings():
        # Python 3.12 counts OpenBLAS's threads, too.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _start(client: socket.socket) -> list[str]:
    """Splits itself once more: one waits for the process, the other one is it and returns."""
    size = int.from_bytes(client.recv(4), "big")
    text, streams, _, _ = socket.recv_fds(client, size, 3)
    while len(text) < size:
        text += client.recv(size - len(text))
    wanted = json.loads(text)

    wakes, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    pid = _fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        client.close()
        os.close(wakes)
        os.close(wake)
        os.environ.clear()
        os.environ.update(wanted["environment"])
        sys.executable = os.environ.pop(_EXECUTABLE, sys.executable)
        sys.modules["jax"].config.update(_CACHE.lower(), os.environ.get(_CACHE))
        os.chdir(wanted["folder"])
        return wanted["arguments"]
    for number, stream in enumerate(streams):
        os.close(number)
        os.close(stream)
    client.sendall(pid.to_bytes(4, "big"))
    while True:
        readable, _, _ = select.select([client, wakes], [], [])
        if wakes in readable:
            _, status = os.waitpid(pid, 0)
            client.sendall(status.to_bytes(4, "big"))
            os._exit(0)
        if client in readable:  # what stands for the process is gone
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os._exit(0)


# --- what stands for a process --------------------------------------------------------------


def stand_for(path: str, arguments: list[str]) -> None:
    """Has a process started, and ends as it does."""
    wanted = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    text = json.dumps(wanted).encode("ascii")
    heard = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        server.sendall(len(text).to_bytes(4, "big"))
        streams = array.array("i", [0, 1, 2])
        server.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        pid = int.from_bytes(server.recv(4), "big")
        for number in (0, 1, 2):
            os.close(number)  # so that what reads and writes there sees the end of the process
        for each in heard:
            signal.signal(each, lambda number, _: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
        told = server.recv(4)
    assert len(told) == 4, "the process that waits for this one is gone"
    status = int.from_bytes(told, "big")
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _run(arguments: list[str]) -> None:
    """As `python -m module ...` or `python -c code ...`."""
    kind, what, *rest = arguments
    if kind == "-m":
        import runpy

        sys.argv = [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        assert kind == "-c", kind
        sys.argv = ["-c", *rest]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _run(serve(sys.argv[2]))
    else:
        stand_for(sys.argv[1], sys.argv[2:])
