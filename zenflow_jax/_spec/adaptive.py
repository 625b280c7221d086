"""Rules that end windows and start selections by a run's gradients, and the numbers they compare.

`_device/statistics.py` computes these numbers. They are sums over all devices, so all processes
decide alike, and a decision about a step uses only earlier steps: an engine never waits for it.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from zenflow_jax._spec.checks import check_int, check_share, round_up


@dataclasses.dataclass(frozen=True)
class AutoWindow:
    """Windows that close when deferred gradients match a single step's selected gradients.

    At every step, each leaf's gradient has one root mean square over its deferred channels and
    another over its selected channels. A leaf is ripe when the window's sum for the deferred
    channels is at least the window's mean for the selected channels. The window closes when at
    least `share` of the offloaded leaves are ripe, or when it has `max_interval` steps. The
    decision after step t uses only the steps before it, so a window has at least two steps.
    DeepSpeed's "Zen-auto" uses the same idea but compares L1 sums.

    Attributes:
        max_interval: The maximum number of steps in a window; its length if none is selected.
        share: Share of the offloaded leaves that must be ripe, rounded up to at least one.

    Examples:
        >>> from zenflow_jax import zenflow
        >>> tx = zenflow(1e-3, update_interval=AutoWindow(max_interval=16), window_scaling=None)
    """

    max_interval: int = 8
    share: float = 0.99

    def __post_init__(self):
        check_int("AutoWindow.max_interval", self.max_interval, 1)
        check_share("AutoWindow.share", self.share)

    def is_ripe(self, sums: Float32[np.ndarray, " numbers"]) -> bool:
        """Returns whether enough leaves are ripe; `sums` adds up a window's `window_statistics`."""
        counted, (deferred, selected) = sums[0], np.split(sums[1:], 2)
        # `deferred >= selected / counted`, times `counted` to avoid a division.
        ripe = (deferred * counted >= selected).sum()
        return bool(counted > 0 and ripe >= max(1, round_up(self.share, deferred.size)))


@dataclasses.dataclass(frozen=True)
class AutoSelect:
    """Selections that follow when the selected channels are no longer the best.

    After each window, `kept_share` compares the selected channels' total score to that of the best
    k channels, averaged over leaves and weighted by size. If it is below `keep`, channels are
    selected again at the next boundary; they are also selected `max_windows` windows after the last
    selection. Scores are summed from a selection on: if the best channels change w windows after
    it, the next selection follows about w / keep + 1 windows later.

    Attributes:
        keep: The minimum ratio, in [0, 1].
        max_windows: The maximum number of windows between two selections.

    Examples:
        >>> from zenflow_jax import zenflow
        >>> tx = zenflow(1e-3, select_interval=AutoSelect(keep=0.8))
    """

    keep: float = 0.9
    max_windows: int = 64

    def __post_init__(self):
        check_share("AutoSelect.keep", self.keep)
        check_int("AutoSelect.max_windows", self.max_windows, 1)

    def is_due(self, windows: int, kept_share: float) -> bool:
        """Returns whether a selection is due by `kept_share`, or `windows` after the last one."""
        return windows + 1 >= self.max_windows or (windows > 0 and kept_share < self.keep)


#: The values of `update_interval` and `select_interval`.
Window = int | AutoWindow
Select = int | AutoSelect | None


class ScheduleState(NamedTuple):
    """The numbers that adaptive rules compare. `flush` does not change them."""

    sums: Float32[np.ndarray, " numbers"]  # the open window's sum of `window_statistics`; may be ()
    windows: Int32[np.ndarray, " groups"]  # windows closed since the last selection
    shares: Float32[np.ndarray, " groups"]  # the last `kept_share`; NaN if unknown

    def close_windows(self, closes: np.ndarray, selects: np.ndarray) -> "ScheduleState":
        """Returns the state after windows closed; both arrays are bool (groups,)."""
        windows = np.where(selects, 0, self.windows + closes).astype(np.int32)
        return self._replace(sums=np.zeros_like(self.sums), windows=windows)
