"""Makes optimizers from the settings, or from a DeepSpeed config named in the settings."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

import zenflow_jax
from train.cli.settings import OptimizerSettings, SettingsError
from zenflow_jax.deepspeed import DeepSpeedOptions, from_deepspeed

# Settings that include optimizer settings.
S = TypeVar("S", bound=OptimizerSettings)


def weight_dtype(optimizer: str, dtype: str) -> DTypeLike:
    """Returns the dtype of matrices on the device: float32 with adamw, which has no masters."""
    return jnp.float32 if optimizer == "adamw" else jnp.dtype(dtype)


def learning_rate(peak: float, warm_up: int, steps: int, schedule: str) -> optax.Schedule:
    """Warms up linearly, then decays in a cosine to a tenth, linearly to zero, or not at all."""
    rest = max(steps - warm_up, 1)
    after = {
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=0.1),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "constant": optax.constant_schedule(peak),
    }
    start = optax.linear_schedule(peak / (warm_up + 1), peak, max(warm_up, 1))
    return optax.join_schedules([start, after[schedule]], [warm_up])


def schedule_of(
    settings: OptimizerSettings, deepspeed: DeepSpeedOptions | None = None
) -> float | optax.Schedule:
    """Returns the learning rate from the settings, whose `steps` are known."""
    if deepspeed is not None and deepspeed.scheduler is not None:
        return deepspeed.learning_rate
    warm_up = settings.learning_rate_warm_up
    return learning_rate(settings.learning_rate, warm_up, settings.steps, settings.schedule)


def make_optimizer(
    settings: OptimizerSettings,
    deepspeed: DeepSpeedOptions | None = None,
    *,
    steps_per_epoch: int | None = None,
) -> optax.GradientTransformation:
    """Creates the optimizer; `steps` are known, `deepspeed` is from `finalize_settings`."""
    norm, rate = settings.max_grad_norm, schedule_of(settings, deepspeed)
    arguments = settings.subset(("b1", "b2", "eps", "weight_decay")) | {"mask": decayed}
    if settings.optimizer == "adamw":
        # A chain in both cases, so that a resumed run may change `max_grad_norm`.
        clip = optax.identity() if norm is None else optax.clip_by_global_norm(norm)
        return skip_if_not_finite(optax.chain(clip, optax.adamw(rate, **arguments)))
    arguments |= {"max_grad_norm": norm, "resident": _is_no_matrix}
    try:
        arguments |= _arguments(settings, steps_per_epoch)
        if deepspeed is not None and deepspeed.kind == settings.optimizer:
            arguments |= deepspeed.arguments
        return zenflow_jax.zenflow(rate, **arguments)
    except ValueError as error:
        raise SettingsError(str(error)) from error


class SkipState(NamedTuple):
    skipped: jax.Array  # int32: number of skipped steps
    inner: Any


def skip_if_not_finite(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Skips steps of `inner` whose gradient norm is not finite, as zenflow does itself.

    `optax.apply_if_finite` needs a `cond`, which makes a GPU wait and stores the state twice.
    """

    def init(params):
        return SkipState(jnp.int32(0), inner.init(params))

    def update(updates, state, params=None):
        finite = jnp.isfinite(optax.tree.norm(updates))
        new, after = inner.update(updates, state.inner, params)
        skipped = state.skipped + jnp.where(finite, 0, 1).astype(jnp.int32)
        kept = jax.tree.map(lambda x, old: jnp.where(finite, x, old), after, state.inner)
        new = jax.tree.map(lambda x: jnp.where(finite, x, jnp.zeros_like(x)), new)
        return new, SkipState(skipped, kept)

    return optax.GradientTransformation(init, update)


def skipped_steps(opt_state: Any) -> jax.Array:
    """Returns the number of skipped steps, int32, in the state of a `make_optimizer` result."""
    if isinstance(opt_state, SkipState):
        return opt_state.skipped
    return zenflow_jax.find_state(opt_state).skipped


# Arguments of zenflow that are settings with the same names.
_SHARED = {f.name for f in dataclasses.fields(OptimizerSettings)} & set(zenflow_jax.STATIC_ARGS)


def _arguments(settings: OptimizerSettings, steps_per_epoch: int | None) -> dict[str, Any]:
    shared = settings.subset(_SHARED)
    if settings.optimizer == "offload":
        sending = {name: shared[name] for name in ("send_gradients", "transfer_dtype")}
        return sending | {"topk_ratio": 0.0, "update_interval": 1, "staleness": 0}
    scaling, adapts = settings.window_scaling, settings.update_interval == "auto"
    if scaling == "auto":
        scaling = 0.5 if settings.rolling and not adapts else "none"
    arguments = shared | {
        "full_warm_up_rounds": settings.warm_up_rounds,
        "window_scaling": None if scaling == "none" else scaling,
        "provisional_share": settings.provisional_share or None,
    }
    if adapts:
        arguments["update_interval"] = zenflow_jax.AutoWindow()
    if settings.select_interval == "auto":
        arguments["select_interval"] = zenflow_jax.AutoSelect()
    elif settings.select_interval == "epoch":
        arguments["select_interval"] = steps_per_epoch
    return arguments


def with_deepspeed(settings: S, devices: int) -> tuple[S, DeepSpeedOptions | None]:
    """Returns the settings with the values of their DeepSpeed config, and that config."""
    if settings.deepspeed is None:
        return settings, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script lists untranslated keys itself
            names = "learning_rate b1 b2 eps weight_decay max_grad_norm".split()
            values = settings.subset(names)
            options = from_deepspeed(settings.deepspeed, devices=devices, mask=decayed, **values)
    except (ValueError, OSError) as error:
        raise SettingsError(f"`deepspeed`: {error}") from error
    return with_deepspeed_values(options, settings), options


def with_deepspeed_values(options: DeepSpeedOptions, settings: S) -> S:
    """Returns the settings, overridden by the values of a DeepSpeed config."""
    open_or_not = {
        "optimizer": options.kind if options.has_zero else None,
        "batch_size": options.batch_size,
        "micro_batches": options.micro_batches,
        "dtype": options.compute_dtype and np.dtype(options.compute_dtype).name,
        "threads": options.threads,
    }
    values = {name: value for name, value in open_or_not.items() if value is not None}
    values |= {"max_grad_norm": options.max_grad_norm, "learning_rate": options.peak}
    settings = dataclasses.replace(settings, **values)
    arguments = options.fixed_arguments
    values = {name: arguments[name] for name in ("b1", "b2", "eps", "weight_decay")}
    if settings.optimizer == options.kind == "zenflow":
        values |= {name: arguments[name] for name in _SHARED & arguments.keys()}
        # "auto" until an epoch's length is known; it fits all windows.
        values |= {"full_warm_up_share": None, "select_interval": "auto"}
        values["provisional_share"] = values["provisional_share"] or 0.0
        if isinstance(values["update_interval"], zenflow_jax.AutoWindow):
            values |= {"update_interval": "auto", "window_scaling": "none"}
    return dataclasses.replace(settings, **values)


def finalize_settings(
    settings: S, deepspeed: DeepSpeedOptions | None, steps_per_epoch: int
) -> tuple[S, DeepSpeedOptions | None]:
    """Completes the results of `with_deepspeed` when the steps of run and epoch are known."""
    if deepspeed is None:
        return settings, None
    deepspeed = dataclasses.replace(
        deepspeed,
        total_steps=settings.steps,
        steps_per_epoch=steps_per_epoch,
        warmup_steps=settings.learning_rate_warm_up,
    )
    values: dict[str, Any] = {}
    try:
        if (scheduler := deepspeed.scheduler) is not None:
            rate: Any = deepspeed.learning_rate  # a schedule, since there is a scheduler
            highest = np.asarray(rate(jnp.arange(settings.steps))).max()
            values["learning_rate"] = float(str(highest))  # not 0.0010000000474974513
            if scheduler.warmup is not None:
                values |= {"warmup_steps": scheduler.warmup, "warmup_share": None}
        if settings.optimizer == deepspeed.kind == "zenflow":
            select = deepspeed.arguments["select_interval"]
            values["select_interval"] = "epoch" if select == steps_per_epoch else select
    except ValueError as error:
        raise SettingsError(f"`deepspeed`: {error}") from error
    return dataclasses.replace(settings, **values), deepspeed


def describe_deepspeed_changes(
    original: S, settings: S, deepspeed: DeepSpeedOptions | None
) -> list[str]:
    """Returns lines about settings that the DeepSpeed config changes, and about ignored keys."""
    if deepspeed is None:
        return []
    lines = []
    names = [field.name for field in dataclasses.fields(settings) if field.name != "steps"]
    changed = [n for n in names if getattr(original, n) != getattr(settings, n)]
    if changed:
        listed = ", ".join(f"{name} {getattr(settings, name)}" for name in changed)
        lines.append(f"{settings.deepspeed} sets: {listed}")
    if deepspeed.not_translated:
        listed = ", ".join(f"`{name}`" for name in deepspeed.not_translated)
        lines.append(f"{settings.deepspeed}: not followed (docs/deepspeed.md): {listed}")
    return lines


def decayed(params):
    """Selects the matrices for weight decay, not biases and scales of norms."""
    return jax.tree_util.tree_map_with_path(lambda path, x: not _is_no_matrix(path, x), params)


def _is_no_matrix(path: tuple[Any, ...], _: Any) -> bool:
    # Selects by name, because a bias of stacked blocks also has two axes.
    return jax.tree_util.keystr(path[-1:], simple=True) in ("bias", "scale")
