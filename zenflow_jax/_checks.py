"""What users may pass to `zenflow()`, and what they are told otherwise."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from zenflow_jax._channels import LeafSpec, plain_name, resolve
from zenflow_jax._mesh import placement_of
from zenflow_jax._schedule import AutoSelect, AutoWindow, EpochSelect, Schedule, longest
from zenflow_jax._state import ZenFlowState

_logger = logging.getLogger("zenflow_jax")

#: Arguments that shape the state or are functions but no schedules.
#: `optax.inject_hyperparams` would turn them into arrays, so it must be told:
#: `optax.inject_hyperparams(zenflow, static_args=zenflow_jax.STATIC_ARGS)(...)`.
STATIC_ARGS = (
    "mask",
    "topk_ratio",
    "update_interval",
    "select_interval",
    "full_warm_up_rounds",
    "overlap_step",
    "channel_axis",
    "resident",
    "partition_replicated",
    "param_shardings",
    "offload",
    "accumulate",
    "send_mail",
    "transfer_dtype",
)


#: What `optax.adamw` has and `zenflow` has not, and what it comes to without.
_NOT_HERE = {
    "eps_root": "Leave it out: its default is 0, and `eps` alone keeps the divisor from 0",
    "mu_dtype": "Leave it out: moments are float32, those of deferred channels in host memory",
    "nesterov": "Leave it out: its default is False",
}


def check_arguments(arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Refuses calls that `optax.adamw` would understand in another way, or alone."""
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
    offload: bool,
) -> Schedule:
    """The schedule that these arguments describe, or an error that says which is wrong."""
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
    _static("offload", offload, _BOOL, "a bool")
    return Schedule(
        window=window,
        select=select,
        full_warm_up_rounds=int(full_warm_up_rounds),
        overlap_step=bool(overlap_step),
    )


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


def check_delivery(accumulate: str, send_mail: str | None) -> str:
    """The `ZenFlowState.delivery` that these arguments describe."""
    for name, value, known in (
        ("accumulate", accumulate, ("host", "device")),
        ("send_mail", send_mail, (None, "step", "exchange")),
    ):
        if isinstance(value, jax.Array) or value not in known:
            raise ValueError(
                f"`{name}` must be {' or '.join(map(repr, known))}, got {value!r}. Leave it out "
                "unless the gradients' way to the host is what holds your steps up."
            )
    if accumulate == "host":
        return send_mail or "step"
    if send_mail == "step":
        raise ValueError(
            "`send_mail` must be None or 'exchange' with accumulate=\"device\", got 'step'. What "
            "the device adds up leaves once per window, between two steps: leave `send_mail` out."
        )
    return "window"


def check_transfer_dtype(dtype: Any) -> np.dtype | None:
    """What mail is cast to; None for what suits each leaf."""
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
    """Refuses values that are known now and could only make NaN; traced ones pass."""
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


def resolve_specs(
    params: Any,
    *,
    topk_ratio: float,
    channel_axis: int | Callable[[tuple[Any, ...], Any], int],
    resident: Callable[[tuple[Any, ...], Any], bool] | None,
    partition_replicated: bool | Callable[[tuple[Any, ...], Any], bool],
    param_shardings: Any,
    mask: Any,
    transfer_dtype: np.dtype | None,
) -> tuple[LeafSpec, ...]:
    """One `LeafSpec` for each leaf of `params`, in order."""
    paths = jax.tree_util.tree_leaves_with_path(params)
    if not paths:
        return ()
    return tuple(
        resolve(
            path,
            leaf,
            topk_ratio=topk_ratio,
            channel_axis=channel_axis,
            resident=resident,
            partition_replicated=partition_replicated,
            sharding=sharding,
            decay=decay,
            transfer_dtype=transfer_dtype,
        )
        for (path, leaf), decay, sharding in zip(
            paths, _decayed(params, mask), _shardings(params, param_shardings), strict=True
        )
    )


def warn_if_all_resident(specs: Sequence[LeafSpec]) -> None:
    """Says that memory is not saved. A warning, as the result is right."""
    if not any(math.prod(spec.shape) for spec in specs) or not all(s.resident for s in specs):
        return
    first = specs[0]
    _logger.warning(
        "zenflow saves no memory: expected some leaf with two axes, with channels left over by "
        "`topk_ratio` and not kept by `resident`, got %d that stay on the device, the first %s of "
        "shape %s. `optax.flatten` around zenflow makes one vector of all leaves: leave it out. "
        "If these leaves are all there is, `optax.adamw` is simpler.",
        len(specs),
        first.name or "a bare array",
        first.shape,
    )


def check_outside_of_shard_map(what: str) -> None:
    """Refuses calls where each device has a program of its own, in which it would judge alone."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes:
        raise ValueError(
            f"expected `{what}` outside of `jax.shard_map` and `jax.pmap`, got it inside one over "
            f"{', '.join(map(repr, axes))}, where each device would clip, skip and select by what "
            "it has alone. Compute the gradients inside, return them, and call "
            f"`{what}` on what comes out: zenflow works on each device's part by itself."
        )


def check_update(updates: Any, params: Any, state: Any, offload: bool) -> list[Any]:
    """The parameters' leaves, if they and the gradients are those of the state."""
    if not isinstance(state, ZenFlowState) or state.offload != offload:
        got = (
            f"one with offload={state.offload}"
            if isinstance(state, ZenFlowState)
            else f"a {type(state).__name__}"
        )
        raise ValueError(
            f"expected a ZenFlowState of this `zenflow(..., offload={offload})`, got {got}. Pass "
            "what `tx.init(params)` of the same transformation returned."
        )
    if params is None:
        raise ValueError(
            "`update` needs the parameters, got None: weight decay and the float32 masters are "
            "about them. Call `tx.update(gradients, opt_state, params)`."
        )
    weights = jax.tree.leaves(params)
    specs = [leaf.spec for leaf in state.leaves]
    gradients = jax.tree.leaves(updates)
    for what, tree, leaves in (("gradients", updates, gradients), ("params", params, weights)):
        if len(leaves) != len(specs):
            raise ValueError(
                f"`{what}` must have the {len(specs)} leaves that `init` saw, got {len(leaves)}. "
                "Make the state anew with `tx.init(params)` for this tree."
            )
        for (path, _), spec in zip(jax.tree.leaves_with_path(tree), specs, strict=True):
            if plain_name(path) != spec.name:
                raise ValueError(
                    f"`{what}` must have {spec.name} where `init` saw it, got {plain_name(path)} "
                    "in its place. Make the state anew with `tx.init(params)` for this tree."
                )
        for x, spec in zip(leaves, specs, strict=True):
            if tuple(x.shape) != spec.shape:
                raise ValueError(
                    f"`{what}` must have shape {spec.shape} at {spec.name}, as `init` saw it, got "
                    f"{tuple(x.shape)}. Make the state anew with `tx.init(params)` for this tree."
                )
    for x, spec in zip(weights, specs, strict=True):
        if np.dtype(x.dtype) != spec.dtype:
            raise ValueError(
                f"`params` must be {spec.dtype.name} at {spec.name}, as `init` saw it, got "
                f"{x.dtype}. Make the state anew with `tx.init(params)` after a cast."
            )
    for x, spec in zip(gradients, specs, strict=True):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"`gradients` must be real floating point, got {x.dtype} at {spec.name}. Use "
                "`jax.grad` of a real loss with respect to floating-point parameters."
            )
    return weights


def check_placement(weights: Sequence[Any], specs: Sequence[LeafSpec]) -> None:
    """Refuses leaves that are not where the state takes them to be: on one device, or a mesh."""
    for weight, spec in zip(weights, specs, strict=True):
        if not isinstance(weight, jax.Array) or isinstance(weight, Tracer):
            raise TypeError(
                f"expected `params` of jax arrays, got {type(weight).__name__} at {spec.name}. Put "
                "them on a device with `jax.device_put`, outside of jit."
            )
        if 0 in spec.shape:
            continue  # it has no place to be at
        now, then = placement_of(weight), spec.placement
        if now is None and not isinstance(weight.sharding, jax.sharding.SingleDeviceSharding):
            raise ValueError(
                f"expected each leaf on one device or placed by a NamedSharding, got {spec.name} "
                f"on {weight.sharding}. Place the parameters with `jax.device_put(params, "
                "shardings)` before `tx.init`."
            )
        if then is None and now is not None and now.mesh.size > 1:
            raise ValueError(
                f"expected {spec.name} on one device, as the state takes it to be, got "
                f"{weight.sharding}. Call `tx.init` outside of jit, with parameters that are where "
                "they stay, or tell it of them with `param_shardings`."
            )
        if (
            then is not None
            and (then.mesh.size > 1 or now is not None)
            and (
                now is None
                or now.mesh.shape_tuple != then.mesh.shape_tuple
                or now.cuts != then.cuts
            )
        ):
            raise ValueError(
                f"expected {spec.name} divided by the mesh axes {then.block} of "
                f"{dict(then.mesh.shape)}, as `tx.init` took it to be, got {weight.sharding}. Keep "
                "the parameters where they are, as by `jax.jit(step, out_shardings=...)`, or make "
                "the state anew with `tx.init`."
            )
    devices = {frozenset(weight.sharding.device_set) for weight in weights}
    if len(devices) > 1:
        names = sorted(sorted(map(str, group)) for group in devices)
        raise ValueError(
            f"expected all leaves on the same devices, got {names[0]} and {names[1]}. Put them on "
            "one mesh: `jax.device_put(params, NamedSharding(mesh, PartitionSpec()))` replicates."
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


def _shardings(params: Any, given: Any) -> list[Any]:
    """For each leaf what the user said of its sharding, None where nothing was said."""
    count = len(jax.tree.leaves(params))
    if given is None:
        return [None] * count
    tree = given(params) if callable(given) else given
    shardings = jax.tree.leaves(tree)
    wrong = [x for x in shardings if not isinstance(x, jax.sharding.NamedSharding)]
    if wrong or len(shardings) != count:
        raise TypeError(
            "`param_shardings` must be a tree of one NamedSharding for each leaf of the "
            f"parameters, got {f'a {type(wrong[0]).__name__}' if wrong else len(shardings)} for "
            f"{count} leaves. Pass `jax.tree.map(lambda p: p.sharding, params)` (under "
            "`optax.masked` a function of the parameters that are left), or leave it out and call "
            "`init` outside of jit."
        )
    return shardings


def _decayed(params: Any, mask: Any) -> list[bool]:
    """For each leaf whether weight decay applies; `mask` may be a prefix of the tree."""
    if mask is None:
        return [True] * len(jax.tree.leaves(params))
    tree = mask(params) if callable(mask) else mask
    try:
        spread = jax.tree.map(
            lambda flag, part: [bool(flag)] * len(jax.tree.leaves(part)), tree, params
        )
    except ValueError as error:
        raise ValueError(
            "`mask` must be a tree of bools like the parameters or a prefix of it, got "
            f"{jax.tree.structure(tree)} for {jax.tree.structure(params)}. Return it from a "
            "function of the parameters to keep the two in step."
        ) from error
    return jax.tree.leaves(spread)
