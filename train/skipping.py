"""Counts steps that are skipped because their gradient is not finite, and ends a run of many."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import jax

from train import Failure

# A count is read when the device is so many steps further: reading it then waits for nothing.
BEHIND = 4


class NotFiniteError(Failure):
    """A run trains nothing, or will."""


class SkippedSteps:
    """Watches the count of skipped steps, from step `first` on; `most` in a row end the run."""

    def __init__(self, *, most: int, first: int, skipped: int, remedy: str):
        self._most, self._remedy = most, remedy
        self._begin, self._at_begin = first, skipped
        self._next = first  # the step that is read next
        self._unread: deque[jax.Array] = deque()
        self.total = skipped
        self._in_a_row = 0

    def step(self, total: jax.Array) -> None:
        """Takes the total of skipped steps after a step; blocks until most steps are done."""
        self._unread.append(total)
        if len(self._unread) > BEHIND:
            self._read()

    def was_last(self) -> bool:
        """Whether the last step was skipped; blocks until the device has done it."""
        while self._unread:
            self._read()
        return self._in_a_row > 0

    def finish(self) -> None:
        """Reads the counts that are left; raises if every step was skipped, too."""
        self.was_last()
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
    """Raises `NotFiniteError` if a figure of the validation before the first step is not finite."""
    for name, value in figures.items():
        if not math.isfinite(value):
            raise NotFiniteError(f"expected a finite validation {name}, got {value}. {remedy}")


def causes_of_infinity(model: str | None, dtype: str, learning_rate: float) -> str:
    weights = "" if model is None else f"a weight in {model}, "
    computed = "" if dtype == "float32" else f", or {dtype} (--dtype float32)"
    return (
        f"Possible causes: {weights}the data, a learning rate that is too large (here "
        f"{learning_rate:g}){computed}."
    )
