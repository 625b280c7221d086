"""A step's device half: read each gradient once, check the step, update the selected channels.

The functions process a leaf at a time; on a mesh, each device works on its own part (`shards.py`).
The deferred channels' gradient becomes mail.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zenflow_jax._device.adamw import adamw
from zenflow_jax._device.channels import (
    broadcast_channels,
    gather_to_channels,
    positions,
    sum_squares,
    take,
)
from zenflow_jax._device.memory import with_rank
from zenflow_jax._device.shards import (
    BLOCK,
    CHANNELS,
    HOST_ORDER,
    PART,
    REPLICATED,
    Shard,
    on_each_device,
    placed_gradient,
)
from zenflow_jax._device.state import LeafState, places_of
from zenflow_jax._spec.checks import SendGradients
from zenflow_jax._spec.leaf import LeafSpec
from zenflow_jax._spec.scalars import AdamScalars


class Verdict(NamedTuple):
    """The decision about a step, from the gradients of all leaves."""

    factor: Any  # the clipping factor
    finite: Any  # whether the step counts


class GradientParts(NamedTuple):
    """The values that a leaf's step reads from its gradient."""

    squares: Any  # float32 sums of squares, per channel, or over a whole resident leaf
    gradient: Any  # the selected channels' gradient, in its own dtype
    signs: Any  # all signs, packed by `_pack_signs`, or the gradient itself; None if not needed
    mail: Any  # None for a resident leaf


# Inlined, so a jitted step's program does not change, but jax traces all similar leaves only once.
@partial(jax.jit, static_argnames=("spec", "sending", "rank", "signs", "packing"), inline=True)
def split_gradient(
    g: jax.Array,
    channels: jax.Array | None,
    *,
    spec: LeafSpec,
    sending: SendGradients,
    rank: int,
    signs: bool,
    packing: type | None = None,
) -> GradientParts:
    """Reads all values that a step needs from a whole gradient, in the gradient's own dtype.

    Pass `LeafSpec.anonymous`. `rank` is the rank of mail in host memory. `signs` requests the signs
    for a provisional step; `packing` is the dtype that they are packed in.
    """
    crosses = not spec.resident and sending.in_step
    if not crosses:
        rank = len(spec.shape)
    signs = signs and not spec.resident
    # A stack's whole gradient exists when its scan ends, so packing its signs does not save memory.
    if packing is None and crosses and not spec.stack:
        packing = jnp.uint8

    def split(shard: Shard, g: jax.Array, channels: jax.Array | None) -> GradientParts:
        spec = shard.part
        squares = sum_squares(g, spec)
        if channels is None:
            return GradientParts(shard.sum(squares), g, None, None)
        selected = take(g, shard.to_local(channels), spec)
        # The signs replace the gradient until it is known whether the step counts: four to a byte,
        # they are 0.23 bytes per parameter at a model's peak, instead of all gradients' 1.8.
        sign = _pack_signs(g, _packed_axis(shard), packing) if signs and packing else None
        # The barrier makes the copy the gradient's last use. The end of the copy then frees the
        # gradient, so the scheduler starts it as soon as the backward pass has computed the leaf.
        # Without the barrier, XLA:GPU delays some models' copies, and keeps all their gradients,
        # until after the last matmul: 6.0 instead of 4.4 bytes per parameter (benchmarks/LOG.md,
        # gpu_program). The barrier also applies to a gradient that stays on the device, so that
        # except for the copies, the programs and results are equal.
        g, squares, selected, sign = jax.lax.optimization_barrier((g, squares, selected, sign))
        mail = with_rank(spec.turned(g).astype(spec.mail_dtype), rank)
        sign = g if signs and not packing else sign
        return GradientParts(shard.sum(squares), selected, sign, mail)

    gives = GradientParts(CHANNELS, PART, PART, partial(HOST_ORDER, rank=rank))
    g = placed_gradient(g, spec)
    seen = on_each_device(split, spec, [PART, CHANNELS], gives, g, channels)
    if not crosses:
        return seen
    return seen._replace(mail=jax.device_put(seen.mail, jax.memory.Space.Host))


def _packed_axis(shard: Shard) -> int:
    """Returns the axis to pack signs along: the longest axis that devices do not share.

    This is never a stack axis, so that each stack entry's signs are packed separately.
    """
    shape, shares = shard.part.shape, shard.shares
    axes = range(len(shard.part.stack), len(shape))
    return max(axes, key=lambda axis: (not shares[axis], shape[axis]))


#: For each dtype, how many signs one value holds as digits, and their base. For bytes, the base is
#: four, because shifts unpack faster than divisions on a CPU.
_SIGNS = {np.dtype(np.uint8): (4, 4), np.dtype(np.uint32): (19, 3)}


def _pack_signs(g: jax.Array, axis: int, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, ...]:
    """Packs the signs of `g`: each equal piece of an axis is a digit; the remainder is separate.

    The two results are not joined, because a concatenated gradient could then meet a second
    concatenation in one kernel, which jax 0.10.2 and 0.11.0 miscompile on GPUs (jax-ml/jax#40588).
    """
    count, base = _SIGNS[np.dtype(dtype)]
    # Not `g > 0`: XLA would share this zero with the zeros that a gradient starts from, such as
    # a scatter's, and keep that array, which is as large as the leaf, until this point.
    sign = jnp.sign(g).astype(jnp.int8)
    digits = jnp.where(sign < 0, 2, sign).astype(jnp.uint8)
    packed, begin = [], 0
    for pieces, width in _pieces(g.shape[axis], count):
        end = begin + pieces * width
        digit = jnp.split(jax.lax.slice_in_dim(digits, begin, end, axis=axis), pieces, axis)
        packed.append(sum(x.astype(dtype) * base**i for i, x in enumerate(digit)))
        begin = end
    return tuple(packed)


def _unpack_signs(packed: Sequence[jax.Array], axis: int, size: int) -> jax.Array:
    """Inverts `_pack_signs`; returns int8 signs with an axis of `size`."""
    count, base = _SIGNS[np.dtype(packed[0].dtype)]
    # Joining 32-bit numbers would take ten times as long on a CPU.
    digits = [
        (part // base**i % base).astype(jnp.int8)
        for part, (pieces, _) in zip(packed, _pieces(size, count), strict=True)
        for i in range(pieces)
    ]
    whole = jnp.concatenate(digits, axis)
    return whole - 3 * (whole >> 1)


def _pieces(size: int, count: int) -> list[tuple[int, int]]:
    """Cuts an axis into equal pieces, then cuts the remainder; padding would be slow on a CPU."""
    cuts = [(count, size // count), (size % count, 1)]
    return [(pieces, width) for pieces, width in cuts if pieces * width]


def _signs_of_block(shard: Shard, signs: jax.Array | tuple[jax.Array, ...]) -> jax.Array:
    """Returns the signs of a block's gradient, as int8, from the parts' packed signs."""
    if not isinstance(signs, tuple):
        return shard.gather(jnp.sign(signs).astype(jnp.int8))
    axis = _packed_axis(shard)
    size = shard.part.shape[axis]
    if shard.shares[axis]:
        return shard.gather(_unpack_signs(signs, axis, size))
    return _unpack_signs(jax.tree.map(shard.gather, signs), axis, size)


def judge(
    squares: list[jax.Array], max_grad_norm: jax.typing.ArrayLike | None
) -> tuple[Verdict, jax.Array]:
    """Decides whether a step counts, and computes the clipping factor; also returns the norm.

    The norm covers all gradients, before clipping.
    """
    per_leaf = jnp.stack([jnp.zeros((), jnp.float32), *(jnp.sum(s) for s in squares)])
    finite = jnp.all(jnp.isfinite(per_leaf))
    norm = jnp.sqrt(jnp.sum(per_leaf))
    if max_grad_norm is None:
        return Verdict(jnp.ones((), jnp.float32), finite), norm
    limit = jnp.asarray(max_grad_norm, jnp.float32)
    return Verdict(jnp.where(norm < limit, jnp.ones_like(norm), limit / norm), finite), norm


def step_selected(
    p: jax.Array,
    seen: GradientParts,
    leaf: LeafState,
    scalars: AdamScalars,
    verdict: Verdict,
    length: jax.Array | None,
) -> tuple[jax.Array, LeafState]:
    """Takes the AdamW step on selected channels; returns the leaf's float32 change and state.

    `length` is the provisional step's length, for deferred channels.
    """
    length = None if seen.signs is None else length
    similar = leaf.replace(spec=dataclasses.replace(leaf.spec.anonymous, decay=leaf.spec.decay))
    # Not Python numbers, so that the program below takes them like arrays.
    scalars = AdamScalars(*(np.float32(x) if isinstance(x, float) else x for x in scalars))
    # The step does not read the mail, so the mail needs no partition spec here.
    change, new = _step(p, seen._replace(mail=None), similar, scalars, verdict, length)
    return change, new.replace(spec=leaf.spec)


@partial(jax.jit, inline=True)
def _step(p: jax.Array, seen: GradientParts, leaf: LeafState, *scalars: Any) -> Any:
    places = places_of(leaf.spec)
    parts = GradientParts(CHANNELS, PART, PART, mail=None)
    takes = [BLOCK, parts, places, REPLICATED, REPLICATED, REPLICATED]
    args = p, seen, leaf, *scalars
    return on_each_device(_step_on_device, leaf.spec, takes, (BLOCK, places), *args)


def _step_on_device(
    shard: Shard,
    p: jax.Array,
    seen: GradientParts,
    leaf: LeafState,
    scalars: AdamScalars,
    verdict: Verdict,
    length: jax.Array | None,
) -> tuple[jax.Array, LeafState]:
    spec = shard.part
    index = None if leaf.channels is None else shard.to_local(leaf.channels)
    old = p if index is None else take(p, index, shard.block)
    master = current_masters(shard.own(old), leaf, spec)
    steps = leaf.steps + 1
    change, mu, nu = adamw(
        master,
        seen.gradient.astype(jnp.float32) * verdict.factor,
        leaf.mu,
        leaf.nu,
        steps if spec.resident else broadcast_channels(steps, spec),
        scalars,
        decay=spec.decay,
    )

    def if_counted(new: jax.Array, old: jax.Array) -> Any:
        return jnp.where(verdict.finite, new.astype(old.dtype), old)

    leaf = leaf.replace(
        steps=if_counted(steps, leaf.steps), mu=if_counted(mu, leaf.mu), nu=if_counted(nu, leaf.nu)
    )
    if leaf.master is not None:
        master = if_counted(master + change, master)
        leaf = leaf.replace(master=master)
        # The float32 difference of two low-precision numbers is exact unless they differ by a
        # factor of 2**16, so adding it gives the cast of the master.
        new = shard.gather(master.astype(spec.dtype))
        change = new.astype(jnp.float32) - old.astype(jnp.float32)
    else:
        change = shard.gather(jnp.where(verdict.finite, change, jnp.zeros_like(change)))
    if index is None:
        return change, leaf
    place = positions(index, shard.block.n)
    change = gather_to_channels(change, place, shard.block)
    unselected = jnp.zeros_like(change)
    if length is not None:
        sign = _signs_of_block(shard, seen.signs).astype(jnp.float32)
        unselected = provisional_change(p, length * sign)
    change = jnp.where(broadcast_channels(place >= 0, shard.block), change, unselected)
    assert leaf.scores is not None
    scores = leaf.scores + seen.squares * jnp.square(verdict.factor)
    return change, leaf.replace(scores=if_counted(scores, leaf.scores))


def current_masters(weights: jax.Array, leaf: LeafState, spec: LeafSpec) -> jax.Array:
    """Returns a part's masters of selected channels; `weights` are the parameter's values there.

    Before its first step, a master follows its parameter, so weights may be loaded after `init`, as
    with `optax.adamw`, which does not keep masters. (`Updates.load` does the same on the host.)
    """
    if leaf.master is None:
        return weights
    fresh = leaf.steps == 0 if spec.resident else broadcast_channels(leaf.steps == 0, spec)
    return jnp.where(fresh, weights.astype(jnp.float32), leaf.master)


def provisional_change(p: jax.Array, step: jax.Array) -> jax.Array:
    """Returns the float32 change in `p` from subtracting `step` and rounding."""
    if p.dtype == jnp.float32:
        return -step
    old = p.astype(jnp.float32)
    return rounded(old - step, p.dtype) - old


def rounded(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Rounds float32 numbers to the nearest number in `dtype`.

    A compiler may drop a pair of casts, but not this operation. `reduce_precision` alone flushes
    subnormal numbers to zero.
    """
    kind = jnp.finfo(dtype)
    normal = jnp.abs(x) >= float(kind.smallest_normal)
    reduced = jax.lax.reduce_precision(x, kind.nexp, kind.nmant)
    return jnp.where(normal, reduced, x.astype(dtype).astype(jnp.float32))
