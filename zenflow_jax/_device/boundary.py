"""Device programs that the engine runs between steps: merge, compare, choose, enter, measure.

Each is one program for all leaves, so a boundary costs a few dispatches however many leaves there
are. On a mesh, a part's update moves to every device that holds its block; nothing else moves.
"""

from collections.abc import Callable, Sequence
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
from zenflow_jax._device.samples import differ, sample_of
from zenflow_jax._device.shards import REPLICATED, Here, Layout, on_each_device
from zenflow_jax._device.statistics import kept_share
from zenflow_jax._plan.leaf import LeafSpec

Arrays = Sequence[Array]
Specs = tuple[LeafSpec, ...]
Call = Callable[..., Any]


class Merged(NamedTuple):
    """The result of a merge."""

    weights: list[Array]
    samples: list[Array]  # of the weights, for the next merge to compare with
    changed: list[tuple[list[int], Array]]  # leaves, and how many samples of each had changed


def merge(
    weights: Sequence[Array],
    uploads: Sequence[Array],
    before: Sequence[Array],
    now: Sequence[Array],
    samples: Sequence[Array],
    specs: Sequence[LeafSpec],
    *,
    keep: bool = False,
    call: Call | None = None,
) -> Merged:
    """The parameters, with a window's update on the channels that it covers.

    Args:
        weights: Parameters.
        uploads: Casts of the masters, in parts; used up unless `keep`.
        before: Channels that were selected during the window.
        now: Channels that are selected since the window closed.
        samples: Samples of the parameters, from their last merge.
        specs: The leaves.
        keep: Whether the uploads stay and the result has memory of its own.
        call: Calls a program, as `Ahead.call` does; None: it is called.
    """
    merged = Merged(list(weights), list(samples), [])
    for kind, program, which in merge_programs(specs, keep=keep):
        columns = (tuple(x[i] for i in which) for x in (weights, uploads, before, now, samples))
        some = tuple(specs[i] for i in which)
        if call is None:
            new, seen, changed = program(*columns, specs=some)
        else:
            new, seen, changed = call(kind, program, *columns, specs=some)
        for i, weight, sample in zip(which, new, seen, strict=True):
            merged.weights[i], merged.samples[i] = weight, sample
        merged.changed.append((which, changed))
    return merged


def merge_programs(
    specs: Sequence[LeafSpec], *, keep: bool = False
) -> list[tuple[str, Any, list[int]]]:
    """The programs that merge these leaves: name, program, numbers of its leaves."""
    # Gathering makes a new array, which could not take the place of an upload.
    gathered = [spec.placement is not None and any(spec.placement.shares) for spec in specs]
    in_place = [not (keep or gathers) for gathers in gathered]
    kinds = ((True, "merge in place", _merge_in_place), (False, "merge parts", _merge_parts))
    found = [
        (name, program, [i for i, place in enumerate(in_place) if place == kind])
        for kind, name, program in kinds
    ]
    return [one for one in found if one[2]]


def _merge(
    weights: Arrays, uploads: Arrays, before: Arrays, now: Arrays, samples: Arrays, *, specs: Specs
) -> tuple[Arrays, Arrays, Array]:
    def one(
        here: Here, weight: Array, upload: Array, before: Array, now: Array, sample: Array
    ) -> tuple[Array, Array, Array]:
        selected = _selected(here, before, now)
        new = jnp.where(selected, weight, here.gather(upload))
        return new, sample_of(new), _changed(here, weight, selected, sample)

    made = [
        on_each_device(
            one,
            spec,
            [lay.block, lay.part, lay.channels, lay.channels, lay.each_device],
            (lay.block, lay.each_device, REPLICATED),
        )(*args)
        for spec, lay, *args in zip(
            specs, map(Layout, specs), weights, uploads, before, now, samples, strict=True
        )
    ]
    new, seen, changed = zip(*made, strict=True)
    return new, seen, jnp.stack(changed)


def _selected(here: Here, before: Array, now: Array) -> Array:
    """Bool, broadcast against a block: where a channel was selected then, or is now."""
    n = here.block.n
    either = contains(here.to_local(before), n) | contains(here.to_local(now), n)
    return broadcast_channels(either, here.block)


def _changed(here: Here, weight: Array, selected: Array, sample: Array) -> Array:
    """How many samples differ of channels that no step has moved since their last merge."""
    moved = sample_of(jnp.broadcast_to(selected, weight.shape))
    changed = jnp.sum(differ(sample_of(weight), sample) & ~moved, dtype=jnp.int32)
    return here.sum_everywhere(changed)


@partial(jax.jit, static_argnames="specs")
def compare(
    weights: Arrays, before: Arrays, now: Arrays, samples: Arrays, *, specs: Specs
) -> tuple[Arrays, Array]:
    """What `merge` says of samples, where a window has made no update: new ones, and changes."""

    def one(
        here: Here, weight: Array, before: Array, now: Array, sample: Array
    ) -> tuple[Array, Array]:
        selected = _selected(here, before, now)
        return sample_of(weight), _changed(here, weight, selected, sample)

    made = [
        on_each_device(
            one,
            spec,
            [lay.block, lay.channels, lay.channels, lay.each_device],
            (lay.each_device, REPLICATED),
        )(*args)
        for spec, lay, *args in zip(
            specs, map(Layout, specs), weights, before, now, samples, strict=True
        )
    ]
    seen, changed = zip(*made, strict=True)
    return seen, jnp.stack(changed)


# Merging donates the uploads, never the caller's parameters: those may be in use elsewhere. Either
# way parameters and uploads exist once each, and the result takes the place of one.
_merge_in_place = jax.jit(_merge, static_argnames="specs", donate_argnames="uploads")
_merge_parts = jax.jit(_merge, static_argnames="specs")


@partial(jax.jit, static_argnames="specs")
def choose(
    weights: Arrays,
    scores: Arrays,
    channels: Arrays,
    masters: Sequence[Array | None],
    *,
    specs: Specs,
) -> tuple[Arrays, Arrays, Arrays]:
    """The channels to select from now on, the masters of those selected so far, and zero scores."""

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
        )(weight, score, index, master)
        for spec, lay, weight, score, index, master in zip(
            specs, map(Layout, specs), weights, scores, channels, masters, strict=True
        )
    ]
    chosen, current, zeros = zip(*made, strict=True) if made else ((), (), ())
    return chosen, current, zeros


@partial(jax.jit, static_argnames="specs")
def enter(weights: Arrays, masters: Arrays, channels: Arrays, *, specs: Specs) -> Arrays:
    """The parameters, with the masters' casts on the selected channels."""

    def one(here: Here, weight: Array, master: Array, channels: Array) -> Array:
        place = positions(here.to_local(channels), here.block.n)
        new = gather_to_channels(here.gather(master.astype(here.block.dtype)), place, here.block)
        return jnp.where(broadcast_channels(place >= 0, here.block), new, weight)

    return tuple(
        on_each_device(one, spec, [lay.block, lay.part, lay.channels], lay.block)(*args)
        for spec, lay, *args in zip(
            specs, map(Layout, specs), weights, masters, channels, strict=True
        )
    )


@partial(jax.jit, static_argnames="specs")
def measure(scores: Arrays, channels: Arrays, *, specs: Specs) -> Array:
    """The share of the best channels' score that the selected ones hold; on every device."""
    return kept_share(scores, channels, specs)
