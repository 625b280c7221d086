"""Speed and stalls of a training loop, without stalling it.

The loop hands over the loss of every step as a device scalar that may not exist yet. The meter
reads a loss only when its step is a whole interval old, so the device always has work queued. How
fast the steps go is counted in steps whose loss exists, not in steps that were dispatched.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Row(NamedTuple):
    """What is known of one interval of steps. Rates are over it and the interval before."""

    step: int  # the last step of the interval, counted from 1
    loss: float  # mean over the interval, nats per token or label
    tokens_per_s: float
    wait_share: float  # share of the time in which the loop waited for the host, 0 to 1


class Totals(NamedTuple):
    """Rates over a stretch of time."""

    seconds: float
    tokens_per_s: float
    wait_share: float


class Mark(NamedTuple):
    """A moment, and how many steps were done by then."""

    steps_done: int
    time_s: float
    waited_s: float


class Meter:
    """Turns the losses of all steps into one `Row` for every `log_every` of them.

    Call `start` when the first steps, with their compilation, are done and before the others are
    dispatched; `step` after every step; `drain` after the last one.

    Args:
        log_every: Steps in an interval.
        tokens_per_step: What the rate counts.
        waited_s: Gives the seconds, since any fixed moment, that the loop waited for the host.
        steps_done: Steps before the first that `step` takes, of a run that goes on.
        losses: Those of them that are in no row yet: what `losses` gave.
    """

    def __init__(
        self,
        *,
        log_every: int,
        tokens_per_step: int,
        waited_s: Callable[[], float],
        steps_done: int = 0,
        losses: Sequence[float] = (),
    ):
        self._log_every = log_every
        self._tokens_per_step = tokens_per_step
        self._waited_s = waited_s
        self._unread: deque[jax.Array] = deque(jnp.float32(loss) for loss in losses)
        self._steps_read = steps_done - len(losses)
        self._paused_s = 0.0

    def start(self, *, steps_done: int) -> None:
        """Starts the clock; the first `steps_done` steps are in no rate."""
        self._started = Mark(steps_done, self._now(), self._waited_s())
        # Two intervals, because the last one of a run is sometimes done when it is first looked
        # at, and steps that took no time have no rate.
        self._last_two = deque([self._started], maxlen=2)

    def step(self, loss: jax.Array) -> Row | None:
        """Takes the loss of a step; once per interval, gives the row of the interval before.

        Blocks, when it gives a row, until the device has done all but the last `log_every` steps.
        Does not block otherwise.
        """
        self._unread.append(loss)
        return self._next_row() if len(self._unread) == 2 * self._log_every else None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The time in here is in no rate. The device must have no step to do."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - begin

    def catch_up(self) -> list[Row]:
        """The row of the last whole interval, if it was not given yet. Blocks until it is done."""
        return [self._next_row()] if len(self._unread) >= self._log_every else []

    def drain(self) -> list[Row]:
        """The rows of the steps that are left. Blocks until they are done."""
        rows = []
        while self._unread:
            rows.append(self._next_row())
        return rows

    def losses(self) -> list[float]:
        """Of the steps that are in no row yet. Blocks until they are done."""
        return [float(loss) for loss in jax.device_get(list(self._unread))]

    def since_start(self) -> Totals:
        """The rates from `start` until now."""
        return self._totals(self._started, self._mark())

    def _next_row(self) -> Row:
        count = min(self._log_every, len(self._unread))
        losses = jax.device_get([self._unread.popleft() for _ in range(count)])  # blocks
        self._steps_read += count
        now = self._mark()
        rates = self._totals(self._last_two[0], now)
        self._last_two.append(now)
        loss = float(sum(losses)) / count
        return Row(self._steps_read, loss, rates.tokens_per_s, rates.wait_share)

    def _mark(self) -> Mark:
        done = self._steps_read + sum(loss.is_ready() for loss in self._unread)
        return Mark(done, self._now(), self._waited_s())

    def _now(self) -> float:
        return time.perf_counter() - self._paused_s

    def _totals(self, before: Mark, after: Mark) -> Totals:
        seconds = after.time_s - before.time_s
        return Totals(
            seconds=seconds,
            tokens_per_s=self._tokens_per_step * (after.steps_done - before.steps_done) / seconds,
            wait_share=(after.waited_s - before.waited_s) / seconds,
        )
