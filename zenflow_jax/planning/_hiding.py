"""How well the host's work hides behind the device's: in a plan, and in a run that was measured."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zenflow_jax._device.memory import read
from zenflow_jax._device.state import ZenFlowState, find_state, with_interval
from zenflow_jax._diagnostics.stats import EngineStats
from zenflow_jax._exchange.checks import check_host_state
from zenflow_jax.planning._host_work import host_work

#: The windows that are compared, in steps.
INTERVALS = (1, 2, 4, 8, 16)
#: What host work may take of the time that it has: a fifth is to spare.
BUSY = 0.8


@dataclasses.dataclass(frozen=True)
class Hiding:
    """How well the host's work hides, in a plan or in a run.

    Attributes:
        interval: Steps in a window; None where windows adapt.
        busy: The share of its time that the host needs, in the step with the most work.
        of_intervals: `busy` with windows of other lengths; empty where windows adapt.
    """

    interval: int | None
    busy: float
    of_intervals: Mapping[int, float]

    @property
    def smallest_interval(self) -> int | None:
        """Steps of the shortest windows that hide with a fifth to spare; None if none do."""
        hidden = [s for s, busy in self.of_intervals.items() if busy <= BUSY]
        return min(hidden, default=None)

    @property
    def advice(self) -> str:
        """How busy the host is, and which longer windows would do if it is too busy."""
        smallest = self.smallest_interval
        text = (
            f"The host needs {self.busy:.0%} of the available time with "
            f"update_interval={self.interval}"
        )
        if smallest is None:
            return (
                f"{text}, and more than {BUSY:.0%} with any up to {INTERVALS[-1]}. Use a larger "
                "batch, more threads or faster memory."
            )
        if self.interval is None or smallest <= self.interval:
            return f"{text}."
        waits = ", so steps wait for it" if self.busy > 1 else ""
        return f"{text}{waits}: update_interval={smallest} needs at most {BUSY:.0%}."


def hiding_of(state: ZenFlowState, rate: float, step_s: float, *, compact: bool) -> Hiding:
    """How well the work of an engine with this state, of arrays or shapes, hides.

    Updates read and write `rate` bytes of host memory in a second, and a step of the device takes
    `step_s` seconds.
    """

    def busy(of: ZenFlowState) -> float:
        work = host_work(of, compact=compact)
        # Without a leaf that is offloaded there is neither work nor a rate.
        return work.busiest / rate / (work.steps * step_s) if work.busiest else 0.0

    window = state.schedule.window
    interval = window if isinstance(window, int) else None
    of_intervals = {} if interval is None else {s: busy(with_interval(state, s)) for s in INTERVALS}
    return Hiding(interval, busy(state), of_intervals)


def hiding(
    opt_state: Any, stats: EngineStats, seconds: float, *, host_state: str = "float32"
) -> Hiding | None:
    """How busy the host was in a run, and which windows would have hidden its work.

    Work with other windows follows from that which was measured, by the bytes that each moves.

    Args:
        opt_state: Of the run, as it ended.
        stats: `engine.stats` after it.
        seconds: What the steps in `stats` took together.
        host_state: As for `HostEngine`.

    Returns:
        None where there is nothing to say: before two windows, and where windows adapt or every
        step waits for its update.

    Raises:
        ValueError: If there is not one `ZenFlowState`, or `host_state` is unknown.
    """
    compact = check_host_state(host_state)
    state = find_state(opt_state)
    window = state.schedule.window
    if not isinstance(window, int) or state.schedule.staleness == 0 or stats.steps < 2 * window:
        return None
    # What the device alone would have taken, as it did not compute while the loop waited.
    step_s = max(seconds - stats.wait_s, 1e-9) / stats.steps
    before = int(read(state.step)) - stats.steps
    # In the warm-up each step updated everything.
    warm = min(max(state.schedule.full_warm_up_rounds - before, 0), stats.steps)
    moved = sum(
        steps * host_work(of, compact=compact).mean
        for of, steps in ((with_interval(state, 1), warm), (state, stats.steps - warm))
    )
    rate = moved / max(stats.work_s, 1e-9)

    return hiding_of(state, rate, step_s, compact=compact)
