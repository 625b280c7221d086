"""When a run with a `FitWindow` measures itself, and which windows it chooses by that."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable

from zenflow_jax._device.state import ZenFlowState, with_interval
from zenflow_jax._diagnostics.timeline import Span
from zenflow_jax._plan.rules import FIRST_INTERVAL, INTERVALS, FitWindow
from zenflow_jax._planner.host_work import busy_share, host_work, smallest_that_hides

#: Steps that are measured, and the least that are where a run was resumed in between.
_MEASURED, _LEAST = 16, 12
#: Steps before them, in which programs are compiled and memory is touched first.
_SETTLING = 4


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
        self.after = self.last - warm_up
        self._work_s = 0.0

    @property
    def measures(self) -> bool:
        """Whether the choice is made by measuring; else the user has made it."""
        return self.interval is None

    def begins_after(self, step: int) -> bool:
        """Whether steps are measured from the next one on."""
        return self.measures and step == self._first

    def begin(self, work_s: float) -> None:
        """Begins to measure; the host has worked so many seconds before."""
        self._work_s = work_s

    def busy(
        self, given: ZenFlowState, spans: Iterable[Span], work_s: float, *, compact: bool
    ) -> dict[int, float]:
        """Of windows of each length, the share of its time that the host would need.

        Args:
            given: The state as the caller has it.
            spans: What the steps that were measured were made of, and others.
            work_s: Seconds that the host has worked, those before `begin` included.
            compact: Whether the engine keeps moments in 8 bits.
        """
        of_step: defaultdict[int, float] = defaultdict(float)
        for span in spans:
            if span.row == "device" and self._first < span.number <= self.last:
                of_step[span.number] += span.end - span.start
        # The median: an evaluation or a save may have come in between.
        step_s = max(statistics.median(of_step.values()), 1e-9)
        steps = self.last - self._first
        moved = steps * host_work(with_interval(given, FIRST_INTERVAL), compact=compact).mean
        rate = moved / max(work_s - self._work_s, 1e-9)
        return {
            interval: busy_share(with_interval(given, interval), rate, step_s, compact=compact)
            for interval in INTERVALS
        }


def smallest_of(busy: dict[int, float], affordable: Callable[[int], bool]) -> int:
    """The shortest windows that hide, else those that come closest; there must be memory for them.

    Longer windows are not always less work: sums of their mail are, where it is too much to keep.
    """
    there = {interval: share for interval, share in busy.items() if affordable(interval)}
    return smallest_that_hides(there) or min(there, key=there.__getitem__)
