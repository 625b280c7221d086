"""Makes optimizers from the settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

import zenflow_jax
from train.cli.settings import OptimizerSettings, SettingsError, steps_of


def learning_rate(settings: OptimizerSettings) -> optax.Schedule:
    """Returns a linear warm-up, then a cosine decay to a tenth, a linear one to zero, or none."""
    peak, share = settings.learning_rate, settings.warmup_share
    warm_up = settings.warmup_steps if share is None else steps_of(share, settings.steps)
    rest = max(settings.steps - warm_up, 1)
    after = {
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=0.1),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "constant": optax.constant_schedule(peak),
    }
    start = optax.linear_schedule(peak / (warm_up + 1), peak, max(warm_up, 1))
    return optax.join_schedules([start, after[settings.schedule]], [warm_up])


def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
    """Creates the optimizer from settings whose `steps` are known."""
    norm = settings.max_grad_norm
    if not settings.has_engine:
        # A chain in both cases, so that a resumed run may change `max_grad_norm`.
        clip = optax.identity() if norm is None else optax.clip_by_global_norm(norm)
        return skip_if_not_finite(optax.chain(clip, leafwise_optimizer(settings)))
    arguments = settings.subset(("b1", "eps", "weight_decay")) | {"b2": _b2(settings)}
    arguments |= {"mask": decayed, "max_grad_norm": norm, "resident": _is_bias_or_scale}
    try:
        arguments |= _arguments(settings)
        return zenflow_jax.zenflow(learning_rate(settings), **arguments)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def leafwise_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
    """Creates an optimizer that needs no engine, without clipping; it may update one leaf alone."""
    b1, b2, eps = settings.b1, _b2(settings), settings.eps
    make: dict[str, Callable[[], optax.GradientTransformation]] = {
        "adamw": lambda: optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        "lion": lambda: optax.scale_by_lion(b1=b1, b2=b2),
        "muon": lambda: optax.chain(
            optax.contrib.muon(
                1.0,
                eps=eps,
                adam_b1=b1,
                adam_b2=b2,
                muon_weight_dimension_numbers=_orthogonalized,
                consistent_rms=0.2,  # updates of AdamW's size, so its learning rates fit
            ),
            optax.scale(-1.0),
        ),
        "adafactor": lambda: optax.chain(
            optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)
        ),
        "sgd": optax.identity,
        "sign": optax.scale_by_sign,
    }
    tx = optax.chain(
        make[settings.optimizer](),
        optax.add_decayed_weights(settings.weight_decay, decayed),
        optax.scale_by_learning_rate(learning_rate(settings)),
    )
    return zenflow_jax.compact(tx) if settings.host_state == "compact" else tx


def _b2(settings: OptimizerSettings) -> float:
    default = 0.99 if settings.optimizer == "lion" else 0.999
    return default if settings.b2 is None else settings.b2


class SkipState(NamedTuple):
    skipped: jax.Array  # int32: number of skipped steps
    inner: Any


def skip_if_not_finite(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Skips steps of `inner` whose gradient norm is not finite, as zenflow itself does.

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
    """Returns the number of skipped steps (int32) from the state of a `make_optimizer` result."""
    if isinstance(opt_state, SkipState):
        return opt_state.skipped
    return zenflow_jax.find_state(opt_state).skipped


# Arguments of zenflow that are settings with the same names.
_SHARED = {f.name for f in dataclasses.fields(OptimizerSettings)} & set(zenflow_jax.STATIC_ARGS)


def _arguments(settings: OptimizerSettings) -> dict[str, Any]:
    if settings.optimizer == "offload":
        sending = settings.subset(("send_gradients",))
        return sending | {"topk_ratio": 0.0, "update_interval": 1, "staleness": 0}
    arguments = settings.subset(_SHARED) | {"full_warm_up_rounds": settings.warm_up_rounds}
    if settings.update_interval == "auto":
        arguments |= {"update_interval": zenflow_jax.AutoWindow(), "window_scaling": None}
    if settings.select_interval == "auto":
        arguments["select_interval"] = zenflow_jax.AutoSelect()
    return arguments


def decayed(params):
    """Selects the matrices for weight decay, but not biases or norm scales."""
    return jax.tree_util.tree_map_with_path(lambda path, x: not _is_bias_or_scale(path, x), params)


def _orthogonalized(params):
    """Selects the blocks' matrices for Muon; Adam updates all else, as Muon's authors advise."""
    axes = optax.contrib.MuonDimensionNumbers(-2, -1)  # others are layers

    def of_leaf(path: tuple[Any, ...], _: Any) -> Any:
        names = [jax.tree_util.keystr((key,), simple=True) for key in path]
        is_matrix = names[-1:] == ["kernel"]  # a layer's path may be empty
        is_after_blocks = names[:1] in (["head"], ["pooler"], ["classifier"])
        return axes if is_matrix and not is_after_blocks else None

    return jax.tree_util.tree_map_with_path(of_leaf, params)


def _is_bias_or_scale(path: tuple[Any, ...], _: Any) -> bool:
    # Selects by name, because a bias of stacked blocks also has two axes.
    return jax.tree_util.keystr(path[-1:], simple=True) in ("bias", "scale")
