"""Handles signals that stop a run: the run saves a checkpoint, and prints how to resume.

The first signal stops the run after a step, and a second one ends the process at once, as does any
signal while there is nothing to save. With several processes, a signal to any of them is enough:
jax, which handles SIGTERM there, finds a step after which all can stop. SIGUSR1 is treated as
SIGTERM, because many batch scripts send it before a time limit.
"""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from train.cli.command_line import PROGRAM


class Stopped(SystemExit):
    """The run has saved a checkpoint after a signal; the message explains how to resume it."""

    def __init__(self, message: str, *, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number


class StopRequest:
    """Receives SIGTERM, SIGUSR1 and SIGINT. Use it in a `with` block on the main thread."""

    def __init__(self):
        self._number: int | None = None

    def __enter__(self) -> StopRequest:
        self._alone = jax.process_count() == 1
        numbers = (signal.SIGUSR1, signal.SIGINT, *[signal.SIGTERM] * self._alone)
        self._before = {number: signal.getsignal(number) for number in numbers}
        self._set(signal.SIG_DFL)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def begin(self) -> None:
        """Records that there are now steps to save."""
        self._set(self._handle)

    def end(self) -> int | None:
        """Records that no steps are left to save; returns an earlier signal, if any."""
        self._set(signal.SIG_DFL)
        return self._number if self._alone else None

    def after(self, step: int) -> int | None:
        """Returns the signal that ends the run after `step`, or None; the same in every process."""
        if self._alone:
            return self._number
        return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else None

    def _set(self, handler: Any) -> None:
        """Sets the handler of all signals; the default handler ends the process."""
        for number in self._before:
            is_default = handler == signal.SIG_DFL and number == signal.SIGUSR1
            signal.signal(number, _as_sigterm if is_default else handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._set(signal.SIG_DFL)
        name = signal.Signals(number).name
        line = f"{name}: stopping after this step and saving; send another signal to abort\n"
        os.write(2, line.encode())  # `print` cannot be called while the main thread prints
        self._number = signal.SIGTERM if number == signal.SIGUSR1 else number
        if not self._alone:
            signal.raise_signal(signal.SIGTERM)


def _as_sigterm(number: int, _: FrameType | None) -> None:
    signal.raise_signal(signal.SIGTERM)


def how_to_resume(signal_number: int, step: int, folder: Path) -> str:
    saved = f"stopped by {signal.Signals(signal_number).name} after step {step}; checkpoint saved."
    run = f"--run {shlex.quote(folder.name)}"
    command = f"{PROGRAM} {shlex.quote(str(folder / 'settings.toml'))} {run}"
    return f"{saved} Resume with the same command and {run}, or in one process with:\n{command}"
