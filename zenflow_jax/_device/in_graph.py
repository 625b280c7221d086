"""The deferred half on the device, inside the user's jit (`offload=False`).

Windows, staleness, selection, warm-up and skipped steps are as with an engine. Every array is as
large as its leaf, so this mode saves no memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from zenflow_jax._device.adamw import adamw, add_gradient
from zenflow_jax._device.channels import (
    broadcast_channels,
    contains,
    gather_to_channels,
    positions,
    take,
    top_channels,
)
from zenflow_jax._device.leaves import match_leaves
from zenflow_jax._device.shards import REPLICATED, Layout, Shard, on_each_device
from zenflow_jax._device.state import (
    DeferredState,
    LeafState,
    ZenFlowState,
    cut,
    cut_state,
    find_state,
    leaf_layout,
    put,
    put_state,
    replace_state,
)
from zenflow_jax._device.statistics import kept_share
from zenflow_jax._device.step import Verdict
from zenflow_jax._diagnostics.stats import warn_of_skipped
from zenflow_jax._spec.groups import of_group
from zenflow_jax._spec.leaf import LeafSpec
from zenflow_jax._spec.rules import SendGradients
from zenflow_jax._spec.scalars import AdamScalars, window_step
from zenflow_jax._spec.schedule import Boundary, Schedule, ScheduleState, first_schedule_state

#: The state of a leaf, or of a range of it, and the float32 change of its parameter.
_Piece = tuple[LeafState, jax.Array]


def init_leaf(p: jax.Array, spec: LeafSpec, sending: SendGradients) -> DeferredState:
    return DeferredState(
        # A copy even of float32: a step may donate parameters and state.
        master=jnp.array(p, jnp.float32),
        mu=jnp.zeros(spec.shape, jnp.float32),
        nu=jnp.zeros(spec.shape, jnp.float32),
        steps=jnp.zeros((*spec.stack, spec.n), jnp.int32),
        total=jnp.zeros(spec.shape, spec.mail_dtype if sending.sums_on_device else jnp.float32),
        pending=jnp.zeros((*spec.stack, spec.n), bool),
    )


def advance(
    state: ZenFlowState,
    weights: list[jax.Array],
    gradients: list[jax.Array],
    changes: list[jax.Array],
    scalars: AdamScalars,
    verdict: Verdict,
    statistics: jax.Array | None,
) -> tuple[ZenFlowState, list[jax.Array]]:
    """Adds the step's gradients to their sums and does what the boundary asks.

    The `changes` are of selected channels, those in the result also of channels that get an update.
    """
    schedule = state.schedule
    leaves = [
        _take_in(*leaf_p_g, state.step == 1, verdict)
        for leaf_p_g in zip(state.leaves, weights, gradients, strict=True)
    ]
    open_steps = state.open_steps + verdict.finite.astype(jnp.int32)
    boundaries = [
        schedule.boundary(state.step, state.schedule_state, group)
        for group in range(schedule.groups)
    ]
    groups = [of_group([leaf.spec for leaf in leaves], j) for j in range(schedule.groups)]
    changes = list(changes)
    for ranges, counted, boundary in zip(groups, open_steps, boundaries, strict=True):
        params = [cut(weights[i], spec) for i, spec in ranges.items()]
        pieces = [(cut_state(leaves[i], spec), cut(changes[i], spec)) for i, spec in ranges.items()]
        pieces = _pass_boundary(pieces, params, schedule, scalars, counted, boundary)
        for (i, spec), (leaf, change) in zip(ranges.items(), pieces, strict=True):
            leaves[i] = put_state(leaves[i], leaf)
            changes[i] = put(changes[i], change, spec)
    closes = jnp.stack([boundary.closes for boundary in boundaries])
    new = state._replace(
        leaves=tuple(leaves),
        open_steps=jnp.where(closes, jnp.zeros_like(open_steps), open_steps),
        scalars=AdamScalars(*(jnp.asarray(x, jnp.float32) for x in scalars)),
        schedule_state=state.schedule_state
        and _next_schedule_state(
            state.schedule_state,
            schedule,
            closes,
            jnp.stack([boundary.selects for boundary in boundaries]),
            [[cut_state(leaves[i], spec) for i, spec in ranges.items()] for ranges in groups],
            statistics,
        ),
    )
    return new, changes


def _take_in(
    leaf: LeafState, p: jax.Array, g: jax.Array, first: jax.Array, verdict: Verdict
) -> LeafState:
    """The leaf's state, with the step's gradient in the sum of its window."""
    half = leaf.deferred
    if half is None:
        return leaf

    def take(
        shard: Shard,
        master: jax.Array,
        total: jax.Array,
        p: jax.Array,
        g: jax.Array,
        first: jax.Array,
        verdict: Verdict,
    ) -> tuple[jax.Array, jax.Array]:
        # Weights may be loaded until the first step, which moves no deferred channel.
        own = shard.own(p).astype(jnp.float32)
        master = jax.lax.cond(first, lambda: own, lambda: master)
        # Rounded to the mail's dtype; the sum of "per_window" has that dtype, too.
        return master, add_gradient(total, g.astype(shard.part.mail_dtype), *verdict)

    block, part = Layout(leaf.spec).block, Layout(leaf.spec).part
    takes = [part, part, block, part, REPLICATED, REPLICATED]
    taken = on_each_device(take, leaf.spec, takes, (part, part))
    master, total = taken(half.master, half.total, p, g, first, verdict)
    return leaf._replace(deferred=half._replace(master=master, total=total))


def _pass_boundary(
    pieces: list[_Piece],
    params: list[jax.Array],
    schedule: Schedule,
    scalars: AdamScalars,
    open_steps: jax.Array,
    boundary: Boundary,
) -> list[_Piece]:
    """The states and changes of a group's leaves, or ranges, after the boundary behind a step."""

    def arrive(pieces: list[_Piece]) -> list[_Piece]:
        return [_per_leaf(_arrive, *piece, p) for piece, p in zip(pieces, params, strict=True)]

    def close(pieces: list[_Piece]) -> list[_Piece]:
        close_leaf = partial(_close, scaling=schedule.window_scaling)
        return [
            _per_leaf(close_leaf, *piece, p, scalars, open_steps, boundary)
            for piece, p in zip(pieces, params, strict=True)
        ]

    def stay(pieces: list[_Piece]) -> list[_Piece]:
        return pieces

    # Branches, not a `where`: in three steps of four they cost nothing.
    pieces = jax.lax.cond(boundary.arrives, arrive, stay, pieces)
    return jax.lax.cond(boundary.closes, close, stay, pieces)


def _per_leaf(
    f: Callable[..., Any], leaf: LeafState, change: jax.Array, p: jax.Array, *alike: Any
) -> _Piece:
    """`f` on every device of a leaf; `alike` are arguments that are the same on all devices."""
    block, state = Layout(leaf.spec).block, leaf_layout(leaf.spec, deferred=True)
    takes = [state, block, block, *[REPLICATED] * len(alike)]
    return on_each_device(f, leaf.spec, takes, (state, block))(leaf, p, change, *alike)


def _next_schedule_state(
    old: ScheduleState,
    schedule: Schedule,
    closes: jax.Array,
    selects: jax.Array,
    groups: list[list[LeafState]],
    statistics: jax.Array | None,
) -> ScheduleState:
    first = jax.tree.map(jnp.asarray, first_schedule_state(schedule, sum(map(len, groups))))
    closed = old.close_window(first, closes, selects, jnp)
    opened = old.open_step().add(statistics)
    new = jax.tree.map(partial(jnp.where, closes.any()), closed, opened)
    if not schedule.needs_kept_share:
        return new

    def measure(leaves: list[LeafState]) -> jax.Array:
        # A selection resets the scores; the share is then 1.
        return kept_share(*zip(*((x.scores, x.channels, x.spec) for x in leaves), strict=True))

    shares = [
        jax.lax.cond(closes[group], measure, lambda _, share=share: share, leaves)
        if leaves
        else share
        for group, (leaves, share) in enumerate(zip(groups, new.kept_share, strict=True))
    ]
    return new._replace(kept_share=jnp.stack(shares))


def _arrive(shard: Shard, leaf: LeafState, p: jax.Array, change: jax.Array) -> _Piece:
    half = leaf.deferred
    assert half is not None
    change = _to_master(shard, half, half.pending, p, change)
    half = half._replace(pending=jnp.zeros_like(half.pending))
    return leaf._replace(deferred=half), change


def _to_master(
    shard: Shard, half: DeferredState, arrives: jax.Array, p: jax.Array, change: jax.Array
) -> jax.Array:
    """`change`, but on channels that arrive the way from `p` to the cast of their masters."""
    target = shard.gather(half.master.astype(shard.part.dtype)).astype(jnp.float32)
    arrives = broadcast_channels(arrives, shard.block)
    return jnp.where(arrives, target - p.astype(jnp.float32), change)


def _close(
    shard: Shard,
    leaf: LeafState,
    p: jax.Array,
    change: jax.Array,
    scalars: AdamScalars,
    open_steps: jax.Array,
    boundary: Boundary,
    *,
    scaling: float | None,
) -> _Piece:
    """Closes the window of one leaf and makes its update; the one before must have arrived."""
    spec, before = shard.part, leaf.deferred
    assert before is not None
    active = ~contains(shard.to_local(leaf.channels), spec.n) & (open_steps > 0)
    half = _update(before, active, scalars, open_steps, scaling, spec)
    waits = active & ~jnp.asarray(boundary.synchronous)
    leaf = leaf._replace(deferred=half._replace(pending=waits))
    leaf = jax.lax.cond(
        boundary.selects,
        partial(_reselect, shard),
        lambda leaf, p, change: leaf,
        leaf,
        p,
        change,
    )
    half = leaf.deferred
    assert half is not None
    return leaf, _to_master(shard, half, active & ~half.pending, p, change)


def _update(
    half: DeferredState,
    active: jax.Array,
    scalars: AdamScalars,
    open_steps: jax.Array,
    scaling: float | None,
    spec: LeafSpec,
) -> DeferredState:
    """One AdamW step on the active channels with the window's mean; the sum restarts."""
    counted = jnp.maximum(open_steps, 1).astype(jnp.float32)
    mean = half.total.astype(jnp.float32) / counted
    step = window_step(scalars, counted, scaling, jnp)
    advance = jnp.asarray(step.advance, jnp.int32)
    steps = half.steps + active.astype(jnp.int32) * advance
    # Channels that never took a step have no bias correction; they are not active either.
    count = jnp.maximum(broadcast_channels(steps, spec), 1)
    change, mu, nu = adamw(
        half.master, mean, half.mu, half.nu, count, step.scalars, decay=spec.decay, single=scalars
    )
    on = broadcast_channels(active, spec)
    return half._replace(
        master=jnp.where(on, half.master + change, half.master),
        mu=jnp.where(on, mu, half.mu),
        nu=jnp.where(on, nu, half.nu),
        steps=steps,
        total=jnp.zeros_like(half.total),
    )


def _reselect(shard: Shard, leaf: LeafState, p: jax.Array, change: jax.Array) -> LeafState:
    """Hands every selected channel over, selects again, and takes the new ones.

    Where the leaf keeps no masters, `p + change` are those of the selected channels.
    """
    spec, half = shard.part, leaf.deferred
    assert half is not None
    place = positions(shard.to_local(leaf.channels), spec.n)
    selected = broadcast_channels(place >= 0, spec)

    def hand_over(device: jax.Array, host: jax.Array) -> jax.Array:
        return jnp.where(selected, gather_to_channels(device, place, spec), host)

    if leaf.master is None:
        master = jnp.where(selected, shard.own(p + change), half.master)
    else:
        master = hand_over(leaf.master, half.master)
    mu, nu = hand_over(leaf.mu, half.mu), hand_over(leaf.nu, half.nu)
    steps = half.steps
    if spec.k:
        of_selected = jnp.take_along_axis(leaf.steps, jnp.maximum(place, 0), axis=-1)
        steps = jnp.where(place >= 0, of_selected, steps)
    half = half._replace(master=master, mu=mu, nu=nu, steps=steps)

    index = top_channels(leaf.scores, spec.k)
    # Entering channels do not wait for the next boundary.
    half = half._replace(pending=half.pending & ~contains(index, spec.n))
    return leaf._replace(
        channels=shard.to_global(index),
        steps=jnp.take_along_axis(steps, index, axis=-1),
        master=None if leaf.master is None else take(master, index, spec),
        mu=take(mu, index, spec),
        nu=take(nu, index, spec),
        scores=jnp.zeros_like(leaf.scores),
        deferred=half,
    )


def flush(params: Any, opt_state: Any) -> tuple[Any, Any]:
    """Brings updates in that are under way, as `HostEngine.flush` does.

    For `zenflow(..., offload=False)`; with an engine, use that one. Outside of jit, `flush` warns
    by `logging` if the last steps were all skipped. It is pure, so it also shows the parameters in
    mid-run: `eval_params, _ = flush(params, opt_state)`.

    Args:
        params: The parameters that `opt_state` belongs to.
        opt_state: Any optimizer state with one in-graph `ZenFlowState` in it.

    Returns:
        Parameters and state, from which training can go on.

    Raises:
        ValueError: If the state belongs to an engine, or its leaves are not those of `params`.

    Examples:
        >>> import jax.numpy as jnp, zenflow_jax
        >>> params = {"w": jnp.ones((8, 4))}
        >>> tx = zenflow_jax.zenflow(1e-2, offload=False, update_interval=1)
        >>> updates, opt_state = tx.update(params, tx.init(params), params)
        >>> params, opt_state = zenflow_jax.flush(params, opt_state)
        >>> bool((params["w"] < 1).any())
        True
    """
    state = find_state(opt_state)
    if state.offload:
        raise ValueError(
            "expected the state of `zenflow(..., offload=False)`, got one whose deferred half is "
            "with an engine. Call `engine.flush(params, opt_state)`."
        )
    weights, treedef, places = match_leaves(params, state)
    # Both may be NumPy arrays (from `jax.device_get` and some checkpoints).
    weights, state = jax.tree.map(jnp.asarray, (weights, state))
    if not isinstance(state.skipped_in_a_row, Tracer):
        warn_of_skipped(int(state.skipped_in_a_row), int(state.step))
    schedule, leaves = state.schedule, []
    for place, leaf in zip(places, state.leaves, strict=True):
        if leaf.deferred is not None:
            p = weights[place]
            changes = jnp.zeros_like(p, jnp.float32)
            for spec in leaf.spec.ranges:
                piece, of_range = (cut_state(leaf, spec), cut(changes, spec)), cut(p, spec)
                waits = schedule.provisional_share is not None and schedule.in_window(
                    state.step, state.schedule_state, spec.group
                )
                arrived = _per_leaf(_arrive, *piece, of_range)
                part, change = jax.tree.map(partial(jnp.where, waits), piece, arrived)
                leaf, changes = put_state(leaf, part), put(changes, change, spec)
            weights[place] = (p.astype(jnp.float32) + changes).astype(p.dtype)
        leaves.append(leaf)
    new = replace_state(opt_state, state._replace(leaves=tuple(leaves)))
    return jax.tree.unflatten(treedef, weights), new
