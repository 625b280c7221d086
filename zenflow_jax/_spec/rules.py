"""Argument types: rules for windows and selections, and when gradients leave the device."""

import dataclasses
import enum
import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

import numpy as np


class UnfitRunError(ValueError):
    """Raised if a run does not fit its checkpoint or this machine; names the remedy."""


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
        max_interval: The maximum number of steps in a window.
        share: Share of the offloaded leaves that must be ripe, in (0, 1]; the count is rounded up.

    Examples:
        >>> from zenflow_jax import zenflow
        >>> tx = zenflow(1e-3, update_interval=AutoWindow(max_interval=16), window_scaling=None)
    """

    max_interval: int = 8
    share: float = 0.99

    def __post_init__(self):
        check_int("AutoWindow.max_interval", self.max_interval, 1)
        check_share("AutoWindow.share", self.share)
        if self.share == 0:
            raise ValueError("`AutoWindow.share` is 0. Pass a share above 0.")

    def needed(self, leaves: int) -> int:
        """Returns how many of `leaves` offloaded leaves must be ripe."""
        return max(1, round_up(self.share, leaves))


@dataclasses.dataclass(frozen=True)
class AutoSelect:
    """Selects again when the selected channels no longer have most of the total score.

    At each boundary, the engine computes the ratio of the selected channels' total score to that of
    the best k channels, averaged over leaves and weighted by size. If it is below `keep`, channels
    are selected again at the next boundary; they are also selected `max_windows` windows after the
    last selection. Scores are summed from a selection on: if the best channels change w windows
    after it, the next selection follows about w / keep + 1 windows later.

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


class SendGradients(enum.StrEnum):
    """When the gradients of offloaded leaves leave the device."""

    #: The step copies each gradient to host memory as soon as the backward pass has computed it.
    DURING_STEP = "during_step"
    #: The step leaves gradients on the device; they are copied while the next step runs.
    AFTER_STEP = "after_step"

    @property
    def in_step(self) -> bool:
        """Returns whether the step itself copies gradients to host memory."""
        return self is SendGradients.DURING_STEP


def check_int(
    name: str, value: Any, minimum: int | None, kinds: str = "an int", remedy: str = ""
) -> int:
    """Returns an int of at least `minimum`; `kinds` lists the accepted types for the error."""
    # To Python, a bool is an Integral; to users, it is not.
    if not isinstance(value, Integral) or isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be {kinds}, got {value!r}. {remedy}")
    if minimum is not None and value < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}, got {value}.")
    return int(value)


def check_int_or_none(name: str, value: Any, minimum: int, remedy: str = "") -> int | None:
    return None if value is None else check_int(name, value, minimum, "an int or None", remedy)


def check_one_of(name: str, value: Any, choices: Collection[str]) -> None:
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"`{name}` must be one of {listed}, got {value!r}.")


def round_up(share: float, count: int) -> int:
    """Returns a share of a count, rounded up."""
    # Rounded first, because 0.07 * 100 is 7.000000000000001, and the user meant 7.
    return math.ceil(round(share * count, 6))


def check_share(name: str, value: Any, kinds: str = "a float", remedy: str = "") -> float:
    if not isinstance(value, Real) or isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be {kinds}, got {value!r}. {remedy}")
    if not 0 <= float(value) <= 1:
        raise ValueError(f"`{name}` must be in [0, 1], got {value}.")
    return float(value)


def is_compact(host_state: Any) -> bool:
    """Returns whether the host keeps moments in 8 bits; rejects an invalid `host_state`."""
    check_one_of("host_state", host_state, ("float32", "compact"))
    return host_state == "compact"
