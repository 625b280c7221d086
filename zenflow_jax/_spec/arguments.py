"""Checks the arguments of `zenflow()`."""

import warnings
from numbers import Real

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from zenflow_jax._spec.adaptive import AutoSelect, AutoWindow, Select, Window
from zenflow_jax._spec.checks import check_int, check_int_or_none, check_share
from zenflow_jax._spec.leaf import DTYPES
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
    check_share("topk_ratio", topk_ratio)
    auto_window = update_interval if isinstance(update_interval, AutoWindow) else None
    auto_select = select_interval if isinstance(select_interval, AutoSelect) else None
    window = auto_window.max_interval if auto_window else update_interval
    window = check_int("update_interval", window, 1, "an int or an AutoWindow")
    select = 16 * window if auto_select or select_interval is None else select_interval
    select = check_int("select_interval", select, 1, "an int, an AutoSelect or None")
    # An adaptive window is the same for all leaves, because all leaves decide when it closes.
    in_turn = bool(rolling) and auto_window is None
    late = check_int_or_none("staleness", staleness, 0)
    # With an `AutoWindow`, updates arrive at the next boundary.
    most = window if auto_window is None else 0
    if late is None and auto_window is None:
        late = 1 if in_turn else window
    elif late is not None and late > most:
        raise ValueError(f"`staleness` must be at most {most}, got {late}.")
    # Not `in`: an exponent of an earlier version, such as 1, equals True.
    if not isinstance(window_scaling, bool | np.bool_ | None):
        raise ValueError(f"`window_scaling` must be True or None, got {window_scaling!r}.")
    if window_scaling and window != 1 and late != 0 and not in_turn:
        warnings.warn(
            "`window_scaling=True` hurts the result if updates arrive a whole window late, "
            "as with `rolling=False` or an `AutoWindow`. Pass window_scaling=None.",
            stacklevel=3,
        )
    share = provisional_share
    if share is not None:
        share = check_share("provisional_share", share) or None
    warm_up = check_int("full_warm_up_rounds", full_warm_up_rounds, 0)
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
    kind = None if dtype is None else np.dtype(dtype)
    if kind not in (None, *DTYPES):
        raise ValueError(f"`transfer_dtype` must be bfloat16, float32 or None, got {dtype!r}.")
    return kind


def check_numbers(**numbers: object) -> None:
    """Rejects values that are not real scalars, and untraced values out of range."""
    for name, value in numbers.items():
        has_schedule = name in ("learning_rate", "weight_decay")
        if (has_schedule and callable(value)) or (name == "max_grad_norm" and value is None):
            continue
        is_python = isinstance(value, Real)
        dtype = np.dtype(type(value)) if is_python else getattr(value, "dtype", np.dtype(object))
        is_float = jnp.issubdtype(dtype, jnp.floating)
        if not (is_float or jnp.issubdtype(dtype, jnp.integer)) or getattr(value, "shape", ()):
            raise TypeError(f"`{name}` must be a number or a scalar array, got {value!r}.")
        if is_float and np.dtype(dtype).itemsize < 4:
            raise TypeError(
                f"`{name}` is rounded to {dtype}, in which 0.999 becomes 1. Pass "
                "hyperparam_dtype=jnp.float32 to `optax.inject_hyperparams`."
            )
        if isinstance(value, Tracer):
            continue
        number, limit = float(np.asarray(value)), 1 if name in ("b1", "b2") else np.inf
        if not 0 <= number < limit or (name == "max_grad_norm" and number == 0):
            raise ValueError(f"`{name}` must be at least 0 and below {limit}, got {number}.")
