"""When a window closes and when channels are selected again.

The device half in-graph, the engine and nobody else ask here; none of them may assume that
windows have equal length. Steps are counted from 1; step t's boundary lies between t and t + 1.

The same code decides for NumPy numbers (the engine) and for traced ones (in-graph). What it may
know of a step is what was known of the step before: an engine that wanted more would wait for the
device.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from zenflow_jax._plan.rules import AutoSelect, AutoWindow, EpochSelect


class Boundary(NamedTuple):
    """What happens after a step. Booleans, or traced ones if the step number is traced."""

    closes: Any  # the window's host update is made
    selects: Any  # channels are selected again; only where a window closes
    synchronous: Any  # the update reaches the parameters at once, not at the next boundary


class Tally(NamedTuple):
    """What decisions are made from: NumPy arrays and numbers, or traced ones.

    `flush` does not touch it: it ends a window's sum early, and moves no boundary.
    """

    length: Any  # int32: steps since the last boundary, before the one that is asked about
    counted: Any  # float32: those of them that were not skipped
    deferred: Any  # float32 (leaves,): sums over them of the deferred channels' root mean square
    selected: Any  # float32 (leaves,): the same of the selected ones'
    windows: Any  # int32: closed since the last selection
    kept: Any  # float32: share of the best score, measured at the last boundary; 1 if it was not

    def add(self, statistics: Any) -> "Tally":
        """With what a step has to say: float32 [counted, *deferred, *selected]; None is nothing."""
        if statistics is None:
            return self
        leaves = self.deferred.shape[0]
        return self._replace(
            counted=self.counted + statistics[0],
            deferred=self.deferred + statistics[1 : 1 + leaves],
            selected=self.selected + statistics[1 + leaves :],
        )


def first_tally(schedule: "Schedule", leaves: int) -> Tally:
    """Before the first step, in NumPy, for so many leaves that travel."""
    sums = leaves if schedule.weighs else 0
    return Tally(
        length=np.int32(0),
        counted=np.float32(0),
        deferred=np.zeros(sums, np.float32),
        selected=np.zeros(sums, np.float32),
        windows=np.int32(0),
        kept=np.float32(1),
    )


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When windows close and channels are selected, from the end of the warm-up. Static, hashable.

    Attributes:
        window: Steps in a window, or the rule.
        select: Steps between two selections, or the rule.
        full_warm_up_rounds: First steps, each of which is a window of its own.
        overlap_step: Whether updates reach the parameters a window later.
    """

    window: int | AutoWindow
    select: int | AutoSelect | EpochSelect
    full_warm_up_rounds: int
    overlap_step: bool

    @property
    def weighs(self) -> bool:
        """Whether decisions need every step's statistics."""
        return isinstance(self.window, AutoWindow)

    @property
    def measures(self) -> bool:
        """Whether decisions need the share of the score that is kept."""
        return isinstance(self.select, AutoSelect)

    @property
    def adaptive(self) -> bool:
        """Whether `boundary` needs a tally."""
        return self.weighs or self.measures

    def boundary(self, step: Any, tally: Tally | None) -> Boundary:
        """What happens after step `step` (a Python int or a traced int32).

        Args:
            step: Counted from 1.
            tally: Of the steps before it; may be None unless `adaptive`.
        """
        warm = step <= self.full_warm_up_rounds
        since = step - self.full_warm_up_rounds
        if isinstance(self.window, AutoWindow):
            assert tally is not None
            length = tally.length + 1
            closes = warm | self._ripe(self.window, tally) | (length >= self.window.max_interval)
        else:
            length = self.window
            closes = warm | (since % length == 0)
        # Without a warm-up the first selection is at the first boundary, however far off the
        # interval's end is; with one, it is at the warm-up's end.
        first = since == (length if self.full_warm_up_rounds == 0 else 0)
        due = (since > 0) & self._due(step, since, length, tally)
        return Boundary(
            closes=closes,
            selects=closes & (first | due),
            synchronous=warm | (not self.overlap_step),
        )

    def _ripe(self, window: AutoWindow, tally: Tally) -> Any:
        leaves = tally.deferred.shape[0]
        # No mean: sums of both sides, the selected channels' times the steps that they are of.
        ripe = (tally.deferred * tally.counted >= tally.selected).sum()
        return (tally.counted > 0) & (ripe >= window.needed(leaves))

    def _due(self, step: Any, since: Any, length: Any, tally: Tally | None) -> Any:
        """Whether a selection is due where a window of `length` steps ends, the first one apart."""
        if isinstance(self.select, AutoSelect):
            assert tally is not None
            lost = tally.kept < self.select.keep
            return lost | (tally.windows + 1 >= self.select.max_windows)
        # Whether an interval ends within the window.
        if isinstance(self.select, EpochSelect):
            return step // self.select.steps > (step - length) // self.select.steps
        return since // self.select > (since - length) // self.select
