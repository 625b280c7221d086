"""Measures a training loop's loss, speed, stalls and skipped steps without stalling it.

A step's loss is read one interval later, and whether it was skipped because its gradient was not
finite; too many skipped steps in a row end the run. Rates count tokens of finished steps, not of
dispatched steps.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

import zenflow_jax
from train import Failure
from train.cli.settings import StepSettings


class NotFiniteError(Failure):
    """A run makes no progress, or cannot make progress."""


class Row(NamedTuple):
    """The metrics of one interval of steps. Rates also cover the previous interval."""

    step: int  # the last step of the interval, counted from 1
    loss: float  # mean over steps that were not skipped, nats per token or label; NaN if all were
    tokens_per_s: float | None  # without padding; None if all steps compiled
    wait_share: float  # share of time that the loop waited for the host
    skipped: int  # steps in the interval with a non-finite gradient


class Totals(NamedTuple):
    seconds: float
    tokens_per_s: float | None  # None if all steps compiled, as each length's first step does
    wait_share: float


class UnreadStep(NamedTuple):
    """A step that is not yet in a row."""

    loss: jax.Array | float
    skipped: jax.Array | int  # total number of skipped steps after it
    tokens: int = 0


class Meter:
    """Turns the losses of all steps into a `Row` for the first step and every `log_every` steps.

    Call `start` when the first steps are compiled and finished, `step` after every step and its
    exchange, `drain` and `finish` after the last step. A resumed run passes its `steps_done` and
    `state`, which contains all earlier rows. `max_skipped` skipped steps in a row raise an error
    that contains the `remedy`.
    """

    def __init__(
        self,
        *,
        log_every: int,
        stats: Callable[[], zenflow_jax.EngineStats] | None,
        max_skipped: int,
        remedy: str,
        steps_done: int = 0,
        state: Mapping[str, Any] | None = None,
    ):
        state = state or {"rows": [], "unread": [], "skipped": 0}
        self._log_every, self._stats = log_every, stats
        self._max_skipped, self._remedy = max_skipped, remedy
        self.rows = [Row(*row) for row in state["rows"]]
        self._unread = deque(UnreadStep(*step) for step in state["unread"])
        self._steps_read, self._tokens_read = steps_done - len(self._unread), 0
        self.total_skipped: int = state["skipped"]  # up to the last row
        self._skipped_in_a_row, self._paused_s = 0, 0.0
        self._begun = steps_done

    def start(self) -> None:
        """Starts the clock. Earlier steps must have no tokens, because no rate includes them."""
        self._started = self._mark()
        # Two intervals, because the last interval's steps may seem to take no time.
        self._last_two = deque([self._started], maxlen=2)

    def step(self, loss: jax.Array, *, skipped: jax.Array, tokens: int) -> Row | None:
        """Records a step; once per interval, returns the row of the previous interval.

        It then blocks until the device has finished all but the last `log_every` steps.
        """
        self._unread.append(UnreadStep(loss, skipped, tokens))
        enough = self._to_next_row() + self._log_every
        return self._next_row() if len(self._unread) >= enough else None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time in this context from all rates. The device must be idle."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - begin

    def drain(self, *, whole: bool = False) -> Iterator[Row]:
        """Yields the rows of the remaining steps, or of `whole` intervals; waits for each."""
        while len(self._unread) >= (self._to_next_row() if whole else 1):
            yield self._next_row()

    def skipped_last(self) -> bool:
        """Returns whether the last step was skipped; blocks until the device has finished it."""
        last_two = [int(x.skipped) for x in jax.device_get(list(self._unread)[-2:])]
        if not last_two:
            return self._skipped_in_a_row > 0
        return last_two[-1] > ([self.total_skipped, *last_two])[-2]

    def finish(self) -> None:
        """Raises `NotFiniteError` if every step of this start was skipped; call `drain` first."""
        if self._skipped_in_a_row >= self._steps_read - self._begun > 0:
            self._fail()

    def state(self) -> dict[str, Any]:
        """Returns the state for a resumed run, as JSON. Blocks until all steps are finished."""
        unread = [(float(x.loss), int(x.skipped)) for x in jax.device_get(list(self._unread))]
        return {"rows": [*self.rows], "unread": unread, "skipped": self.total_skipped}

    def since_start(self) -> Totals:
        return _totals(self._started, self._mark())

    def _fail(self) -> None:
        last = self._steps_read
        raise NotFiniteError(
            f"steps {last - self._skipped_in_a_row + 1} to {last} were skipped, because their "
            f"gradients are not finite. {self._remedy}"
        )

    def _to_next_row(self) -> int:
        # Fewer than `log_every` after the first step, or if the last start had another interval.
        return self._log_every - self._steps_read % self._log_every if self._steps_read else 1

    def _next_row(self) -> Row:
        count = min(self._to_next_row(), len(self._unread))
        taken = [self._unread.popleft() for _ in range(count)]
        losses, before = [], self.total_skipped
        for step in jax.device_get(taken):  # blocks
            self._steps_read += 1
            if step.skipped == self.total_skipped:
                losses.append(float(step.loss))
                self._skipped_in_a_row = 0
                continue
            self.total_skipped = int(step.skipped)
            self._skipped_in_a_row += 1
            if self._skipped_in_a_row >= self._max_skipped:
                self._fail()
        self._tokens_read += sum(step.tokens for step in taken)
        mark = self._mark()
        rates = _totals(self._last_two[0], mark)
        self._last_two.append(mark)
        loss = sum(losses) / len(losses) if losses else math.nan
        skipped = self.total_skipped - before
        row = Row(self._steps_read, loss, rates.tokens_per_s, rates.wait_share, skipped)
        self.rows.append(row)
        return row

    def _mark(self) -> tuple[int, float, float]:
        """Returns the tokens, time and waits so far."""
        # Losses from a checkpoint are not arrays and have no tokens.
        unread: Any = self._unread
        finished = sum(x.tokens for x in unread if x.tokens and x.loss.is_ready())
        waited_s = self._stats().wait_s if self._stats else 0.0
        return self._tokens_read + finished, time.perf_counter() - self._paused_s, waited_s


def _totals(start: tuple[int, float, float], end: tuple[int, float, float]) -> Totals:
    tokens, seconds, waited_s = (x - y for x, y in zip(end, start, strict=True))
    return Totals(seconds, tokens / seconds if tokens else None, waited_s / seconds)


def check_finite(figures: Mapping[str, float], remedy: str) -> None:
    """Raises `NotFiniteError` if the validation before the first step is not finite."""
    for name, value in figures.items():
        if not math.isfinite(value):
            raise NotFiniteError(f"the validation {name} is {value}. {remedy}")


def causes_of_infinity(run: StepSettings) -> str:
    weights = "" if run.model is None else f"a weight in {run.model}, "
    rate = f"a learning rate that is too large (here {run.learning_rate:g})"
    computed = "" if run.dtype == "float32" else f", or {run.dtype} (--dtype float32)"
    return f"Possible causes: {weights}the data, {rate}{computed}."
