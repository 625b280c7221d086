"""When a run with a `FitWindow` measures itself, and which windows it chooses by that."""

import logging
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from zenflow_jax._device.state import ZenFlowState, with_interval
from zenflow_jax._diagnostics.timeline import Span
from zenflow_jax._plan.rules import FIRST_INTERVAL, INTERVALS, FitWindow
from zenflow_jax._planner.host_work import busy_share, host_work, smallest_that_hides

#: Steps that are measured, and the least that must be: a resumed run has no more before it chooses,
#: and the host has nothing to do for a step that was skipped.
_MEASURED, _LEAST = 16, 12
#: Steps before them, in which programs are compiled and memory is touched first.
_SETTLING = 4

_logger = logging.getLogger("zenflow_jax")


class Worked(NamedTuple):
    """What the host has done since the run began.

    Attributes:
        work_s: Seconds of work.
        skipped: Steps without any, because their gradients were not finite.
    """

    work_s: float
    skipped: int


class WindowFit:
    """One run's choice, which is still to come. Steps are the run's, counted from 1.

    Args:
        rule: What the user asked for.
        warm_up: Steps of the warm-up.
        begun: Steps that were made before.
    """

    def __init__(self, rule: FitWindow, warm_up: int, begun: int):
        self.interval = rule.interval
        #: After this step the choice is made.
        self.last = warm_up + rule.after
        self._first = max(self.last - _MEASURED, begun + _SETTLING)
        while self.last <= begun or (self.measures and self.last - self._first < _LEAST):
            self.last += INTERVALS[-1]
        self._warm_up = warm_up
        self._before = Worked(0.0, 0)

    @property
    def after(self) -> int:
        """Steps between the warm-up's end and the choice."""
        return self.last - self._warm_up

    @property
    def measures(self) -> bool:
        """Whether the choice is made by measuring; else the user has made it."""
        return self.interval is None

    def begins_after(self, step: int) -> bool:
        """Whether steps are measured from the next one on."""
        return self.measures and step == self._first

    def begin(self, before: Worked) -> None:
        """Begins to measure."""
        self._before = before

    def choose(
        self,
        given: ZenFlowState,
        spans: Iterable[Span],
        now: Worked,
        *,
        compact: bool,
        affordable: Callable[[int], bool],
        agree: Callable[[int], int],
    ) -> int | None:
        """The shortest windows that hide, after the step `last`.

        None if too many of the measured steps were skipped. Then the choice is yet to come: the
        next steps are measured, and `last` is after them.

        Args:
            given: The state as the caller has it.
            spans: What the steps that were measured were made of, and others.
            now: What the host has done so far.
            compact: Whether the engine keeps moments in 8 bits.
            affordable: Whether there is memory for windows of so many steps.
            agree: Of what one process would choose, what all of them do.
        """
        if self._steps(now) < _LEAST:
            self._first = self.last
            self.last += INTERVALS[-1]
            self.begin(now)
            return None
        busy = self.busy(given, spans, now, compact=compact)
        found = agree(_smallest_of(busy, affordable))
        _logger.info(
            "from step %d on, %d steps in a window: the host needs %.2f of the time that it has "
            "then, and %s. `update_interval=FitWindow(%d, %d)` repeats the run",
            self.last + 1,
            found,
            busy[found],
            ", ".join(f"{busy[x]:.2f} with {x}" for x in busy if x != found),
            found,
            self.after,
        )
        return found

    def busy(
        self, given: ZenFlowState, spans: Iterable[Span], now: Worked, *, compact: bool
    ) -> dict[int, float]:
        """Of windows of each length, the share of its time that the host would need.

        Args: As for `choose`.
        """
        of_step: defaultdict[int, float] = defaultdict(float)
        for span in spans:
            if span.row == "device" and self._first < span.number <= self.last:
                of_step[span.number] += span.end - span.start
        # The median: an evaluation or a save may have come in between.
        step_s = max(statistics.median(of_step.values()), 1e-9)
        of_first = host_work(with_interval(given, FIRST_INTERVAL), compact=compact)
        moved = self._steps(now) * of_first.mean
        rate = moved / max(now.work_s - self._before.work_s, 1e-9)
        return {
            interval: busy_share(with_interval(given, interval), rate, step_s, compact=compact)
            for interval in INTERVALS
        }

    def _steps(self, now: Worked) -> int:
        """Measured steps that the host had work with."""
        return self.last - self._first - (now.skipped - self._before.skipped)


def _smallest_of(busy: dict[int, float], affordable: Callable[[int], bool]) -> int:
    """The shortest windows that hide, else those that come closest; there must be memory for them.

    Longer windows are not always less work: sums of their mail are, where it is too much to keep.
    """
    there = {interval: share for interval, share in busy.items() if affordable(interval)}
    return smallest_that_hides(there) or min(there, key=there.__getitem__)
