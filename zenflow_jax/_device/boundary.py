"""Device programs that the engine runs between steps: merge, compare, choose, enter, measure.

Each is one program for all leaves, so a boundary costs a few dispatches however many leaves there
are. On a mesh, a part's update moves to every device that holds its block; nothing else moves.
"""

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
from zenflow_jax._device.ranges import cut, cut_state, put, put_state
from zenflow_jax._device.samples import differ, join_samples, sample_row, split_samples
from zenflow_jax._device.shards import REPLICATED, Here, Layout, on_each_device
from zenflow_jax._device.state import LeafState
from zenflow_jax._device.statistics import kept_share
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


def _merge(
    weights: Arrays,
    used_up: Arrays,
    others: Arrays,
    before: Arrays,
    now: Arrays,
    samples: Array,
    *,
    specs: Specs,
) -> Merged:
    """The parameters, with a window's update on the channels that it covers.

    Args:
        weights: Parameters.
        used_up: Casts of the masters, in parts, as `uploads_in_two` gives them.
        others: The same.
        before: Channels that were selected during the window.
        now: Channels that are selected since the window closed.
        samples: Samples of the parameters, from their last merge.
        specs: The leaves, or ranges of leaves; the other arrays are whole leaves'.
    """

    def one(
        here: Here, weight: Array, upload: Array, before: Array, now: Array, sample: Array
    ) -> tuple[Array, Array, Array]:
        selected = _selected(here, before, now)
        new = jnp.where(selected, weight, here.gather(upload))
        return new, sample_row(new), _changed(here, weight, selected, sample)

    two = {True: iter(used_up), False: iter(others)}
    new, seen, changed = [], [], []
    columns = (specs, weights, before, now, split_samples(samples, specs))
    for spec, weight, *rest, sample in zip(*columns, strict=True):
        lay = Layout(spec)
        made = on_each_device(
            one,
            spec,
            [lay.block, lay.part, lay.channels, lay.channels, lay.each_device],
            (lay.block, lay.each_device, REPLICATED),
        )(
            cut(weight, spec),
            next(two[_becomes_weight(spec)]),
            *(cut(x, spec) for x in rest),
            sample,
        )
        new.append(put(weight, made[0], spec))
        seen.append(made[1])
        changed.append(made[2])
    return Merged(tuple(new), join_samples(seen), jnp.stack(changed))


# A merge uses up uploads, never the caller's parameters: those may be in use elsewhere. An upload
# becomes the new parameter where it is as large as that.
merge = jax.jit(_merge, static_argnames="specs", donate_argnames="used_up")
merge_and_keep = jax.jit(_merge, static_argnames="specs")


def _selected(here: Here, before: Array, now: Array) -> Array:
    """Bool, broadcast against a block: where a channel was selected then, or is now."""
    n = here.block.n
    either = contains(here.to_local(before), n) | contains(here.to_local(now), n)
    return broadcast_channels(either, here.block)


def _changed(here: Here, weight: Array, selected: Array, sample: Array) -> Array:
    """How many samples differ of channels that no step has moved since their last merge."""
    moved = sample_row(jnp.broadcast_to(selected, weight.shape)).astype(bool)
    changed = jnp.sum(differ(sample_row(weight), sample, weight.dtype) & ~moved, dtype=jnp.int32)
    return here.sum_everywhere(changed)


@partial(jax.jit, static_argnames="specs")
def compare(
    weights: Arrays, before: Arrays, now: Arrays, samples: Array, *, specs: Specs
) -> tuple[Array, Array]:
    """What `merge` says of samples, where a window has made no update: new ones, and changes."""

    def one(
        here: Here, weight: Array, before: Array, now: Array, sample: Array
    ) -> tuple[Array, Array]:
        selected = _selected(here, before, now)
        return sample_row(weight), _changed(here, weight, selected, sample)

    made = [
        on_each_device(
            one,
            spec,
            [lay.block, lay.channels, lay.channels, lay.each_device],
            (lay.each_device, REPLICATED),
        )(*(cut(x, spec) for x in whole), sample)
        for spec, lay, sample, *whole in zip(
            specs,
            map(Layout, specs),
            split_samples(samples, specs),
            weights,
            before,
            now,
            strict=True,
        )
    ]
    seen, changed = zip(*made, strict=True)
    return join_samples(seen), jnp.stack(changed)


@partial(jax.jit, static_argnames="specs")
def choose(
    weights: Arrays,
    scores: Arrays,
    channels: Arrays,
    masters: Sequence[Array | None],
    *,
    specs: Specs,
) -> tuple[Arrays, Arrays, Arrays]:
    """The channels to select from now on, the masters of those selected so far, and zero scores.

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
    return chosen, current, zeros


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
