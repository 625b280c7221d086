"""Where an engine's run is in its schedule, and the numbers that decide what comes next."""

from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from zenflow_jax._device.memory import view
from zenflow_jax._plan.schedule import Boundary, Schedule, ScheduleState, first_schedule_state


class Progress:
    """The schedule's side of an engine. For one calling thread.

    A decision about a step needs only numbers of earlier steps, so reading them waits for no step
    that was only just dispatched. They are sums over all processes.

    Attributes:
        step: Steps that have passed.
        open_steps: Steps in each group's open window, skipped ones included.
        window_lengths: How many windows had each length.
        reselections: Selections of a group's channels, the first ones included.
        shares: For each group, the selected channels' share of the best k channels' score, as last
            read; NaN before, and if the schedule does not ask for it.
    """

    def __init__(self, schedule: Schedule, leaves: int):
        self.step = 0
        self.open_steps = [0] * schedule.groups
        self.window_lengths: Counter[int] = Counter()
        self.reselections = 0
        self.shares = np.full(schedule.groups, np.nan, np.float32)
        self._schedule = schedule
        self._first = first_schedule_state(schedule, leaves)
        self._state = self._first
        # Not read yet: of the last step, if its window is open; and of the last boundaries.
        self._statistics: jax.Array | None = None
        self._measured: dict[int, jax.Array] = {}

    @property
    def kept_share(self) -> float | None:
        """The mean of `shares`; None if none is known."""
        known = self.shares[~np.isnan(self.shares)]
        return float(known.mean()) if known.size else None

    def boundaries(self) -> list[Boundary]:
        """Says what happens to each group after the next step."""
        self._read()
        return [
            Boundary(*map(bool, self._schedule.boundary(self.step + 1, self._state, group)))
            for group in range(self._schedule.groups)
        ]

    def next_to_close(self) -> list[int]:
        """The groups, those first whose windows have been open for longest."""
        return sorted(range(self._schedule.groups), key=lambda group: -self.open_steps[group])

    def step_made(self) -> None:
        """Counts a step into the open windows."""
        self.open_steps = [steps + 1 for steps in self.open_steps]

    def window_closed(self, group: int) -> None:
        """Counts a group's window, which ends after the step that was made last."""
        self.window_lengths[self.open_steps[group]] += 1
        self.open_steps[group] = 0

    def passed(
        self,
        boundaries: Sequence[Boundary],
        statistics: jax.Array | None,
        measured: dict[int, jax.Array],
    ) -> None:
        """Moves on by one step, after which `boundaries` happened to the groups.

        `measured` has the kept share of groups whose window closed without a selection.
        """
        self.step += 1
        closes = np.array([boundary.closes for boundary in boundaries])
        if not closes.any():
            self._state = self._state.open_step()
            self._statistics = statistics
            return
        selects = np.array([boundary.selects for boundary in boundaries])
        self._state = self._state.close_window(self._first, closes, selects, np)
        self._statistics, self._measured = None, measured
        self.reselections += int(selects.sum())

    @property
    def schedule_state(self) -> ScheduleState:
        """What is known before the next step."""
        self._read()
        return self._state

    def resume(
        self,
        *,
        step: int,
        reselections: int,
        schedule_state: ScheduleState,
        shares: np.ndarray,
        open_steps: Sequence[int],
        window_lengths: Mapping[int, int],
    ) -> None:
        """Continues where another run was."""
        self.step, self.reselections, self.shares = step, reselections, np.array(shares)
        self.open_steps, self.window_lengths = list(open_steps), Counter(window_lengths)
        self._state = schedule_state

    def _read(self) -> None:
        if self._statistics is not None:
            row = view(self._statistics).ravel()
            self._state = self._state.add(row)
            self._statistics = None
        if self._measured:
            state = self._state.kept_share.copy()
            for group, share in self._measured.items():
                self.shares[group] = state[group] = float(view(share))
            self._state = self._state._replace(kept_share=state)
            self._measured = {}
