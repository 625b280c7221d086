"""Measures speed and stalls of a training loop without stalling it.

The loop hands over the loss of every step as a device scalar that may not exist yet. The meter
reads a loss only when its step is a whole interval old, so the device always has work queued. Rates
count tokens of steps whose loss exists, not of those dispatched.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax


class Row(NamedTuple):
    """The figures of one interval of steps. Rates are over it and the interval before."""

    step: int  # the last step of the interval, counted from 1
    loss: float  # mean over its steps that were not skipped, nats per token or label; NaN if none
    tokens_per_s: float  # without padding
    wait_share: float  # share of the time in which the loop waited for the host, 0 to 1
    skipped: int  # steps of the interval whose gradient was not finite


class Totals(NamedTuple):
    """Rates over a stretch of time."""

    seconds: float
    tokens_per_s: float
    wait_share: float


class Mark(NamedTuple):
    """A moment, and the tokens that had been trained on by then."""

    tokens_done: int
    time_s: float
    waited_s: float


class Taken(NamedTuple):
    """A step that is in no row yet."""

    loss: jax.Array | float
    skipped: jax.Array | int  # the number of steps that had been skipped after it
    tokens: int


class Meter:
    """Turns the losses of all steps into one `Row` for every `log_every` of them.

    Call `start` when the first steps, with their compilation, are done and before the others are
    dispatched; `step` after every step; `drain` after the last one.

    Args:
        log_every: Steps in an interval.
        waited_s: Returns the seconds, since any fixed moment, that the loop waited for the host.
        steps_done: Steps before the first that `step` takes, of a run that goes on.
        state: What `state` returned after these.
    """

    def __init__(
        self,
        *,
        log_every: int,
        waited_s: Callable[[], float],
        steps_done: int = 0,
        state: Mapping[str, Any] | None = None,
    ):
        self._log_every = log_every
        self._waited_s = waited_s
        unread = [] if state is None else list(zip(state["losses"], state["skipped"], strict=True))
        self._unread: deque[Taken] = deque(Taken(*pair, tokens=0) for pair in unread)
        self._steps_read = steps_done - len(unread)
        self._tokens_read = 0
        self._skipped = 0 if state is None else state["skipped_before"]  # by the last row
        self._paused_s = 0.0

    def start(self) -> None:
        """Starts the clock. Earlier steps must have no tokens, as they are in no rate."""
        self._started = Mark(0, self._now(), self._waited_s())
        # Two intervals: the last one of a run may be done when it is first looked at, and steps
        # that took no time have no rate.
        self._last_two = deque([self._started], maxlen=2)

    def step(self, loss: jax.Array, *, skipped: jax.Array, tokens: int) -> Row | None:
        """Takes a step; once per interval, returns the row of the interval before.

        When it returns a row, it blocks until the device has done all but the last `log_every`
        steps; otherwise it does not.

        Args:
            loss: Scalar.
            skipped: The number of steps of the run that had been skipped after it, a scalar.
            tokens: Tokens of its batch, without padding.
        """
        self._unread.append(Taken(loss, skipped, tokens))
        enough = self._to_next_row() + self._log_every
        return self._next_row() if len(self._unread) >= enough else None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The time in this context is in no rate. The device must have no step to do."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - begin

    def catch_up(self) -> list[Row]:
        """The rows of whole intervals that are left. Blocks until these are done."""
        rows = []
        while len(self._unread) >= self._to_next_row():
            rows.append(self._next_row())
        return rows

    def drain(self) -> list[Row]:
        """The rows of the steps that are left. Blocks until they are done."""
        rows = []
        while self._unread:
            rows.append(self._next_row())
        return rows

    def state(self) -> dict[str, Any]:
        """The steps that are in no row yet, for JSON. Blocks until they are done."""
        taken = jax.device_get(list(self._unread))
        return {
            "losses": [float(one.loss) for one in taken],
            "skipped": [int(one.skipped) for one in taken],
            "skipped_before": self._skipped,
        }

    def since_start(self) -> Totals:
        """The rates from `start` until now."""
        return self._totals(self._started, self._mark())

    def _to_next_row(self) -> int:
        # Fewer than `log_every` where the last start had another one.
        return self._log_every - self._steps_read % self._log_every

    def _next_row(self) -> Row:
        count = min(self._to_next_row(), len(self._unread))
        taken = jax.device_get([self._unread.popleft() for _ in range(count)])  # blocks
        self._steps_read += count
        self._tokens_read += sum(one.tokens for one in taken)
        now = self._mark()
        rates = self._totals(self._last_two[0], now)
        self._last_two.append(now)
        before = [self._skipped, *(int(one.skipped) for one in taken)]
        losses = [x.loss for x, b in zip(taken, before, strict=False) if int(x.skipped) == b]
        skipped, self._skipped = before[-1] - before[0], before[-1]
        loss = float(sum(losses)) / len(losses) if losses else math.nan
        return Row(self._steps_read, loss, rates.tokens_per_s, rates.wait_share, skipped)

    def _mark(self) -> Mark:
        # The unread losses are arrays, but for those that a resumed run begins with, which have no
        # tokens.
        done = sum(
            x.tokens
            for x in self._unread
            if x.tokens and x.loss.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
        )
        return Mark(self._tokens_read + done, self._now(), self._waited_s())

    def _now(self) -> float:
        return time.perf_counter() - self._paused_s

    def _totals(self, before: Mark, after: Mark) -> Totals:
        seconds = after.time_s - before.time_s
        return Totals(
            seconds=seconds,
            tokens_per_s=(after.tokens_done - before.tokens_done) / seconds,
            wait_share=(after.waited_s - before.waited_s) / seconds,
        )
