"""Handles signals that stop a run: the run saves a checkpoint, and prints how to resume.

Python runs a handler only once the main thread has finished compiling or waiting for the device. To
respond at once, a separate thread receives signals through the pipe of `signal.set_wakeup_fd`.

If there is nothing to save, or on a second signal, the process exits at once. With several
processes, a signal to any of them is enough; jax then finds a step after which all can stop.
SIGUSR1 is treated as SIGTERM, because many batch scripts send it before a time limit.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import jax
from jax.experimental import multihost_utils

from train.cli.command_line import PROGRAM


class Stopped(SystemExit):
    """The run has saved a checkpoint after a signal; the message explains how to resume it."""

    def __init__(self, message: str, *, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number


class Interrupted(Exception):
    """A validation was interrupted by a signal."""


class StopRequest:
    """Receives SIGTERM, SIGUSR1 and SIGINT. Use it in a `with` block on the main thread."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._number: int | None = None
        self._nothing_to_save: str | None = "no step has finished since the start"
        self._lock = threading.Lock()  # guards the two attributes above
        self._before = {}

    def __enter__(self) -> StopRequest:
        self._alone = jax.process_count() == 1
        self._pipe, self._end = os.pipe()
        os.set_blocking(self._end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._end, warn_on_full_buffer=False)
        # With several processes, jax handles SIGTERM, and its service informs the others.
        self._sigterm_handler = _swapped_handler(signal.SIGTERM)
        for number in self.SIGNALS:
            self._before[number] = signal.signal(number, _do_nothing)
        threading.Thread(target=self._listen, name="stop-request", daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # None: not set from Python
                signal.signal(number, handler)
        _swapped_handler(signal.SIGTERM, self._sigterm_handler)  # jax's, for the process's next run
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._end)  # ends the thread

    def begin(self) -> None:
        """Records that there are now steps to save."""
        with self._lock:
            self._nothing_to_save = None

    def end(self, reason: str) -> int | None:
        """Records why no steps are left to save; returns an earlier signal, if any."""
        with self._lock:
            self._nothing_to_save = reason
            return self._number if self._alone else None

    def after(self, step: int) -> int | None:
        """Returns the signal that ends the run after `step`, or None; the same in every process."""
        if self._alone:
            return self._number
        return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else None

    def check(self) -> None:
        """Raises `Interrupted` if the run must stop; several processes agree on a step instead."""
        if self._alone and self._number is not None and self._nothing_to_save is None:
            raise Interrupted

    def _listen(self) -> None:
        while received := os.read(self._pipe, 1):
            if received[0] in self.SIGNALS:
                self._handle(received[0])
        os.close(self._pipe)

    def _handle(self, number: int) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGUSR1:
            number = signal.SIGTERM
        with self._lock:
            first, self._number = self._number is None, self._number or number
            reason = self._nothing_to_save
        if not first:
            _exit_now(number, f"aborted by {name}; the last checkpoint is unchanged")
        if reason is not None:
            _exit_now(number, f"stopped by {name}: {reason}")
        self._say(f"{name}: stopping after this step and saving; send another signal to abort")
        if not self._alone:
            own = _swapped_handler(signal.SIGTERM, self._sigterm_handler)
            # The handler runs on this thread, before this call returns.
            signal.raise_signal(signal.SIGTERM)
            _swapped_handler(signal.SIGTERM, own)


def _swapped_handler(number: int, new: ctypes.Array | None = None) -> ctypes.Array:
    """Returns a signal's handler and sets `new`; `signal` cannot restore a C handler."""
    old = ctypes.create_string_buffer(256)  # a `struct sigaction` has 152 bytes in glibc
    ctypes.CDLL(None).sigaction(number, new, old)
    return old


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Does nothing; Python writes to the pipe only if there is a Python handler."""


def _exit_now(number: int, line: str) -> None:
    # Avoids `sys.stderr` and a normal exit, because the main thread may hold their locks.
    os.write(2, f"{line}\n".encode())
    os._exit(128 + number)


def how_to_resume(signal_number: int, step: int, folder: Path) -> str:
    name = signal.Signals(signal_number).name
    saved = f"stopped by {name} after step {step}; checkpoint saved."
    run = f"--run {shlex.quote(folder.name)}"
    if "SLURM_JOB_ID" in os.environ:
        return f"{saved} Resume with the same sbatch or srun command and {run}"
    command = f"{PROGRAM} {shlex.quote(str(folder / 'settings.toml'))} {run}"
    more = " (and --coordinator, --processes, --process)" if jax.process_count() > 1 else ""
    return f"{saved} Resume with:\n{command}{more}"
