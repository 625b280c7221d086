"""When a window closes and when channels are selected again.

The device half in-graph, the engine and nobody else ask here; none of them may assume that
windows have equal length. Steps are counted from 1; step t's boundary lies between t and t + 1.
"""

import dataclasses
from typing import Any, NamedTuple


class Boundary(NamedTuple):
    """What happens after a step. Booleans, or traced ones if the step number is traced."""

    closes: Any  # the window's host update is made
    selects: Any  # channels are selected again; only where a window closes
    synchronous: Any  # the update reaches the parameters at once, not at the next boundary


@dataclasses.dataclass(frozen=True)
class FixedSchedule:
    """Windows of equal length, counted from the end of the warm-up. Static and hashable."""

    update_interval: int
    select_interval: int
    full_warm_up_rounds: int
    overlap_step: bool

    def boundary(self, step: Any) -> Boundary:
        """What happens after step `step` (a Python int or a traced int32)."""
        warm = step <= self.full_warm_up_rounds
        since = step - self.full_warm_up_rounds
        # Without a warm-up the first selection is at the first boundary, however far off the
        # first multiple of the interval is; with one, it is at the warm-up's end.
        first = self.update_interval if self.full_warm_up_rounds == 0 else 0
        due = (since > 0) & (since % self.select_interval == 0)
        return Boundary(
            closes=warm | (since % self.update_interval == 0),
            selects=(since == first) | due,
            synchronous=warm | (not self.overlap_step),
        )
