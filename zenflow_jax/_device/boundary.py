"""Device programs that the engine runs between steps: merge, compare, choose, enter, measure.

Each is one program for all leaves, so a boundary costs a few dispatches however many leaves there
are. On a mesh, a part's update moves to every device that holds its block; nothing else moves.
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
from zenflow_jax._device.samples import differ, sample_row, split_samples
from zenflow_jax._device.shards import (
    REPLICATED,
    Here,
    Layout,
    abstract_rows,
    join,
    on_each_device,
    row,
    split,
)
from zenflow_jax._device.state import LeafState, cut, cut_state, put, put_state
from zenflow_jax._device.statistics import kept_share
from zenflow_jax._device.step import strays
from zenflow_jax._plan.leaf import LeafSpec

Arrays = Sequence[Array]
Specs = tuple[LeafSpec, ...]


class Merged(NamedTuple):
    """The result of a merge."""

    weights: Arrays
    samples: Array  # of the weights, for the next merge to compare with
    changed: Array  # int32 (leaves,): how many samples of each leaf had changed


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
    """What tells which weights of a group may have changed since their last merge.

    Attributes:
        before: Channels that were selected during the window, as `channel_rows` gives them.
        now: Channels that are selected since the window closed.
        samples: Samples of the parameters, from their last merge.
        reach: As the state has it.
    """

    before: Any
    now: Any
    samples: Any
    reach: Any  # Reach or None

    def of_leaves(self, specs: Specs) -> "list[SinceMerge]":
        """The same of each leaf, or range of a leaf."""
        widths = channel_widths(specs)
        rows = split(self.before, widths), split(self.now, widths)
        rows = *rows, split_samples(self.samples, specs)
        return [SinceMerge(*row, self.reach) for row in zip(*rows, strict=True)]

    def layout(self, lay: Layout) -> "SinceMerge":
        """The partition specs of what `of_leaves` gives."""
        each = lay.each_device
        return SinceMerge(each, each, each, None if self.reach is None else REPLICATED)


def _merge(
    weights: Arrays,
    used_up: Arrays,
    others: Arrays,
    since: SinceMerge,
    *,
    specs: Specs,
    window: int,
) -> Merged:
    """The parameters, with a window's update on the channels that it covers.

    Args:
        weights: Parameters, of whole leaves.
        used_up: Casts of the masters, in parts, as `uploads_in_two` gives them.
        others: The same.
        since: What `compare` compares by.
        specs: The leaves, or ranges of leaves.
        window: The most steps of a window.
    """

    def one(
        here: Here, weight: Array, upload: Array, since: SinceMerge
    ) -> tuple[Array, Array, Array]:
        selected = _selected(here, since)
        new = jnp.where(selected, weight, here.gather(upload))
        return new, sample_row(new), _changed(here, weight, selected, since, window)

    two = {True: iter(used_up), False: iter(others)}
    new, seen, changed = [], [], []
    for spec, weight, its in zip(specs, weights, since.of_leaves(specs), strict=True):
        lay = Layout(spec)
        made = on_each_device(
            one,
            spec,
            [lay.block, lay.part, its.layout(lay)],
            (lay.block, lay.each_device, REPLICATED),
        )(cut(weight, spec), next(two[_becomes_weight(spec)]), its)
        new.append(put(weight, made[0], spec))
        seen.append(made[1])
        changed.append(made[2])
    return Merged(tuple(new), join(seen), jnp.stack(changed))


_STATIC = ("specs", "window")
# A merge uses up uploads, never the caller's parameters: those may be in use elsewhere. An upload
# becomes the new parameter where it is as large as that.
merge = jax.jit(_merge, static_argnames=_STATIC, donate_argnames="used_up")
merge_and_keep = jax.jit(_merge, static_argnames=_STATIC)


@partial(jax.jit, static_argnames="specs")
def channel_rows(channels: Arrays, *, specs: Specs) -> Array:
    """The numbers on each device of the selected channels of some leaves, or ranges of leaves."""
    return _channel_rows(channels, specs)


def _channel_rows(channels: Arrays, specs: Specs) -> Array:
    return join(
        [
            on_each_device(
                lambda here, x: row(here.to_local(x)), spec, [lay.channels], lay.each_device
            )(x)
            for x, spec, lay in zip(channels, specs, map(Layout, specs), strict=True)
        ]
    )


def abstract_channel_rows(
    weights: Sequence[Any], specs: Sequence[LeafSpec]
) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of `channel_rows` for the leaves of some parameters."""
    return abstract_rows(weights, specs, channel_widths(specs), jnp.int32)


def channel_widths(specs: Sequence[LeafSpec]) -> list[int]:
    """How many numbers `channel_rows` has of each leaf."""
    blocks = [Here(spec).block for spec in specs]
    return [math.prod(block.stack) * block.k for block in blocks]


def _selected(here: Here, since: SinceMerge) -> Array:
    """Bool, broadcast against a block: where a channel was selected then, or is now."""
    block = here.block
    then, now = (
        contains(x.reshape(*block.stack, block.k), block.n) for x in (since.before, since.now)
    )
    return broadcast_channels(then | now, block)


def _changed(here: Here, weight: Array, selected: Array, since: SinceMerge, window: int) -> Array:
    """How many samples of deferred channels are not where a step may have left them.

    Without provisional steps they are as they were last merged.
    """
    moved = sample_row(jnp.broadcast_to(selected, weight.shape)).astype(bool)
    now = sample_row(weight)
    changed = differ(now, since.samples, weight.dtype) & ~moved
    if since.reach is not None:
        changed &= strays(now, since.samples, since.reach, weight.dtype, window)
    return here.sum_everywhere(jnp.sum(changed, dtype=jnp.int32))


@partial(jax.jit, static_argnames=_STATIC)
def compare(
    weights: Arrays, since: SinceMerge, *, specs: Specs, window: int
) -> tuple[Array, Array]:
    """What `merge` says of samples, where a window has made no update: new ones, and changes."""

    def one(here: Here, weight: Array, since: SinceMerge) -> tuple[Array, Array]:
        return sample_row(weight), _changed(here, weight, _selected(here, since), since, window)

    made = []
    for spec, weight, its in zip(specs, weights, since.of_leaves(specs), strict=True):
        lay = Layout(spec)
        of_leaf = on_each_device(
            one, spec, [lay.block, its.layout(lay)], (lay.each_device, REPLICATED)
        )
        made.append(of_leaf(cut(weight, spec), its))
    seen, changed = zip(*made, strict=True)
    return join(seen), jnp.stack(changed)


@partial(jax.jit, static_argnames="specs")
def choose(
    weights: Arrays,
    scores: Arrays,
    channels: Arrays,
    masters: Sequence[Array | None],
    *,
    specs: Specs,
) -> tuple[Arrays, Array, Arrays, Arrays]:
    """The channels to select from now on, also as rows; masters of those until now; zero scores.

    Of ranges of leaves, if `specs` are those; the parameters alone are whole leaves then.
    """

    def one(
        here: Here, weight: Array, scores: Array, channels: Array, master: Array | None
    ) -> tuple[Array, Array, Array]:
        chosen = here.to_global(top_channels(scores, here.part.k))
        if master is None:
            master = here.own(take(weight, here.to_local(channels), here.block))
        return chosen, master, jnp.zeros_like(scores)

    made = [
        on_each_device(
            one,
            spec,
            [lay.block, lay.channels, lay.channels, None if master is None else lay.part],
            (lay.channels, lay.part, lay.channels),
        )(cut(weight, spec), score, index, master)
        for spec, lay, weight, score, index, master in zip(
            specs, map(Layout, specs), weights, scores, channels, masters, strict=True
        )
    ]
    chosen, current, zeros = zip(*made, strict=True) if made else ((), (), ())
    return chosen, _channel_rows(chosen, specs), current, zeros


@partial(jax.jit, static_argnames="specs")
def enter(weights: Arrays, masters: Arrays, channels: Arrays, *, specs: Specs) -> Arrays:
    """The parameters, with the masters' casts on the selected channels.

    Of ranges of leaves, if `specs` are those; the parameters alone are whole leaves then.
    """

    def one(here: Here, weight: Array, master: Array, channels: Array) -> Array:
        place = positions(here.to_local(channels), here.block.n)
        new = gather_to_channels(here.gather(master.astype(here.block.dtype)), place, here.block)
        return jnp.where(broadcast_channels(place >= 0, here.block), new, weight)

    return tuple(
        put(
            weight,
            on_each_device(one, spec, [lay.block, lay.part, lay.channels], lay.block)(
                cut(weight, spec), *args
            ),
            spec,
        )
        for spec, lay, weight, *args in zip(
            specs, map(Layout, specs), weights, masters, channels, strict=True
        )
    )


@partial(jax.jit, static_argnames="specs")
def measure(scores: Arrays, channels: Arrays, *, specs: Specs) -> Array:
    """The share of the best channels' score that the selected ones hold; on every device."""
    scores = [cut(x, spec) for x, spec in zip(scores, specs, strict=True)]
    channels = [cut(x, spec) for x, spec in zip(channels, specs, strict=True)]
    return kept_share(scores, channels, specs)


@partial(jax.jit, static_argnames="specs")
def cut_states(leaves: Sequence[LeafState], *, specs: Specs) -> list[LeafState]:
    """The states of ranges of some leaves."""
    return [cut_state(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)]


@jax.jit
def put_states(leaves: Sequence[LeafState], parts: Sequence[LeafState]) -> list[LeafState]:
    """The states of leaves, with those of ranges in their places."""
    return [put_state(leaf, part) for leaf, part in zip(leaves, parts, strict=True)]
