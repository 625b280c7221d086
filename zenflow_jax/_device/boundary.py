"""Device programs that the engine runs between steps: merge, choose and enter.

Each program handles all leaves. Parameters are always whole leaves; if `specs` describe ranges, all
other arrays are also ranges.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from zenflow_jax._device.channels import (
    broadcast_channels,
    contains,
    gather_to_channels,
    positions,
    take,
    top_channels,
)
from zenflow_jax._device.memory import to_device
from zenflow_jax._device.shards import (
    BLOCK,
    CHANNELS,
    EACH_DEVICE,
    HOST_ORDER,
    PART,
    REPLICATED,
    Shard,
    on_each_device,
)
from zenflow_jax._device.state import LeafState, ZenFlowState, cut, cut_state, put, put_state
from zenflow_jax._device.step import provisional_change
from zenflow_jax._spec.leaf import LeafSpec
from zenflow_jax._spec.scalars import StepScalars
from zenflow_jax._spec.schedule import Schedule

Arrays = Sequence[Array]
Specs = tuple[LeafSpec, ...]


def split_uploads(uploads: Arrays, specs: Sequence[LeafSpec]) -> tuple[list[Array], list[Array]]:
    """Returns the uploads that a merge donates to its result, and the uploads that it keeps."""
    pairs = list(zip(uploads, map(_becomes_weight, specs), strict=True))
    return [x for x, becomes in pairs if becomes], [x for x, becomes in pairs if not becomes]


def _becomes_weight(spec: LeafSpec) -> bool:
    """Returns whether a leaf's upload has its parameter's shape on each device."""
    gathered = spec.placement is not None and any(spec.placement.shares)
    return spec.start is None and not gathered and not spec.trailing


class LastMove(NamedTuple):
    """The last step's provisional move: gradients and scalars, as sent, but on the device."""

    mail: Sequence[Any]  # of the leaves in a merge
    step_scalars: StepScalars

    @classmethod
    def of(cls, state: ZenFlowState, leaves: Iterable[int]) -> "LastMove | None":
        """Returns the move of the leaves with these numbers; None if updates do not keep it."""
        if not state.schedule.keeps_last_move:
            return None
        return to_device(cls([state.mail[i] for i in leaves], state.step_scalars))


# A merge consumes uploads, never the caller's parameters, which may still be in use. An upload of
# the same size becomes the new parameter.
@partial(jax.jit, static_argnames=("specs", "schedule"), donate_argnames="donated")
def merge(
    weights: Arrays,
    donated: Arrays,
    kept: Arrays,
    during: Array,
    after: Array,
    moved: LastMove | None,
    *,
    specs: Specs,
    schedule: Schedule,
) -> list[Array]:
    """Returns the parameters with a window's update on deferred channels.

    `donated` and `kept` come from `split_uploads`; `specs` are for leaves or ranges. `during` and
    `after` are rows of the channels selected during the window and since then; the update contains
    neither. The result also contains the move `moved`.
    """
    mail: Sequence[Any] = [None] * len(specs)
    lengths = mail
    if moved is not None:
        mail, sent = list(map(cut, moved.mail, specs)), moved.step_scalars.unpack()
        rates = [sent.adam.scaled(spec.lr_scale).learning_rate for spec in specs]
        counts = sent.finite > 0
        lengths = [schedule.provisional_step(sent.step, rate, counts) for rate in rates]

    def merge_leaf(
        shard: Shard,
        weight: Array,
        upload: Array,
        during: Array,
        after: Array,
        mail: Array | None,
        length: Array | None,
    ) -> Array:
        block = shard.block
        either = (contains(x.reshape(*block.stack, block.k), block.n) for x in (during, after))
        selected = broadcast_channels(next(either) | next(either), block)
        new = shard.gather(block.turned(upload))
        if mail is not None and length is not None:  # both or neither
            sign = jnp.sign(mail.reshape(upload.shape)).astype(jnp.int8)
            sign = shard.gather(block.turned(sign)).astype(jnp.float32)
            change = provisional_change(new, length * sign)
            new = (new.astype(jnp.float32) + change).astype(new.dtype)
        return jnp.where(selected, weight, new)

    uploads = {True: iter(donated), False: iter(kept)}
    ends = np.cumsum(channel_widths(specs))[:-1]
    takes = [BLOCK, HOST_ORDER, EACH_DEVICE, EACH_DEVICE]
    # Only mail that was in host memory has unit axes.
    ranks = [partial(HOST_ORDER, rank=None if x is None else x.ndim) for x in mail]
    columns = zip(
        specs,
        ranks,
        map(cut, weights, specs),
        (next(uploads[_becomes_weight(spec)]) for spec in specs),
        jnp.split(during, ends, axis=1),
        jnp.split(after, ends, axis=1),
        mail,
        lengths,
        strict=True,
    )
    new = [
        on_each_device(merge_leaf, spec, [*takes, rank, REPLICATED], BLOCK, *args)
        for spec, rank, *args in columns
    ]
    return list(map(put, weights, new, specs))


@partial(jax.jit, static_argnames="specs")
def channel_rows(channels: Arrays, *, specs: Specs) -> Array:
    """Returns each device's selected channel numbers, for leaves or ranges."""
    if not any(spec.k for spec in specs):  # jit would drop all arguments, and with them their mesh
        place = specs[0].placement
        return jnp.zeros((1 if place is None else place.mesh.size, 0), jnp.int32)

    def rows(shard: Shard, x: Array) -> Array:
        return shard.to_local(x).reshape(1, -1)

    pairs = zip(specs, channels, strict=True)
    # Joined, because separate arrays would cost as much as the update.
    each = [on_each_device(rows, spec, [CHANNELS], EACH_DEVICE, x) for spec, x in pairs]
    return jnp.concatenate(each, axis=1)


def channel_widths(specs: Sequence[LeafSpec]) -> list[int]:
    blocks = [Shard(spec).block for spec in specs]
    return [math.prod(block.stack) * block.k for block in blocks]


@partial(jax.jit, static_argnames="specs")
def choose(
    weights: Arrays,
    scores: Arrays,
    channels: Arrays,
    masters: Sequence[Array | None],
    *,
    specs: Specs,
) -> tuple[Arrays, Array, Arrays, Arrays]:
    """Returns the channels to select, the same channels as rows, their masters, and zero scores."""

    def choose_in_leaf(
        shard: Shard, weight: Array, scores: Array, channels: Array, master: Array | None
    ) -> tuple[Array, Array, Array]:
        chosen = shard.to_global(top_channels(scores, shard.part.k))
        if master is None:
            master = shard.own(take(weight, shard.to_local(channels), shard.block))
        return chosen, master, jnp.zeros_like(scores)

    takes, gives = [BLOCK, CHANNELS, CHANNELS, PART], (CHANNELS, PART, CHANNELS)
    columns = zip(specs, map(cut, weights, specs), scores, channels, masters, strict=True)
    made = [on_each_device(choose_in_leaf, spec, takes, gives, *args) for spec, *args in columns]
    chosen, current, zeros = zip(*made, strict=True)
    return chosen, channel_rows(chosen, specs=specs), current, zeros


@partial(jax.jit, static_argnames="specs")
def enter(weights: Arrays, masters: Arrays, channels: Arrays, *, specs: Specs) -> Arrays:
    """Returns the parameters, with casts of the masters on the selected channels."""

    def enter_leaf(shard: Shard, weight: Array, master: Array, channels: Array) -> Array:
        place = positions(shard.to_local(channels), shard.block.n)
        new = gather_to_channels(shard.gather(master.astype(shard.block.dtype)), place, shard.block)
        return jnp.where(broadcast_channels(place >= 0, shard.block), new, weight)

    takes = [BLOCK, PART, CHANNELS]
    columns = zip(specs, map(cut, weights, specs), masters, channels, strict=True)
    new = [on_each_device(enter_leaf, spec, takes, BLOCK, *args) for spec, *args in columns]
    return tuple(map(put, weights, new, specs))


@partial(jax.jit, static_argnames="specs")
def cut_states(leaves: Sequence[LeafState], *, specs: Specs) -> list[LeafState]:
    return list(map(cut_state, leaves, specs))


@jax.jit
def put_states(leaves: Sequence[LeafState], parts: Sequence[LeafState]) -> list[LeafState]:
    return list(map(put_state, leaves, parts))
