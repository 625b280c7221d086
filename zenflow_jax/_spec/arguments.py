"""Checks the arguments of `zenflow()`."""

import warnings
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from zenflow_jax._spec.adaptive import AutoSelect, AutoWindow, Select, Window
from zenflow_jax._spec.rules import (
    check_int,
    check_int_or_none,
    check_share,
)
from zenflow_jax._spec.schedule import Schedule

#: Arguments that may be arrays, including traced ones. All others determine the state's structure.
NUMBERS = ("learning_rate", "b1", "b2", "eps", "weight_decay", "max_grad_norm")


def check_schedule(
    *,
    topk_ratio: float,
    update_interval: Window,
    select_interval: Select,
    full_warm_up_rounds: int,
    rolling: bool,
    staleness: int | None,
    window_scaling: bool | None,
    provisional_share: float | None,
) -> Schedule:
    """Returns the schedule that these arguments describe; errors name the invalid argument."""
    check_share("topk_ratio", topk_ratio, remedy=_IF_INJECTED)
    check_bool("rolling", rolling)
    auto_window = auto_select = None
    if isinstance(update_interval, AutoWindow):
        auto_window, window = update_interval, update_interval.max_interval
        if topk_ratio == 0:
            raise ValueError(
                "`topk_ratio` is 0, but an `AutoWindow` compares deferred with selected channels. "
                "Pass a share above 0."
            )
    else:
        kinds = "an int or an AutoWindow"
        window = check_int("update_interval", update_interval, 1, kinds, _IF_INJECTED)
    select = 16 * window
    if isinstance(select_interval, AutoSelect):
        auto_select = select_interval
    elif select_interval is not None:
        kinds = "an int, an AutoSelect or None"
        select = check_int("select_interval", select_interval, 1, kinds, _IF_INJECTED)
    # An adaptive window is the same for all leaves, because all leaves decide when it closes.
    in_turn = bool(rolling) and auto_window is None
    late = check_int_or_none("staleness", staleness, 0, _IF_INJECTED)
    if auto_window is not None and late:
        raise ValueError(
            f"`staleness` is {late}, but with an `AutoWindow` updates arrive at the next "
            "boundary. Pass None or 0."
        )
    if late is None and auto_window is None:
        late = 1 if in_turn else window
    elif late is not None and late > window:
        raise ValueError(f"`staleness` must be at most update_interval={window}, got {late}.")
    if window_scaling is not None:
        check_bool("window_scaling", window_scaling, " (True replaces all exponents) or None")
    if window_scaling and window != 1 and late != 0 and not in_turn:
        warnings.warn(
            "`window_scaling=True` hurts the result if updates arrive a whole window late, "
            "as with `rolling=False` or an `AutoWindow`. Pass window_scaling=None.",
            stacklevel=3,
        )
    share = provisional_share
    if share is not None:
        share = check_share("provisional_share", share, "a float or None", _IF_INJECTED) or None
    warm_up = check_int("full_warm_up_rounds", full_warm_up_rounds, 0, remedy=_IF_INJECTED)
    return Schedule(
        window=window,
        select=select,
        full_warm_up_rounds=warm_up,
        groups=window if in_turn else 1,
        staleness=late,
        window_scaling=bool(window_scaling),
        # With windows of one step and no staleness, weights never wait for an update.
        provisional_share=None if window == 1 and late == 0 else share,
        auto_window=auto_window,
        auto_select=auto_select,
    )


def check_transfer_dtype(dtype: jax.typing.DTypeLike | None) -> np.dtype | None:
    """Returns the dtype that mail is cast to; None lets each leaf decide."""
    if dtype is None:
        return None
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = None
    if kind not in (np.dtype(jnp.bfloat16), np.dtype(np.float32)):
        raise ValueError(f"`transfer_dtype` must be bfloat16, float32 or None, got {dtype!r}.")
    return kind


def check_numbers(**numbers: Any) -> None:
    """Rejects values that are not real scalars, and untraced values out of range."""
    for name, value in numbers.items():
        has_schedule = name in ("learning_rate", "weight_decay")
        if (has_schedule and callable(value)) or (name == "max_grad_norm" and value is None):
            continue
        dtype = getattr(value, "dtype", None)
        if dtype is None and isinstance(value, Real):
            dtype = np.dtype(type(value))
        is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
        is_real = is_float or (dtype is not None and jnp.issubdtype(dtype, jnp.integer))
        if not is_real or getattr(value, "shape", ()) != ():
            remedy = (
                "For several rates, pass `lr_scale`."
                if has_schedule
                else "For a schedule, use `optax.inject_hyperparams`."
            )
            raise TypeError(f"`{name}` must be a number or a scalar array, got {value!r}. {remedy}")
        if is_float and np.dtype(dtype).itemsize < 4:
            raise TypeError(
                f"`{name}` is rounded to {dtype}, in which 0.999 becomes 1. Pass "
                "hyperparam_dtype=jnp.float32 to `optax.inject_hyperparams`."
            )
        if isinstance(value, Tracer):
            continue
        number = float(np.asarray(value))
        if not np.isfinite(number) or number < 0:
            raise ValueError(f"`{name}` must be finite and at least 0, got {number}.")
        if name in ("b1", "b2") and number >= 1:
            raise ValueError(f"`{name}` must be in [0, 1), got {number}.")
        if name == "max_grad_norm" and number == 0:
            raise ValueError("`max_grad_norm` must be above 0, or None for no clipping, got 0.")


def check_bool(name: str, value: object, or_else: str = "") -> None:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be a bool{or_else}, got {value!r}. {_IF_INJECTED}")


_IF_INJECTED = (
    "With `optax.inject_hyperparams`, pass static_args=zenflow_jax.STATIC_ARGS, or this argument "
    "becomes an array or a schedule."
)
