"""An engine's position in its schedule, and the numbers that decide the next boundary."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zenflow_jax._device.memory import view
from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._spec.adaptive import ScheduleState
from zenflow_jax._spec.scalars import StepScalars
from zenflow_jax._spec.schedule import Boundary, Schedule


@dataclasses.dataclass
class RunState:
    """An engine's position in its run, equal in all processes; a checkpoint has it as JSON.

    Lists are in group order, except `window_lengths`.
    """

    open_steps: list[int]  # in each open window, including skipped steps
    window_lengths: list[int]  # the number of windows with 0, 1, ... steps
    schedule_state: ScheduleState  # before the next step, without unread statistics
    counted: list[int]  # steps in the open windows' sums; filled in by a save, as all below
    pending: list[int]  # 1 if the group's update has not reached the parameters
    token: int = 0  # for the next step
    params: int = 0  # the parameters' checksum (`_device/checksums.py`); 0 if it is unknown
    step: int = 0  # steps taken so far
    reselections: int = 0  # over all groups, including first selections

    @classmethod
    def first(cls, state: ZenFlowState) -> "RunState":
        """Returns the state before the first step; `state` may be from any step."""
        schedule = state.schedule
        leaves = sum(not leaf.spec.resident for leaf in state.leaves)
        return cls(
            open_steps=[0] * schedule.groups,
            window_lengths=[0] * (schedule.window + 1),
            schedule_state=schedule.first_state(leaves),
            counted=[0] * schedule.groups,
            pending=[0] * schedule.groups,
        )


class Progress:
    """The schedule's side of an engine. Must be used from one thread only.

    A decision about a step needs only numbers from earlier steps, so reading them never waits for
    the step that was dispatched last. The numbers are sums over all processes.
    """

    def __init__(self, schedule: Schedule, run: RunState):
        self.run = run
        self._schedule = schedule
        # Unread statistics: of the last step, if its window is open, and of the last boundaries.
        self._sent: StepScalars | None = None
        self._measured: dict[int, jax.Array] = {}

    @property
    def counts(self) -> dict[str, Any]:
        """Returns the fields of `EngineStats` that the schedule decides."""
        shares = self.run.schedule_state.shares
        known = shares[~np.isnan(shares)]
        return {
            "steps": self.run.step,
            "window_lengths": {i: n for i, n in enumerate(self.run.window_lengths) if n},
            "reselections": self.run.reselections,
            "kept_share": float(known.mean()) if known.size else None,
        }

    def before_next_step(self) -> RunState:
        """Returns the run state after reading the statistics, which may wait for the device."""
        sums, windows, shares = self.run.schedule_state
        shares = shares.copy()
        if self._sent is not None:
            sums = sums + StepScalars(*map(view, self._sent)).unpack().statistics
        for group, share in self._measured.items():
            shares[group] = float(view(share))
        self._sent, self._measured = None, {}
        self.run.schedule_state = ScheduleState(sums, windows, shares)
        return self.run

    def boundaries(self) -> list[Boundary]:
        """Returns each group's boundary after the next step."""
        run = self.before_next_step()
        return [
            self._schedule.boundary(run.step + 1, run.schedule_state, group, open_steps)
            for group, open_steps in enumerate(run.open_steps)
        ]

    def passed(
        self,
        boundaries: Sequence[Boundary],
        sent: StepScalars,
        measured: dict[int, jax.Array],
    ) -> None:
        """Advances by one step and the groups' `boundaries` after it.

        `measured` contains the kept share of groups whose window closed without a selection.
        """
        self.run.step += 1
        for group, boundary in enumerate(boundaries):
            self.run.open_steps[group] += 1
            if boundary.closes:
                self.run.window_lengths[self.run.open_steps[group]] += 1
                self.run.open_steps[group] = 0
        closes = np.array([boundary.closes for boundary in boundaries])
        if not closes.any():
            self._sent = sent if self._schedule.auto_window else None
            return
        selects = np.array([boundary.selects for boundary in boundaries])
        self.run.schedule_state = self.run.schedule_state.close_windows(closes, selects)
        self._measured = measured
        self.run.reselections += int(selects.sum())
