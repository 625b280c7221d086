"""Device programs that the engine runs between steps: merge, compare, choose, enter, measure.

Each is one program for all leaves. Parameters are of whole leaves; where `specs` are those of
ranges, everything else is of ranges.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from zenflow_jax._device.channels import (
    broadcast_channels,
    contains,
    gather_to_channels,
    positions,
    take,
    top_channels,
)
from zenflow_jax._device.samples import differ, sample_row, split_samples, strays
from zenflow_jax._device.shards import (
    REPLICATED,
    Layout,
    Shard,
    each_leaf,
    join,
    row,
    split,
)
from zenflow_jax._device.state import LeafState, cut, cut_state, put, put_state
from zenflow_jax._device.statistics import kept_share
from zenflow_jax._spec.leaf import LeafSpec

Arrays = Sequence[Array]
Weights = Sequence[Array | None]
Specs = tuple[LeafSpec, ...]


class Merged(NamedTuple):
    """The result of a merge."""

    weights: Sequence[Any]  # None for a leaf in host memory
    # None where the device has no weights of the group:
    samples: Any  # of the weights, for the next merge to compare with
    changed: Any  # int32 (leaves,): how many samples of each leaf had changed


def uploads_in_two(
    uploads: Sequence[Any], specs: Sequence[LeafSpec]
) -> tuple[list[Any], list[Any]]:
    """The uploads whose memory a merge gives to its result, and the others."""
    pairs = list(zip(uploads, map(_becomes_weight, specs), strict=True))
    return [x for x, becomes in pairs if becomes], [x for x, becomes in pairs if not becomes]


def _becomes_weight(spec: LeafSpec) -> bool:
    """Whether a leaf's upload is as large as its parameter on each device."""
    gathered = spec.placement is not None and any(spec.placement.shares)
    return spec.start is None and not gathered


class SinceMerge(NamedTuple):
    """What tells which weights of a group may have changed since their last merge."""

    during: Any  # channels that were selected during the window, as `channel_rows` gives them
    after: Any  # channels that are selected since the window closed
    samples: Any  # of the parameters, from their last merge
    reach: Any  # as the state has it, or None

    def of_leaves(self, specs: Specs) -> "list[SinceMerge]":
        """The same of each leaf, or range of a leaf."""
        widths = channel_widths(specs)
        rows = split(self.during, widths), split(self.after, widths)
        rows = *rows, split_samples(self.samples, specs)
        return [SinceMerge(*row, self.reach) for row in zip(*rows, strict=True)]

    @staticmethod
    def layout(lay: Layout) -> "SinceMerge":
        """The partition specs of what `of_leaves` gives."""
        return SinceMerge(lay.each_device, lay.each_device, lay.each_device, REPLICATED)


_STATIC = ("specs", "window")


# A merge uses up uploads, never the caller's parameters: those may be in use elsewhere. An upload
# becomes the new parameter where it is as large as that.
@partial(jax.jit, static_argnames=_STATIC, donate_argnames="used_up")
def merge(
    weights: Weights,
    used_up: Weights,
    others: Weights,
    since: SinceMerge,
    *,
    specs: Specs,
    window: int,
) -> Merged:
    """The parameters, of whole leaves, with a window's update on the channels that it covers.

    `used_up` and `others` are as `uploads_in_two` gives them, `specs` those of leaves or of ranges,
    `window` the most steps of a window. Of a leaf in host memory weights and uploads are None.
    """

    def one(
        shard: Shard, weight: Array | None, upload: Any, since: SinceMerge
    ) -> tuple[Array | None, Array, Array]:
        if weight is None:
            return None, sample_row(None), jnp.zeros((), jnp.int32)
        selected = _selected(shard, since)
        new = jnp.where(selected, weight, shard.gather(upload))
        return new, sample_row(new), _changed(shard, weight, selected, since, window)

    uploads = {True: iter(used_up), False: iter(others)}
    made = each_leaf(
        one,
        specs,
        lambda lay: [lay.block, lay.part, SinceMerge.layout(lay)],
        lambda lay: (lay.block, lay.each_device, REPLICATED),
        map(cut, weights, specs),
        (next(uploads[_becomes_weight(spec)]) for spec in specs),
        since.of_leaves(specs),
    )
    new, seen, changed = zip(*made, strict=True)
    return Merged(tuple(map(put, weights, new, specs)), join(seen), jnp.stack(changed))


@partial(jax.jit, static_argnames="specs")
def channel_rows(channels: Arrays, *, specs: Specs) -> Array:
    """The numbers on each device of the selected channels of leaves, or of ranges of leaves."""
    rows = each_leaf(
        lambda shard, x: row(shard.to_local(x)),
        specs,
        lambda lay: [lay.channels],
        lambda lay: lay.each_device,
        channels,
    )
    return join(list(rows))


def channel_widths(specs: Sequence[LeafSpec]) -> list[int]:
    blocks = [Shard(spec).block for spec in specs]
    return [math.prod(block.stack) * block.k for block in blocks]


def _selected(shard: Shard, since: SinceMerge) -> Array:
    """Bool, broadcast against a block: where a channel was selected during the window or after."""
    block = shard.block
    during, after = (
        contains(x.reshape(*block.stack, block.k), block.n) for x in (since.during, since.after)
    )
    return broadcast_channels(during | after, block)


def _changed(shard: Shard, weight: Array, selected: Array, since: SinceMerge, window: int) -> Array:
    """How many samples of deferred channels are not where a step may have left them."""
    moved = sample_row(jnp.broadcast_to(selected, weight.shape)).astype(bool)
    new = sample_row(weight)
    changed = differ(new, since.samples, weight.dtype) & ~moved
    if since.reach is not None:
        changed &= strays(new, since.samples, since.reach, weight.dtype, window)
    return shard.sum_everywhere(jnp.sum(changed, dtype=jnp.int32))


@partial(jax.jit, static_argnames=_STATIC)
def compare(
    weights: Weights, since: SinceMerge, *, specs: Specs, window: int
) -> tuple[Array, Array]:
    """What `merge` says of samples, where a window has made no update: new ones, and changes."""

    def one(shard: Shard, weight: Array | None, since: SinceMerge) -> tuple[Array, Array]:
        if weight is None:
            return sample_row(None), jnp.zeros((), jnp.int32)
        return sample_row(weight), _changed(shard, weight, _selected(shard, since), since, window)

    made = each_leaf(
        one,
        specs,
        lambda lay: [lay.block, SinceMerge.layout(lay)],
        lambda lay: (lay.each_device, REPLICATED),
        map(cut, weights, specs),
        since.of_leaves(specs),
    )
    seen, changed = zip(*made, strict=True)
    return join(seen), jnp.stack(changed)


@partial(jax.jit, static_argnames="specs")
def choose(
    weights: Weights,
    scores: Arrays,
    channels: Arrays,
    masters: Sequence[Array | None],
    *,
    specs: Specs,
) -> tuple[Arrays, Array, Arrays, Arrays]:
    """The channels to select, also as rows; masters of those selected so far; zero scores."""

    def one(
        shard: Shard, weight: Any, scores: Array, channels: Array, master: Array | None
    ) -> tuple[Array, Array, Array]:
        chosen = shard.to_global(top_channels(scores, shard.part.k))
        if master is None:
            master = shard.own(take(weight, shard.to_local(channels), shard.block))
        return chosen, master, jnp.zeros_like(scores)

    made = each_leaf(
        one,
        specs,
        lambda lay: [lay.block, lay.channels, lay.channels, lay.part],
        lambda lay: (lay.channels, lay.part, lay.channels),
        map(cut, weights, specs),
        scores,
        channels,
        masters,
    )
    chosen, current, zeros = zip(*made, strict=True)
    return chosen, channel_rows(chosen, specs=specs), current, zeros


@partial(jax.jit, static_argnames="specs")
def enter(weights: Arrays, masters: Arrays, channels: Arrays, *, specs: Specs) -> Arrays:
    """The parameters, with the masters' casts on the selected channels."""

    def one(shard: Shard, weight: Array, master: Array, channels: Array) -> Array:
        place = positions(shard.to_local(channels), shard.block.n)
        new = gather_to_channels(shard.gather(master.astype(shard.block.dtype)), place, shard.block)
        return jnp.where(broadcast_channels(place >= 0, shard.block), new, weight)

    new = each_leaf(
        one,
        specs,
        lambda lay: [lay.block, lay.part, lay.channels],
        lambda lay: lay.block,
        map(cut, weights, specs),
        masters,
        channels,
    )
    return tuple(map(put, weights, new, specs))


@partial(jax.jit, static_argnames="specs")
def measure(scores: Arrays, channels: Arrays, *, specs: Specs) -> Array:
    """The share of the best channels' score that the selected ones hold; on every device."""
    return kept_share(list(map(cut, scores, specs)), list(map(cut, channels, specs)), specs)


@partial(jax.jit, static_argnames="specs")
def cut_states(leaves: Sequence[LeafState], *, specs: Specs) -> list[LeafState]:
    return list(map(cut_state, leaves, specs))


@jax.jit
def put_states(leaves: Sequence[LeafState], parts: Sequence[LeafState]) -> list[LeafState]:
    return list(map(put_state, leaves, parts))
