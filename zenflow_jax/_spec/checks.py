"""Checks of single arguments, and when gradients leave the device."""

import enum
import math
from collections.abc import Collection
from numbers import Integral, Real

import numpy as np


class UnfitRunError(ValueError):
    """Raised if a run does not fit its checkpoint or this machine; names the remedy."""


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


def check_int(name: str, value: object, minimum: int, kinds: str = "an int") -> int:
    """Returns an int of at least `minimum`; `kinds` lists the accepted types for the error."""
    # To Python, a bool is an Integral; to users, it is not.
    if not isinstance(value, Integral) or isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be {kinds}, got {value!r}.")
    if int(value) < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}, got {value}.")
    return int(value)


def check_int_or_none(name: str, value: object, minimum: int) -> int | None:
    return None if value is None else check_int(name, value, minimum, "an int or None")


def check_one_of(name: str, value: object, choices: Collection[str]) -> None:
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"`{name}` must be one of {listed}, got {value!r}.")


def round_up(share: float, count: int) -> int:
    """Returns a share of a count, rounded up."""
    # Rounded first, because 0.07 * 100 is 7.000000000000001, and the user meant 7.
    return math.ceil(round(share * count, 6))


def check_share(name: str, value: object) -> float:
    if not isinstance(value, Real) or isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be a float, got {value!r}.")
    if not 0 <= float(value) <= 1:
        raise ValueError(f"`{name}` must be in [0, 1], got {value}.")
    return float(value)


def is_compact(host_state: object) -> bool:
    """Returns whether the host keeps moments in 8 bits; rejects an invalid `host_state`."""
    check_one_of("host_state", host_state, ("float32", "compact"))
    return host_state == "compact"
