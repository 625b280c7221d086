"""When a window closes and when channels are selected again.

The device half in-graph, the engine and nobody else ask here; none of them may assume that
windows have equal length. Steps are counted from 1; step t's boundary lies between t and t + 1.

The same code decides for NumPy numbers (the engine) and for traced ones (in-graph). What it may
know of a step is what was known of the step before: an engine that wanted more would wait for the
device.
"""

import dataclasses
import math
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class AutoWindow:
    """Windows that close when what has piled up weighs as much as one important step.

    A leaf is ripe when the sum, over the window's steps, of the root mean square of its deferred
    channels' gradient is at least the mean, over the same steps, of that of its selected channels.
    The window closes when at least `share` of the leaves that travel are ripe, or when it has
    `max_interval` steps. So that nobody waits for the device, the decision after step t knows the
    steps up to t - 1; a window that is not cut short thus has at least two. Skipped steps count
    for its length alone. The idea is that of "Zen-auto" in DeepSpeed, which compares L1 sums.

    Attributes:
        max_interval: Steps that a window has at most.
        share: Of the leaves that travel, in (0, 1], rounded up.

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


class Boundary(NamedTuple):
    """What happens after a step. Booleans, or traced ones if the step number is traced."""

    closes: Any  # the window's host update is made
    selects: Any  # channels are selected again; only where a window closes
    synchronous: Any  # the update reaches the parameters at once, not at the next boundary


class Tally(NamedTuple):
    """What decisions are made from: NumPy arrays and numbers, or traced ones.

    `flush` does not touch it: it ends a window's sum early, and moves no boundary.
    """

    length: Any  # int32: steps since the last boundary, before the one that is asked about
    counted: Any  # float32: those of them that were not skipped
    deferred: Any  # float32 (leaves,): sums over them of the deferred channels' root mean square
    selected: Any  # float32 (leaves,): the same of the selected ones'
    windows: Any  # int32: closed since the last selection
    kept: Any  # float32: share of the best score, measured at the last boundary; 1 if it was not

    def add(self, statistics: Any) -> "Tally":
        """With what a step has to say: float32 [counted, *deferred, *selected]; None is nothing."""
        if statistics is None:
            return self
        leaves = self.deferred.shape[0]
        return self._replace(
            counted=self.counted + statistics[0],
            deferred=self.deferred + statistics[1 : 1 + leaves],
            selected=self.selected + statistics[1 + leaves :],
        )


def first_tally(schedule: "Schedule", leaves: int) -> Tally:
    """Before the first step, in NumPy, for so many leaves that travel."""
    sums = leaves if schedule.weighs else 0
    return Tally(
        length=np.int32(0),
        counted=np.float32(0),
        deferred=np.zeros(sums, np.float32),
        selected=np.zeros(sums, np.float32),
        windows=np.int32(0),
        kept=np.float32(1),
    )


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When windows close and channels are selected, from the end of the warm-up. Static, hashable.

    Attributes:
        window: Steps in a window, or the rule.
        select: Steps between two selections, or the rule.
        full_warm_up_rounds: First steps, each of which is a window of its own.
        overlap_step: Whether updates reach the parameters a window later.
    """

    window: int | AutoWindow
    select: int | AutoSelect | EpochSelect
    full_warm_up_rounds: int
    overlap_step: bool

    @property
    def weighs(self) -> bool:
        """Whether decisions need every step's statistics."""
        return isinstance(self.window, AutoWindow)

    @property
    def measures(self) -> bool:
        """Whether decisions need the share of the score that is kept."""
        return isinstance(self.select, AutoSelect)

    @property
    def adaptive(self) -> bool:
        """Whether `boundary` needs a tally."""
        return self.weighs or self.measures

    def boundary(self, step: Any, tally: Tally | None) -> Boundary:
        """What happens after step `step` (a Python int or a traced int32).

        Args:
            step: Counted from 1.
            tally: Of the steps before it; may be None unless `adaptive`.
        """
        warm = step <= self.full_warm_up_rounds
        since = step - self.full_warm_up_rounds
        if isinstance(self.window, AutoWindow):
            assert tally is not None
            length = tally.length + 1
            closes = warm | self._ripe(self.window, tally) | (length >= self.window.max_interval)
        else:
            length = self.window
            closes = warm | (since % length == 0)
        # Without a warm-up the first selection is at the first boundary, however far off the
        # interval's end is; with one, it is at the warm-up's end.
        first = since == (length if self.full_warm_up_rounds == 0 else 0)
        due = (since > 0) & self._due(step, since, length, tally)
        return Boundary(
            closes=closes,
            selects=closes & (first | due),
            synchronous=warm | (not self.overlap_step),
        )

    def _ripe(self, window: AutoWindow, tally: Tally) -> Any:
        leaves = tally.deferred.shape[0]
        # No mean: sums of both sides, the selected channels' times the steps that they are of.
        ripe = (tally.deferred * tally.counted >= tally.selected).sum()
        return (tally.counted > 0) & (ripe >= window.needed(leaves))

    def _due(self, step: Any, since: Any, length: Any, tally: Tally | None) -> Any:
        """Whether a selection is due where a window of `length` steps ends, the first one apart."""
        if isinstance(self.select, AutoSelect):
            assert tally is not None
            lost = tally.kept < self.select.keep
            return lost | (tally.windows + 1 >= self.select.max_windows)
        # Whether an interval ends within the window.
        if isinstance(self.select, EpochSelect):
            return step // self.select.steps > (step - length) // self.select.steps
        return since // self.select > (since - length) // self.select


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
