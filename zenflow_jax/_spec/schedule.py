"""Decides when a window closes and when channels are selected again.

Steps count from 1; step t's boundary lies between t and t + 1. Leaves are in groups (`groups.py`),
and each group has windows of its own.

The same code decides for NumPy numbers (the engine) and for traced ones (in-graph). A decision
about a step knows only the steps before it: for more, an engine would wait for the device.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from zenflow_jax._spec.rules import AutoSelect, AutoWindow, EpochSelect


class Boundary(NamedTuple):
    """A boundary of one group after a step: bools, or traced ones if the step is traced."""

    closes: Any  # the window ends and its update is made
    selects: Any  # channels are selected again; only where a window closes
    synchronous: Any  # the update reaches the parameters at once
    arrives: Any  # an update that was made before reaches the parameters, ahead of all else


class ScheduleState(NamedTuple):
    """The facts that the schedule decides by: NumPy arrays and numbers, or traced ones.

    `flush` leaves it alone.
    """

    # Of adaptive windows, which are the same for all leaves.
    length: Any  # int32: steps since the last boundary, without the one that is asked about
    counted: Any  # float32: the steps among them that were not skipped
    deferred: Any  # float32 (leaves,): deferred channels' root mean square, summed over those
    selected: Any  # float32 (leaves,): the same of the selected channels
    # Of each group.
    windows: Any  # int32 (groups,): windows closed since the last selection
    kept_share: Any  # float32 (groups,): share of the best score, at the last boundary; else 1

    def open_step(self) -> "ScheduleState":
        """The state after a step whose window stays open; `add` takes in what the step says."""
        return self._replace(length=self.length + 1)

    def close_window(
        self, first: "ScheduleState", closes: Any, selects: Any, xp: Any
    ) -> "ScheduleState":
        """The state after a step that closed windows; the step's statistics count for none.

        `first` is the state before the first step; `closes` and `selects` are bool (groups,).
        """
        windows = xp.where(closes, self.windows + 1, self.windows)
        return first._replace(
            windows=xp.where(selects, 0, windows).astype(np.int32),
            kept_share=xp.where(closes, first.kept_share, self.kept_share),
        )

    def add(self, statistics: Any) -> "ScheduleState":
        """The state with a step's float32 [counted, *deferred, *selected]; None adds nothing."""
        if statistics is None:
            return self
        leaves = self.deferred.shape[0]
        return self._replace(
            counted=self.counted + statistics[0],
            deferred=self.deferred + statistics[1 : 1 + leaves],
            selected=self.selected + statistics[1 + leaves :],
        )


def first_schedule_state(schedule: "Schedule", leaves: int) -> ScheduleState:
    """The state before the first step, in NumPy, for `leaves` offloaded leaves."""
    sums = leaves if schedule.needs_statistics else 0
    return ScheduleState(
        length=np.int32(0),
        counted=np.float32(0),
        deferred=np.zeros(sums, np.float32),
        selected=np.zeros(sums, np.float32),
        windows=np.zeros(schedule.groups, np.int32),
        kept_share=np.ones(schedule.groups, np.float32),
    )


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When windows close and channels are selected after the warm-up. Static, hashable.

    Attributes:
        window: Steps in a window, or the rule that closes it.
        select: Steps between two selections, or the rule that starts one.
        full_warm_up_rounds: Number of first steps; each is a window of its own.
        groups: Number of groups that take turns: group j closes its windows j steps ahead of 0.
        staleness: Steps from the end of a window to the step after which its update reaches the
            parameters. None: to the next boundary, wherever an adaptive window has it.
        window_scaling: The exponent of `window_step`.
        provisional_share: The length of a provisional step, as a share of the learning rate.
    """

    window: int | AutoWindow
    select: int | AutoSelect | EpochSelect
    full_warm_up_rounds: int
    groups: int
    staleness: int | None
    window_scaling: float | None
    provisional_share: float | None = None

    def provisional_step(self, step: Any, learning_rate: Any, counts: Any, xp: Any) -> Any:
        """How far step `step`, if it `counts`, moves each deferred weight; float32.

        The first step of a run moves none: until it is made, weights may be loaded.
        """
        length = xp.float32(self.provisional_share) * xp.asarray(learning_rate, xp.float32)
        moves = counts & (step > max(self.full_warm_up_rounds, 1))
        return xp.where(moves, length, xp.float32(0))

    @property
    def longest_window(self) -> int:
        """The most steps that a window may have."""
        return self.window.max_interval if isinstance(self.window, AutoWindow) else self.window

    @property
    def needs_statistics(self) -> bool:
        """Whether decisions need every step's statistics."""
        return isinstance(self.window, AutoWindow)

    @property
    def needs_kept_share(self) -> bool:
        """Whether decisions need the share of the score that is kept."""
        return isinstance(self.select, AutoSelect)

    @property
    def adaptive(self) -> bool:
        """Whether `boundary` needs a `ScheduleState`."""
        return self.needs_statistics or self.needs_kept_share

    @property
    def between_boundaries(self) -> bool:
        """Whether updates arrive where no window of their group closes."""
        return self.staleness not in (None, 0, self.window)

    def in_window(self, step: Any, schedule_state: ScheduleState | None, group: int) -> Any:
        """Whether a window of `group` is open, with steps in it, after step `step`."""
        if isinstance(self.window, AutoWindow):
            assert schedule_state is not None
            return schedule_state.length > 0
        return (step - self.full_warm_up_rounds + group) % self.window != 0

    def boundary(self, step: Any, schedule_state: ScheduleState | None, group: int = 0) -> Boundary:
        """The boundary of `group` after step `step` (a Python int or a traced int32).

        `schedule_state` covers the steps before it; it may be None unless `adaptive`.
        """
        warm = step <= self.full_warm_up_rounds
        since = step - self.full_warm_up_rounds
        if isinstance(self.window, AutoWindow):
            assert schedule_state is not None
            length = schedule_state.length + 1
            closes = (
                warm
                | self._ripe(self.window, schedule_state)
                | (length >= self.window.max_interval)
            )
            arrives = closes
        else:
            length = self.window
            closes = warm | ((since + group) % length == 0)
            arrives = closes
            if self.between_boundaries:
                assert self.staleness is not None
                arrives = (since + group - self.staleness) % length == 0
        # The first selection comes at the warm-up's end; without a warm-up it comes at the first
        # boundary, however far off the interval's end is.
        first = since == (length - group if self.full_warm_up_rounds == 0 else 0)
        due = (since > 0) & self._due(step, length, schedule_state, group)
        return Boundary(
            closes=closes,
            selects=closes & (first | due),
            synchronous=warm | (self.staleness == 0),
            arrives=arrives,
        )

    def _ripe(self, window: AutoWindow, schedule_state: ScheduleState) -> Any:
        leaves = schedule_state.deferred.shape[0]
        # Both sides of `deferred >= selected / counted` times `counted`: nothing is divided.
        ripe = (schedule_state.deferred * schedule_state.counted >= schedule_state.selected).sum()
        return (schedule_state.counted > 0) & (ripe >= window.needed(leaves))

    def _due(self, step: Any, length: Any, schedule_state: ScheduleState | None, group: int) -> Any:
        """Whether a selection other than the first is due where a window of `length` steps ends."""
        if isinstance(self.select, AutoSelect):
            assert schedule_state is not None
            lost = schedule_state.kept_share[group] < self.select.keep
            return lost | (schedule_state.windows[group] + 1 >= self.select.max_windows)
        # It is due if an interval ends within the window.
        if isinstance(self.select, EpochSelect):
            epoch = self.select.steps
            # A group's first window may be shorter: what the warm-up had is no part of it.
            after_warm_up = step // epoch > self.full_warm_up_rounds // epoch
            return after_warm_up & (step // epoch > (step - length) // epoch)
        since = step - self.full_warm_up_rounds + group
        return since // self.select > (since - length) // self.select
