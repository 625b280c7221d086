"""Decides when a window closes and when channels are selected again.

Steps count from 1; step t's boundary lies between t and t + 1. Leaves are in groups (`groups.py`),
and each group has its own windows.

A decision about a step uses only earlier steps; otherwise an engine would have to wait for the
device.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32

from zenflow_jax._spec.rules import AutoSelect, AutoWindow


class Boundary(NamedTuple):
    """A group's events after a step."""

    closes: bool  # the window ends, and its update is made
    selects: bool  # channels are selected again; only where a window closes
    synchronous: bool  # the update reaches the parameters at once
    arrives: bool  # an earlier update reaches the parameters, before everything else


class ScheduleState(NamedTuple):
    """The inputs to the schedule's decisions. `flush` does not change them."""

    # For adaptive windows, which are the same for all leaves.
    length: np.int32  # steps since the last boundary, without the next step
    counted: np.float32  # steps that were not skipped
    deferred: Float32[np.ndarray, " leaves"]  # deferred channels' root mean squares, summed
    selected: Float32[np.ndarray, " leaves"]  # selected channels' root mean squares, summed
    # For each group.
    windows: Int32[np.ndarray, " groups"]  # windows closed since the last selection
    kept_share: Float32[np.ndarray, " groups"]  # as in `_device/statistics.py`, if measured; else 1

    def open_step(self) -> "ScheduleState":
        """Returns the state after a step whose window stays open; `add` takes its statistics."""
        return self._replace(length=np.int32(self.length + 1))

    def close_window(
        self, first: "ScheduleState", closes: np.ndarray, selects: np.ndarray
    ) -> "ScheduleState":
        """Returns the state after a step that closed windows; the step's statistics are not used.

        `first` is the state before the first step; `closes` and `selects` are bool (groups,).
        """
        windows = np.where(closes, self.windows + 1, self.windows)
        return first._replace(
            windows=np.where(selects, 0, windows).astype(np.int32),
            kept_share=np.where(closes, first.kept_share, self.kept_share),
        )

    def add(self, statistics: np.ndarray) -> "ScheduleState":
        """Returns the state after adding a step's float32 [counted, *deferred, *selected]."""
        leaves = self.deferred.shape[0]
        return self._replace(
            counted=self.counted + statistics[0],
            deferred=self.deferred + statistics[1 : 1 + leaves],
            selected=self.selected + statistics[1 + leaves :],
        )


def first_schedule_state(schedule: "Schedule", leaves: int) -> ScheduleState:
    """Returns the state before the first step, for `leaves` offloaded leaves."""
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
    """When windows close and channels are selected after the warm-up. Static and hashable.

    Attributes:
        window: Steps in a window, or the rule that closes it.
        select: Steps between two selections, or the rule that starts one.
        full_warm_up_rounds: Number of initial steps, each of which is its own window.
        groups: Number of groups that take turns: group j closes its windows j steps before group 0.
        staleness: Steps from the end of a window to the step after which its update reaches the
            parameters. None, for adaptive windows: the next boundary.
        window_scaling: Whether a window's update is as long as the steps in it.
        provisional_share: The length of a provisional step, as a share of the learning rate.
    """

    window: int | AutoWindow
    select: int | AutoSelect
    full_warm_up_rounds: int
    groups: int
    staleness: int | None
    window_scaling: bool
    provisional_share: float | None = None

    def provisional_step(self, step: jax.Array, learning_rate: Any, counts: Any) -> jax.Array:
        """Returns the float32 length of the provisional step; zero unless the step `counts`.

        A run's first step moves nothing, because weights may be loaded before it.
        """
        length = jnp.float32(self.provisional_share) * jnp.asarray(learning_rate, jnp.float32)
        moves = counts & (step > max(self.full_warm_up_rounds, 1))
        return jnp.where(moves, length, jnp.float32(0))

    @property
    def longest_window(self) -> int:
        """Returns the maximum number of steps in a window."""
        return self.window.max_interval if isinstance(self.window, AutoWindow) else self.window

    @property
    def needs_statistics(self) -> bool:
        """Returns whether decisions need every step's statistics."""
        return isinstance(self.window, AutoWindow)

    @property
    def needs_kept_share(self) -> bool:
        """Returns whether decisions need the statistic `kept_share`."""
        return isinstance(self.select, AutoSelect)

    def boundary(self, step: int, schedule_state: ScheduleState, group: int = 0) -> Boundary:
        """Returns the boundary of `group` after step `step`; the state covers the steps before."""
        warm = step <= self.full_warm_up_rounds
        since = step - self.full_warm_up_rounds
        if isinstance(self.window, AutoWindow):
            length = int(schedule_state.length) + 1
            ripe = self._is_ripe(self.window, schedule_state)
            closes = warm or ripe or length >= self.window.max_interval
            arrives = closes
        else:
            length = self.window
            closes = warm or (since + group) % length == 0
            arrives = closes
            if self.staleness not in (None, 0, length):
                arrives = (since + group - self.staleness) % length == 0
        # The first selection comes at the warm-up's end; without a warm-up it comes at the first
        # boundary, however far off the interval's end is.
        first = since == (length - group if self.full_warm_up_rounds == 0 else 0)
        due = since > 0 and self._selection_is_due(step, length, schedule_state, group)
        return Boundary(
            closes=closes,
            selects=closes and (first or due),
            synchronous=warm or self.staleness == 0,
            arrives=arrives,
        )

    def _is_ripe(self, window: AutoWindow, schedule_state: ScheduleState) -> bool:
        leaves = schedule_state.deferred.shape[0]
        # `deferred >= selected / counted`, times `counted` to avoid a division.
        ripe = (schedule_state.deferred * schedule_state.counted >= schedule_state.selected).sum()
        return bool(schedule_state.counted > 0 and ripe >= window.needed(leaves))

    def _selection_is_due(
        self, step: int, length: int, schedule_state: ScheduleState, group: int
    ) -> bool:
        """Returns whether a later selection is due at the end of a window of `length` steps."""
        if isinstance(self.select, AutoSelect):
            lost = bool(schedule_state.kept_share[group] < self.select.keep)
            return lost or int(schedule_state.windows[group]) + 1 >= self.select.max_windows
        # It is due if an interval ends within the window. A group's first interval may be shorter.
        since = step - self.full_warm_up_rounds + group
        return since // self.select > max(since - length, group) // self.select
