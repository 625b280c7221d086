"""Statistics for adaptive windows and selections, from numbers that a step computes anyway.

The sums of squares per channel show how much of the gradient is deferred and how much is selected;
the scores show how much of the highest possible total score the selected channels have.
"""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from zenflow_jax._device.channels import contains
from zenflow_jax._device.shards import CHANNELS, REPLICATED, Shard, on_each_device
from zenflow_jax._device.state import Leaves, cut
from zenflow_jax._device.step import Verdict
from zenflow_jax._spec.leaf import LeafSpec


def window_statistics(squares: Sequence[jax.Array], leaves: Leaves, verdict: Verdict) -> jax.Array:
    """Returns a step's statistics for `ScheduleState`: float32 [counted, *deferred, *selected].

    All are zero if the step is skipped. `squares` are sums per channel, before clipping.
    """
    columns = [jnp.zeros((2, 0), jnp.float32)]
    for s, leaf in zip(squares, leaves, strict=True):
        spec = leaf.spec
        if spec.resident:
            continue
        sums = on_each_device(_sums, spec, [CHANNELS, CHANNELS], REPLICATED, s, leaf.channels)
        each = math.prod(spec.shape) // spec.n
        counts = jnp.array([each * (spec.n - spec.k), each * spec.k], jnp.float32)
        # Root mean squares of the leaf's clipped gradient: deferred, selected.
        columns.append(jnp.sqrt(sums * jnp.square(verdict.factor) / counts)[:, None])
    row = jnp.concatenate([jnp.ones(1, jnp.float32), jnp.concatenate(columns, axis=1).ravel()])
    return jnp.where(verdict.finite, row, jnp.zeros_like(row))


def _sums(shard: Shard, squares: jax.Array, channels: jax.Array) -> jax.Array:
    selected = contains(shard.to_local(channels), shard.part.n)
    zeros = jnp.zeros_like(squares)
    sides = [jnp.where(selected, zeros, squares), jnp.where(selected, squares, zeros)]
    return shard.sum_channels(jnp.stack([jnp.sum(x) for x in sides]))


@partial(jax.jit, static_argnames="specs")
def kept_share(
    scores: Sequence[jax.Array], channels: Sequence[jax.Array], *, specs: tuple[LeafSpec, ...]
) -> jax.Array:
    """Returns the ratio of the selected channels' total score to that of the best k channels.

    It is averaged over leaves or ranges, weighted by size: float32 () in [0, 1]; 1 while all scores
    are zero. Arrays are of whole leaves.
    """
    sizes = [math.prod(spec.shape) for spec in specs]
    takes, gives = [CHANNELS, CHANNELS], (REPLICATED, REPLICATED)
    total = jnp.zeros((), jnp.float32)
    for spec, size, *args in zip(specs, sizes, scores, channels, strict=True):
        args = [cut(x, spec) for x in args]
        selected, best = on_each_device(_selected_and_best, spec, takes, gives, *args)
        total += jnp.where(best > 0, selected / best, 1.0) * (size / sum(sizes))
    return total if specs else jnp.ones((), jnp.float32)


def _selected_and_best(
    shard: Shard, scores: jax.Array, channels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    k = shard.part.k
    selected = jnp.take_along_axis(scores, shard.to_local(channels), axis=-1)
    # Both are sorted in descending order, so that equal scores have equal sums.
    selected, best = (jax.lax.top_k(x, k)[0] for x in (selected, scores))
    return shard.sum_channels(jnp.sum(selected)), shard.sum_channels(jnp.sum(best))
