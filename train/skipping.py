"""Steps that are skipped, because their gradient is not finite: when they are too many.

One such step is no harm, and both halves of zenflow pass over it, as does the script's adamw. But a
weight that is not a number, or a learning rate that is far too large, makes all of them so: the run
would go on to its end and write the model that it had begun with.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import jax

# A count is read when the device is so many steps further: reading it then waits for nothing.
BEHIND = 4


class NotFiniteError(Exception):
    """A run trains nothing, or will; the message is meant to be shown as it is."""


class SkippedSteps:
    """Looks after the count of skipped steps. Call `step` after each step, and `finish` at the end.

    Args:
        most: So many skipped steps in a row end the run.
        first: The first step that it is called after.
        skipped: Those skipped before that one.
        remedy: What may have gone wrong, and how to go on.
    """

    def __init__(self, *, most: int, first: int, skipped: int, remedy: str):
        self._most = most
        self._next = first  # the step that is read next
        self._unread: deque[jax.Array] = deque()
        self._remedy = remedy
        self._begin = first
        self._at_begin = skipped
        self.total = skipped
        self._in_a_row = 0

    def step(self, total: jax.Array) -> None:
        """Takes how many steps have been skipped after a step.

        Blocks until the device has done all but the last few steps.

        Raises:
            NotFiniteError: If the last ones that are known were all skipped, and are too many.
        """
        self._unread.append(total)
        if len(self._unread) > BEHIND:
            self._read()

    def was_last(self) -> bool:
        """Whether the last step was skipped. Blocks until the device has done it.

        Raises:
            NotFiniteError: As `step`.
        """
        while self._unread:
            self._read()
        return self._in_a_row > 0

    def finish(self) -> None:
        """Reads the counts that are left.

        Raises:
            NotFiniteError: If there are too many in a row, or no step was taken that was not.
        """
        while self._unread:
            self._read()
        taken = self._next - self._begin
        if taken and self.total - self._at_begin == taken:
            self._fail(taken)

    def _read(self) -> None:
        total = int(jax.device_get(self._unread.popleft()))
        self._in_a_row = self._in_a_row + 1 if total > self.total else 0
        self.total = total
        self._next += 1
        if self._in_a_row >= self._most:
            self._fail(self._in_a_row)

    def _fail(self, count: int) -> None:
        last = self._next - 1
        raise NotFiniteError(
            f"expected gradients that are finite, got none in steps {last - count + 1} to {last}, "
            f"which were all skipped: nothing is learned any more. {self._remedy}"
        )


def check_finite(figures: Mapping[str, float], remedy: str) -> None:
    """Refuses to begin with a model whose loss is not finite.

    Args:
        figures: Of the validation before the first step.
        remedy: What may have gone wrong, and how to go on.

    Raises:
        NotFiniteError: If a figure is not finite.
    """
    bad = {name: value for name, value in figures.items() if not math.isfinite(value)}
    for name, value in bad.items():
        raise NotFiniteError(
            f"expected a finite validation {name} before the first step, got {value}: every step "
            f"would be skipped. {remedy}"
        )
