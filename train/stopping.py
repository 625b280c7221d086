"""Signals that ask a run to stop: it saves at the end of its step, and says how to go on.

A second signal ends the process at once. In a run of several processes one of them may be asked, or
all, each during another step; jax then finds a step at which all of them can stop.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

import jax
from jax.experimental import multihost_utils


class Stopped(Exception):
    """The run has saved itself because a signal asked it to stop; the message says how to go on."""

    def __init__(self, message: str, *, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number


class StopRequest:
    """Takes down SIGTERM and SIGINT. Use with `with`, on the main thread."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self):
        self._number: int | None = None
        self._before = {}

    def __enter__(self) -> StopRequest:
        if jax.process_count() == 1:
            for number in self.SIGNALS:
                self._before[number] = signal.signal(number, self._take)
        else:
            # SIGTERM belongs to jax's own service, which tells the other processes; it does not
            # know SIGINT.
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._pass_on)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def after(self, step: int) -> int | None:
        """The number of the signal for which the run is to stop after `step`, if it is.

        Every process must ask after every step; all get the same answer.
        """
        if jax.process_count() == 1:
            return self._number
        return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else None

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        for each in self.SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
