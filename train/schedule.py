"""zenflow's schedule in a run: what the engine has counted, for every interval of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import zenflow_jax


class ScheduleRow(NamedTuple):
    """What the schedule did in one interval of steps. All None without zenflow."""

    # Mean length, in steps, of the windows that closed in the interval. Where none did, that of the
    # row before; None before the first.
    window_length: float | None = None
    # Share of the best channels' score that the selected ones hold, as the engine had last read it
    # at the end of the interval: one boundary late. None if never; see `EngineStats.kept_share`.
    kept_share: float | None = None
    reselections: int | None = None  # since the start of the run, the first selection included


class ScheduleRecord:
    """Keeps the engine's counts at the end of every interval.

    The meter's row of an interval comes when the loop is an interval further, and the engine knows
    of the loop's present alone. So this is asked after every exchange, and keeps its rows until the
    meter's arrive. It never waits for the device.

    Args:
        log_every: Steps in an interval.
        steps: Length of the run, whose end is the end of an interval too.
        stats: Returns the engine's counts; None for a run without an engine.
        state: What `state` returned, of a run that goes on.
    """

    def __init__(
        self,
        *,
        log_every: int,
        steps: int,
        stats: Callable[[], zenflow_jax.EngineStats] | None,
        state: Mapping[str, Any] | None = None,
    ):
        self._log_every = log_every
        self._steps = steps
        self._stats = stats
        self._rows: dict[int, ScheduleRow] = {}  # by the last step of the interval
        self._last = ScheduleRow()
        self._windows = self._steps_in_them = 0  # closed, by the last row
        if state is not None:
            self._rows = {step: ScheduleRow(*row) for step, row in state["rows"]}
            self._last = ScheduleRow(*state["last"])
            self._windows, self._steps_in_them = state["windows"], state["steps_in_them"]

    def state(self) -> dict[str, Any]:
        """All that it knows, for JSON."""
        return {
            "rows": list(self._rows.items()),
            "last": self._last,
            "windows": self._windows,
            "steps_in_them": self._steps_in_them,
        }

    def step(self, step: int) -> None:
        """To be called after the exchange of step `step`, counted from 1."""
        if self._stats is None or (step % self._log_every and step != self._steps):
            return
        stats = self._stats()
        windows = stats.windows - self._windows
        steps_in_them = _steps_in_windows(stats) - self._steps_in_them
        self._windows += windows
        self._steps_in_them += steps_in_them
        self._last = self._rows[step] = ScheduleRow(
            window_length=steps_in_them / windows if windows else self._last.window_length,
            kept_share=stats.kept_share,
            reselections=stats.reselections,
        )

    def take(self, step: int) -> ScheduleRow:
        """Removes and returns the row of the interval that ended with step `step`."""
        if not self._stats:
            return ScheduleRow()
        # Steps of another start, with other intervals, have the last row.
        last = self._last._replace(reselections=self._last.reselections or 0)
        return self._rows.pop(step, last)


def mean_window_length(stats: zenflow_jax.EngineStats) -> float:
    """Of all windows that have closed, in steps; those of the warm-up count, of one step each."""
    return _steps_in_windows(stats) / stats.windows


def _steps_in_windows(stats: zenflow_jax.EngineStats) -> int:
    return sum(length * count for length, count in stats.window_lengths.items())
