"""DeepSpeed's learning rate schedules as optax schedules, number by number.

DeepSpeed calls its scheduler after a step, and its scheduler counts from -1. So step `count` (from
0, as optax counts) runs with the rate that DeepSpeed computes for iteration `count - 1`, and the
first two steps both run with the lowest one. Between two roundings of float32 the numbers are those
of `deepspeed.runtime.lr_schedules` 0.19.8.

Letters: `i` DeepSpeed's iteration, an int32 from -1.
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

Shape = Literal["log", "linear"]


def warmup_lr(*, lowest: float, highest: float, warmup: int, shape: Shape) -> optax.Schedule:
    """`WarmupLR`: from `lowest` to `highest` in `warmup` steps, then constant."""
    warmup = _at_least_two(warmup)

    def schedule(count: Any) -> jax.Array:
        i = _iteration(count)
        part = jnp.where(i < warmup, _risen(i, warmup, shape), 1.0)
        return lowest + (highest - lowest) * part

    return schedule


def warmup_decay_lr(
    *, lowest: float, highest: float, warmup: int, shape: Shape, total: int
) -> optax.Schedule:
    """`WarmupDecayLR`: like `warmup_lr`, then down a straight line, to `lowest` at `total`."""
    warmup = _at_least_two(warmup)

    def schedule(count: Any) -> jax.Array:
        i = _iteration(count)
        left = (total - i).astype(jnp.float32) / max(1, total - warmup)
        part = jnp.where(i < warmup, _risen(i, warmup, shape), jnp.maximum(left, 0.0))
        return lowest + (highest - lowest) * part

    return schedule


def warmup_cosine_lr(
    *, highest: float, lowest_share: float, last_share: float, warmup: int, shape: Shape, total: int
) -> optax.Schedule:
    """`WarmupCosineLR`: from a share of `highest` up to it, then down a cosine to another share.

    The first step has a rate of 0 whatever `lowest_share` is, as in DeepSpeed.
    """
    warmup = _at_least_two(warmup)

    def schedule(count: Any) -> jax.Array:
        i = _iteration(count)
        rise = lowest_share + (1 - lowest_share) * _risen(i, warmup, shape)
        progress = (i - warmup + 1).astype(jnp.float32) / max(1, total - warmup)
        cosine = (1 + jnp.cos(math.pi * jnp.minimum(progress, 1.0))) / 2
        fall = jnp.maximum(last_share + (1 - last_share) * cosine, 0.0)
        part = jnp.where(i < warmup, rise, fall)
        return highest * jnp.where(i < 0, 0.0, part)

    return schedule


def _iteration(count: Any) -> jax.Array:
    return jnp.asarray(count, jnp.int32) - 1


def _at_least_two(warmup: int) -> int:
    return max(2, warmup)  # as DeepSpeed does, which divides by its logarithm


def _risen(i: jax.Array, warmup: int, shape: Shape) -> jax.Array:
    """How much of the warm-up is done, in [0, 1] while it lasts."""
    steps = jnp.maximum(i, 0).astype(jnp.float32)
    return jnp.log(steps + 1) / math.log(warmup) if shape == "log" else steps / warmup
