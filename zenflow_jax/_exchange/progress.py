"""Where an engine's run is in its schedule, and the numbers that decide what comes next."""

import jax
import numpy as np

from zenflow_jax._device.memory import view
from zenflow_jax._plan.schedule import Boundary, Schedule, ScheduleState, first_schedule_state


class Progress:
    """The schedule's side of an engine. For one calling thread.

    A decision about a step needs only numbers of earlier steps, so reading them waits for no step
    that was only just dispatched. They are sums over all processes, so every process has the same
    ones.

    Args:
        schedule: The schedule that decides.
        leaves: Number of offloaded leaves.

    Attributes:
        step: Steps that have passed.
        reselections: Selections of channels, the first one included.
        kept_share: The selected channels' share of the best k channels' score, as last read; None
            before, and if the schedule does not ask for it.
    """

    def __init__(self, schedule: Schedule, leaves: int):
        self.step = 0
        self.reselections = 0
        self.kept_share: float | None = None
        self._schedule = schedule
        self._first = first_schedule_state(schedule, leaves)
        self._state = self._first
        # Not read yet: of the last step, if its window is open; and of the last boundary.
        self._statistics: jax.Array | None = None
        self._measured: jax.Array | None = None

    def boundary(self) -> Boundary:
        """What happens after the next step."""
        self._read()
        boundary = self._schedule.boundary(self.step + 1, self._state)
        return Boundary(*(bool(x) for x in boundary))

    def passed(
        self, boundary: Boundary, statistics: jax.Array | None, measured: jax.Array | None
    ) -> None:
        """Moves on by one step.

        Args:
            boundary: What happened after it.
            statistics: What the step sends for the `ScheduleState`; None if nothing.
            measured: The kept share, where a window closed and no channels were selected.
        """
        self.step += 1
        if not boundary.closes:
            self._state = self._state.open_step()
            self._statistics = statistics
            return
        self._state = self._state.close_window(self._first, boundary.selects, np)
        self._statistics, self._measured = None, measured
        self.reselections += boundary.selects

    @property
    def schedule_state(self) -> ScheduleState:
        """What is known before the next step."""
        self._read()
        return self._state

    def resume(
        self, step: int, reselections: int, schedule_state: ScheduleState, kept_share: float | None
    ) -> None:
        """Continues where another run was."""
        self.step, self.reselections, self.kept_share = step, reselections, kept_share
        self._state = schedule_state

    def _read(self) -> None:
        if self._statistics is not None:
            row = view(self._statistics).ravel()
            self._state = self._state.add(row)
            self._statistics = None
        if self._measured is not None:
            self.kept_share = float(view(self._measured))
            self._state = self._state._replace(kept_share=np.float32(self.kept_share))
            self._measured = None
