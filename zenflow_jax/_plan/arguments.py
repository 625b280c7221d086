"""Checks the arguments of `zenflow()` and says what is wrong with them."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from zenflow_jax._plan.rules import AutoSelect, AutoWindow, EpochSelect, longest
from zenflow_jax._plan.schedule import Schedule
from zenflow_jax._plan.sending import SendGradients

#: What `window_scaling="auto"` is where leaves take turns.
ROLLING_SCALING = 0.5

#: Arguments that shape the state, or that are functions but not schedules.
#: `optax.inject_hyperparams` would turn them into arrays unless it is told which they are:
#: `optax.inject_hyperparams(zenflow, static_args=zenflow_jax.STATIC_ARGS)(...)`.
STATIC_ARGS = (
    "mask",
    "topk_ratio",
    "update_interval",
    "select_interval",
    "full_warm_up_rounds",
    "overlap_step",
    "rolling",
    "staleness",
    "window_scaling",
    "provisional_share",
    "channel_axis",
    "resident",
    "partition_replicated",
    "param_shardings",
    "offload",
    "send_gradients",
    "transfer_dtype",
)


#: Arguments of `optax.adamw` that `zenflow` lacks, each with the advice that its error gives.
_NOT_HERE = {
    "eps_root": "Leave it out: its default is 0, and `eps` alone keeps the divisor from 0",
    "mu_dtype": "Leave it out: moments are float32, those of deferred channels in host memory",
    "nesterov": "Leave it out: its default is False",
}


def check_arguments(arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Refuses calls that `optax.adamw` reads differently, or that it alone accepts."""
    if len(arguments) > 4:
        raise TypeError(
            "`zenflow` takes at most four arguments by position (learning_rate, b1, b2, eps), got "
            f"{len(arguments)}. The fifth of `optax.adamw` is `eps_root`, which is not there, not "
            "`weight_decay`: name it and all that follows, as in "
            "`zenflow(1e-3, 0.9, 0.999, 1e-8, weight_decay=0.01)`."
        )
    for name, advice in _NOT_HERE.items():
        if name in options:
            raise TypeError(
                f"`zenflow` has all arguments of `optax.adamw` but {', '.join(_NOT_HERE)}, got "
                f"{name}={options[name]!r}. {advice}."
            )


def check_schedule(
    topk_ratio: float,
    update_interval: int | str | AutoWindow,
    select_interval: int | str | AutoSelect | EpochSelect | None,
    full_warm_up_rounds: int,
    overlap_step: bool,
    rolling: bool,
    staleness: int | None,
    window_scaling: float | str | None,
    provisional_share: float | None,
    offload: bool,
) -> Schedule:
    """The schedule that these arguments describe; an error names the argument that is wrong."""
    _static("topk_ratio", topk_ratio, Real, "a float")
    if not 0 <= topk_ratio <= 1:
        raise ValueError(
            f"`topk_ratio` must lie in [0, 1], got {topk_ratio}. It is a share of channels, "
            "neither a percentage nor a count: for a tenth of them pass 0.1."
        )
    window = _check_window(update_interval, topk_ratio)
    select = _check_select(select_interval, window)
    _static("full_warm_up_rounds", full_warm_up_rounds, Integral, "an int")
    if full_warm_up_rounds < 0:
        raise ValueError(
            f"`full_warm_up_rounds` must not be negative, got {full_warm_up_rounds}. It counts the "
            "first steps that update everything; 0 for none."
        )
    _static("overlap_step", overlap_step, _BOOL, "a bool")
    _static("rolling", rolling, _BOOL, "a bool")
    _static("offload", offload, _BOOL, "a bool")
    # An adaptive window is the same for all leaves, as all of them decide when it closes.
    in_turn = bool(rolling) and not isinstance(window, AutoWindow)
    late = _check_staleness(staleness, window, bool(overlap_step), in_turn)
    share = _check_provisional_share(provisional_share)
    return Schedule(
        window=window,
        select=select,
        full_warm_up_rounds=int(full_warm_up_rounds),
        groups=window if in_turn and isinstance(window, int) else 1,
        staleness=late,
        window_scaling=_check_window_scaling(window_scaling, in_turn),
        # Where no window outlasts its step, no weight waits for an update.
        provisional_share=None if window == 1 and late == 0 else share,
    )


def _check_staleness(
    staleness: Any, window: int | AutoWindow, overlap_step: bool, in_turn: bool
) -> int | None:
    """The steps that an update waits; None where that is for the next boundary to say."""
    if staleness is not None:
        _static("staleness", staleness, Integral, "an int or None")
        if not overlap_step and staleness != 0:
            raise ValueError(
                f"`staleness` must be 0 or None with overlap_step=False, got {staleness}. Both say "
                "when an update reaches the parameters: leave `overlap_step` out."
            )
        if isinstance(window, AutoWindow) and staleness != 0:
            raise ValueError(
                "`staleness` must be 0 or None with an adaptive `update_interval`, got "
                f"{staleness}. Its updates arrive at the next boundary, and no one knows when that "
                "will be: leave `staleness` out, or pass an int as `update_interval`."
            )
        if isinstance(window, int) and not 0 <= staleness <= window:
            raise ValueError(
                f"`staleness` must lie between 0 and `update_interval`, got {staleness} with "
                f"update_interval={window}. It counts the steps that an update may take before it "
                "must reach the parameters, which is before the next one begins."
            )
        return int(staleness)
    if not overlap_step:
        return 0
    if in_turn:
        return 1
    return window if isinstance(window, int) else None


def _check_window_scaling(value: Any, in_turn: bool) -> float | None:
    """The exponent of the learning rate; None for no scaling at all."""
    if value is None:
        return None
    if isinstance(value, str) and value == "auto":
        # With updates as stale as the paper's, longer steps overshoot (benchmarks/LOG.md).
        return ROLLING_SCALING if in_turn else None
    _static("window_scaling", value, Real, 'a float, "auto" or None')
    if not 0 <= float(value) <= 1:
        raise ValueError(
            f"`window_scaling` must lie in [0, 1] or be None, got {value}. It is the exponent by "
            "which the learning rate of a deferred channel grows with the steps in its window: 0.5 "
            "for the square root, 0 to scale the betas alone, None for the paper's way."
        )
    return float(value)


def _check_provisional_share(value: Any) -> float | None:
    """The share; None for no provisional steps."""
    if value is None:
        return None
    _static("provisional_share", value, Real, "a float or None")
    if not 0 <= float(value) <= 1:
        raise ValueError(
            f"`provisional_share` must lie in [0, 1] or be None, got {value}. It is the length of "
            "a provisional step as a share of the learning rate."
        )
    return float(value) or None


def _check_window(interval: Any, topk_ratio: float) -> int | AutoWindow:
    interval = _rule(interval, AutoWindow)
    if isinstance(interval, AutoWindow):
        if topk_ratio == 0:
            raise ValueError(
                "`topk_ratio` must be above 0 with an adaptive `update_interval`, got 0. Windows "
                "close by comparing deferred channels with selected ones: select some, or pass an "
                "int."
            )
        return interval
    _static("update_interval", interval, Integral, 'an int, "auto" or an AutoWindow')
    if interval < 1:
        raise ValueError(
            f"`update_interval` must be at least 1, got {interval}. It counts the steps in "
            "a window; 1 updates the deferred channels at every step."
        )
    return int(interval)


def _rule(interval: Any, rule: Callable[[], Any]) -> Any:
    return rule() if isinstance(interval, str) and interval == "auto" else interval


def _check_select(interval: Any, window: int | AutoWindow) -> int | AutoSelect | EpochSelect:
    interval = _rule(interval, AutoSelect)
    if isinstance(interval, AutoSelect | EpochSelect):
        return interval
    if interval is None:
        return 16 * longest(window)
    kinds = 'an int, "auto", an AutoSelect, an EpochSelect or None'
    _static("select_interval", interval, Integral, kinds)
    if isinstance(window, AutoWindow):
        if interval < 1:
            raise ValueError(
                f"`select_interval` must be at least 1, got {interval}. It counts the steps "
                "between two selections; None for as many as in 16 of the longest windows."
            )
    elif interval < 1 or interval % window:
        nearest = window * max(1, interval // window)
        raise ValueError(
            "`select_interval` must be a positive multiple of `update_interval`, got "
            f"{interval} with update_interval={window}. Channels change hands "
            f"where a window closes: pass {nearest}, or None for every 16 windows."
        )
    return int(interval)


def check_send_gradients(value: Any) -> SendGradients:
    known = [str(x) for x in SendGradients]
    if not isinstance(value, str) or value not in known:
        raise ValueError(
            f"`send_gradients` must be {', '.join(map(repr, known[:-1]))} or {known[-1]!r}, got "
            f"{value!r}. Leave it out unless the gradients' way to the host is what holds your "
            "steps up."
        )
    return SendGradients(value)


def check_transfer_dtype(dtype: Any) -> np.dtype | None:
    """The dtype that mail is cast to; None means the one that suits each leaf."""
    if dtype is None:
        return None
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found not in (np.dtype(jnp.bfloat16), np.dtype(np.float32)):
        raise ValueError(
            f"`transfer_dtype` must be bfloat16, float32 or None, got {dtype!r}. Gradients may "
            "cross in half the bytes, or all unrounded; with None those of bfloat16 leaves cross "
            "in their own dtype, all others in float32."
        )
    return found


def check_numbers(**numbers: Any) -> None:
    """Refuses what is no real scalar, and bad values where they are known (not traced)."""
    for name, value in numbers.items():
        if name == "max_grad_norm" and value is None:
            continue
        if callable(value):
            if name in ("learning_rate", "weight_decay"):
                continue
            raise TypeError(
                f"`{name}` must be a number or a scalar array, got a function. Only the learning "
                "rate and the weight decay may be schedules; for others use "
                "`optax.inject_hyperparams(zenflow, static_args=zenflow_jax.STATIC_ARGS)`."
            )
        dtype = getattr(value, "dtype", np.dtype(type(value)) if isinstance(value, Real) else None)
        if dtype is None or getattr(value, "shape", ()) != () or not _is_real(dtype):
            raise TypeError(
                f"`{name}` must be a number or a scalar array, got {value!r}. Hyperparameters are "
                "real and shared by all leaves."
            )
        if jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4:
            raise TypeError(
                f"`{name}` must not be rounded, got an array of {dtype}: in bfloat16, 0.999 is 1. "
                "`optax.inject_hyperparams` rounds to the dtype of the parameters unless it is "
                "given hyperparam_dtype=jnp.float32."
            )
        if isinstance(value, Tracer):
            continue
        number = float(value)
        if not np.isfinite(number) or number < 0:
            raise ValueError(
                f"`{name}` must be finite and not negative, got {number}. One bad value would turn "
                "every parameter into NaN: check where it comes from."
            )
        if name in ("b1", "b2") and number >= 1:
            raise ValueError(
                f"`{name}` must lie in [0, 1), got {number}. It is the decay of a moving average; "
                "optax.adamw's default is 0.9 for b1 and 0.999 for b2."
            )
        if name == "max_grad_norm" and number == 0:
            raise ValueError(
                "`max_grad_norm` must be positive, got 0. It would clip every gradient away; pass "
                "None for no clipping."
            )


def check_selectors(channel_axis: Any, resident: Any, partition_replicated: Any, mask: Any) -> None:
    if not callable(channel_axis):
        _static("channel_axis", channel_axis, Integral, "an int or a function of (path, leaf)")
    if resident is not None and not callable(resident):
        raise TypeError(
            "`resident` must be None or a function of (key path, leaf) that returns a bool, got "
            f"{resident!r}. {_IF_INJECTED}"
        )
    if not callable(partition_replicated):
        kinds = "a bool or a function of (path, leaf)"
        _static("partition_replicated", partition_replicated, _BOOL, kinds)
    if isinstance(mask, jax.Array | np.ndarray):
        raise TypeError(
            f"`mask` must be a tree of bools or a function of the parameters, got {mask!r}. "
            f"{_IF_INJECTED}"
        )


_BOOL = bool | np.bool_

_IF_INJECTED = (
    "Under `optax.inject_hyperparams` pass static_args=zenflow_jax.STATIC_ARGS, or it becomes an "
    "array or a schedule."
)


def _static(name: str, value: Any, kind: Any, words: str) -> None:
    # To Python a bool is an Integral; to users it is not.
    if isinstance(value, kind) and isinstance(value, bool | np.bool_) == (kind is _BOOL):
        return
    raise TypeError(
        f"`{name}` must be {words} known when the program is built, got {value!r}. {_IF_INJECTED}"
    )


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
