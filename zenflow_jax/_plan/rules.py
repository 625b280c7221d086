"""Rules for when windows close and when channels are selected."""

import dataclasses
import math
from numbers import Integral, Real
from typing import Any


@dataclasses.dataclass(frozen=True)
class AutoWindow:
    """Windows that close when what has piled up weighs as much as one important step.

    A leaf is ripe when the sum, over the window's steps, of the root mean square of its deferred
    channels' gradient is at least the mean, over the same steps, of that of its selected channels.
    The window closes when at least `share` of the offloaded leaves are ripe, or when it has
    `max_interval` steps. So that nobody waits for the device, the decision after step t knows the
    steps up to t - 1; a window that is not cut short thus has at least two. Skipped steps count
    for its length alone. The idea is that of "Zen-auto" in DeepSpeed, which compares L1 sums.

    Attributes:
        max_interval: Steps that a window has at most.
        share: Of the offloaded leaves, in (0, 1], rounded up.

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
        """How many of so many leaves must be ripe."""
        # Rounded first, as 0.07 * 100 is 7.000000000000001.
        return max(1, math.ceil(round(self.share * leaves, 6)))


@dataclasses.dataclass(frozen=True)
class AutoSelect:
    """Selection anew when the selected channels are no longer those that matter.

    At a boundary channels are selected again if, at the boundary before, the selected ones held
    less than `keep` of the score that the best k channels held (the ratio of each leaf, weighted by
    its size), or if this is the `max_windows`-th window since the last selection. Scores are sums
    since the last selection: a change of the important channels w windows after it is followed
    about w / keep + 1 windows later, and at the latest two windows after the `max_windows`-th.

    Attributes:
        keep: In [0, 1]. 0 selects every `max_windows` windows and merely measures the share.
        max_windows: Windows between two selections at most.

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
    """Selection at the end of every epoch, or of every so many.

    At the first boundary at or after the end of the epoch: windows need not divide it. DeepSpeed's
    `select_strategy="epoch"`, which takes the steps from the data loader it was given, and never
    selects again when it was given none.

    Attributes:
        steps_per_epoch: Optimizer steps in an epoch, counted from the first step of the run.
        epochs: Between two selections.

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


def longest(window: int | AutoWindow) -> int:
    """Steps that a window has at most."""
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
