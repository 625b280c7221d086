"""Rules for when windows close and when channels are selected."""

import dataclasses
import math
from numbers import Integral, Real
from typing import Any, NamedTuple

#: The windows that are compared where one is to be chosen, in steps.
INTERVALS = (1, 2, 4, 8, 16)
#: Those that a run has until one is chosen.
FIRST_INTERVAL = 4


@dataclasses.dataclass(frozen=True)
class AutoWindow:
    """Windows that close when their deferred channels weigh as much as one step's selected ones.

    Every step gives two numbers for each leaf: the root mean square of the gradient on deferred
    channels, and on selected ones. A leaf is ripe when the window's sum of the first is at least
    the window's mean of the second. The window closes when at least `share` of the offloaded leaves
    are ripe, or when it has `max_interval` steps. The decision after step t knows only the steps
    before it, so that nobody waits for the device; a window that is not cut short thus has at least
    two steps. Skipped steps count for its length alone. DeepSpeed's "Zen-auto" has the same idea
    and compares L1 sums.

    Attributes:
        max_interval: The most steps that a window may have.
        share: Share of the offloaded leaves that must be ripe, in (0, 1]; the count is rounded up.

    Raises:
        TypeError, ValueError: If a value is of another kind or out of range.

    Examples:
        >>> from zenflow_jax import zenflow
        >>> tx = zenflow(1e-3, update_interval=AutoWindow(max_interval=16))
    """

    max_interval: int = 8
    share: float = 0.99

    def __post_init__(self):
        _at_least_one(self, "max_interval", "It counts the steps in the longest window.")
        _in_unit(self, "share", "It is a share of the leaves: 0.99 for all but one in a hundred.")
        if self.share == 0:
            raise ValueError(
                "`AutoWindow.share` must be above 0, got 0. No leaf would have to be ripe: pass "
                "`update_interval=2` for windows that always close that early."
            )

    def needed(self, leaves: int) -> int:
        """How many of `leaves` offloaded leaves must be ripe."""
        # Rounded first, as 0.07 * 100 is 7.000000000000001.
        return max(1, math.ceil(round(self.share * leaves, 6)))


@dataclasses.dataclass(frozen=True)
class FitWindow:
    """Windows as short as this machine allows: the engine measures the host, and chooses once.

    The run begins with windows of four steps. Before the step that `after` says, the engine
    measures how long steps and host updates take. After that step it chooses the shortest windows,
    of 1, 2, 4, 8 or 16 steps, behind which the host's work hides with a fifth of the time to spare;
    if none do, those that come closest. If these are not of four steps, it brings in all updates
    there, as `flush` does, and goes on with the new windows. The train step is not compiled again.

    What a machine measures depends on the moment, so two such runs may choose differently. The
    choice is logged, is in `engine.stats` and in checkpoints, and a resumed run keeps it. To
    repeat a run bit for bit, name what it chose: `update_interval=FitWindow(8)`; a run that chose
    four steps is one with `update_interval=4`.

    Windows of 8 or 16 steps take 4 to 8 bytes more of host memory for each offloaded parameter, for
    sums of mail, unless the device adds up (`send_gradients="per_window"`).

    Attributes:
        interval: Steps in a window from then on, one of 1, 2, 4, 8 and 16. None: the engine
            measures and chooses.
        after: After how many steps, counted from the warm-up's end, the windows become those; a
            multiple of 16. Where the engine has measured fewer than 12 steps, because the run was
            resumed shortly before or others were skipped, it chooses 16 steps later.

    Raises:
        TypeError, ValueError: If a value is of another kind or out of range.

    Examples:
        >>> from zenflow_jax import zenflow
        >>> tx = zenflow(1e-3, update_interval="fit")
        >>> again = zenflow(1e-3, update_interval=FitWindow(interval=8))
    """

    interval: int | None = None
    after: int = 32

    def __post_init__(self):
        meaning = "It counts the steps after the warm-up, before the windows are chosen."
        _at_least_one(self, "after", meaning)
        if self.after % INTERVALS[-1]:
            raise ValueError(
                f"`FitWindow.after` must be a multiple of {INTERVALS[-1]}, got {self.after}. "
                f"{meaning} There windows of any length end: leave it out for 32."
            )
        if self.interval is None:
            return
        meaning = "It counts the steps in a window; None has the engine choose."
        _at_least_one(self, "interval", meaning)
        if self.interval not in INTERVALS:
            raise ValueError(
                f"`FitWindow.interval` must be one of {', '.join(map(str, INTERVALS))}, got "
                f"{self.interval}. {meaning} For windows of any other length from the first step "
                f"on pass `update_interval={self.interval}`."
            )


class FoundWindow(NamedTuple):
    """What a run with a `FitWindow` has chosen: int32 scalars, 0 before."""

    interval: Any  # steps in a window
    after: Any  # steps after the warm-up at which such windows began


@dataclasses.dataclass(frozen=True)
class AutoSelect:
    """Selects again when the selected channels no longer hold most of the score.

    Each boundary measures which share of the best k channels' score the selected channels hold: a
    ratio for each leaf, weighted by the leaf's size. Below `keep`, the next boundary selects again.
    The `max_windows`-th window since the last selection always does. Scores are sums since the last
    selection. If the important channels change w windows after it, the next selection thus follows
    about w / keep + 1 windows after that change, and at the latest two windows after the
    `max_windows`-th.

    Attributes:
        keep: The share to hold, in [0, 1]. 0 selects every `max_windows` windows and merely
            measures it.
        max_windows: The most windows between two selections.

    Raises:
        TypeError, ValueError: If a value is of another kind or out of range.
    """

    keep: float = 0.9
    max_windows: int = 64

    def __post_init__(self):
        _in_unit(self, "keep", "It is a share of the score: 0.9 for nine tenths of it.")
        _at_least_one(self, "max_windows", "It counts the windows between two selections.")


@dataclasses.dataclass(frozen=True)
class EpochSelect:
    """Selects at the end of every epoch, or of every few epochs.

    It selects at the first boundary at or after the epoch's end: windows need not divide an epoch.
    DeepSpeed's `select_strategy="epoch"` takes the steps from its data loader, and never selects
    again without one.

    Attributes:
        steps_per_epoch: Optimizer steps in an epoch, counted from the first step of the run.
        epochs: Epochs between two selections.

    Raises:
        TypeError, ValueError: If a value is of another kind or below 1.

    Examples:
        >>> from zenflow_jax import zenflow
        >>> tx = zenflow(1e-3, select_interval=EpochSelect(steps_per_epoch=1250))
    """

    steps_per_epoch: int
    epochs: int = 1

    def __post_init__(self):
        _at_least_one(
            self,
            "steps_per_epoch",
            "It counts the optimizer steps in an epoch, `len(loader)` for a loader of batches; "
            "with less, channels would never be selected again.",
        )
        _at_least_one(self, "epochs", "It counts the epochs between two selections.")

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.epochs


def longest(window: int | AutoWindow | FitWindow) -> int:
    """The most steps that a window may have."""
    if isinstance(window, FitWindow):
        return INTERVALS[-1]
    return window.max_interval if isinstance(window, AutoWindow) else window


def _at_least_one(rule: Any, name: str, meaning: str) -> None:
    value, kind = getattr(rule, name), type(rule).__name__
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"`{kind}.{name}` must be an int, got {value!r}. {meaning}")
    if value < 1:
        raise ValueError(f"`{kind}.{name}` must be at least 1, got {value}. {meaning}")
    object.__setattr__(rule, name, int(value))


def _in_unit(rule: Any, name: str, meaning: str) -> None:
    value, kind = getattr(rule, name), type(rule).__name__
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"`{kind}.{name}` must be a float, got {value!r}. {meaning}")
    if not 0 <= float(value) <= 1:
        raise ValueError(f"`{kind}.{name}` must lie in [0, 1], got {value}. {meaning}")
    object.__setattr__(rule, name, float(value))
