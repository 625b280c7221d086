"""Builds the state before the first step, placed as `update` returns it.

If the first state and the second differ only in how their shardings are written, jit compiles the
step twice. So on a mesh the first one comes out of jit too.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from zenflow_jax._device import in_graph
from zenflow_jax._device.channels import first_channels, take
from zenflow_jax._device.memory import commit, host_zeros, mail_rank, to_host, with_rank
from zenflow_jax._device.placing import with_shardings
from zenflow_jax._device.shards import REPLICATED, Here, Layout, on_each_device
from zenflow_jax._device.state import LeafState, Reach, Static, ZenFlowState, leaf_layout
from zenflow_jax._plan.leaf import LeafSpec
from zenflow_jax._plan.rules import SendGradients
from zenflow_jax._plan.scalars import AdamScalars, StepScalars
from zenflow_jax._plan.schedule import Schedule, ScheduleState, first_schedule_state
from zenflow_jax._version import LAYOUT_NAME, version_number


def first_state(params: Any, specs: tuple[LeafSpec, ...], static: Static) -> ZenFlowState:
    """The state that `zenflow().init` returns for parameters: arrays, traced or abstract ones."""
    schedule, offload, sending = static.schedule, static.offload, static.send_gradients
    leaves = jax.tree.leaves(params)
    build = partial(_build, specs=specs, static=static)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        # Shapes in, shapes out: there are no weights to take masters from.
        return with_shardings(jax.eval_shape(build, leaves), leaves)
    weights = [jnp.asarray(p) for p in leaves]
    if not specs and not isinstance(params, Mapping | list | tuple | None):
        # `optax.tree_map_params` asks with a placeholder, neither arrays nor an empty container,
        # and wants it back where the per-leaf states are to stand.
        return build(weights)._replace(leaves=params, mail=params if offload else None)
    like = next(iter(weights), None)
    if any(isinstance(p, Tracer) for p in weights) or all(s.placement is None for s in specs):
        return commit(build(weights), like)
    # Mail is made apart, a leaf at a time: the device, where it is made, has no room for all of it.
    # `keep_unused`, here and below: parameters that nobody reads say which devices to use.
    state = jax.jit(partial(build, mail=False), keep_unused=True)(weights)
    if not offload:
        small = (state.open_steps, state.schedule_state)
        open_steps, schedule_state = jax.tree.map(partial(_in_full, specs=specs, like=like), small)
        return state._replace(open_steps=open_steps, schedule_state=schedule_state)
    rank = mail_rank(specs)
    each = tuple(
        None if spec.resident else _mail_zeros(p, spec.anonymous, sending, rank)
        for p, spec in zip(weights, specs, strict=True)
    )
    make_scalars = partial(
        _first_scalars, specs=specs, schedule=schedule, sending=sending, rank=rank
    )
    step_scalars = jax.jit(make_scalars, keep_unused=True)(weights)
    return state._replace(mail=each, step_scalars=step_scalars)


def _build(
    weights: list[jax.Array],
    *,
    specs: tuple[LeafSpec, ...],
    static: Static,
    mail: bool = True,
) -> ZenFlowState:
    schedule, offload, sending = static.schedule, static.offload, static.send_gradients
    rank = mail_rank(specs)
    leaves = []
    for p, spec in zip(weights, specs, strict=True):
        make = on_each_device(
            partial(_init_leaf, spec=spec, offload=offload, sending=sending),
            spec,
            [Layout(spec).block],
            leaf_layout(spec, deferred=not offload),
        )
        leaves.append(make(p))
    few = slice(None, None, len(weights) // 8 + 1)
    return ZenFlowState(
        step=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
        leaves=tuple(leaves),
        mail=tuple(
            None if spec.resident else _leaf_zeros(p, spec, sending, rank)
            for p, spec in zip(weights, specs, strict=True)
        )
        if offload and mail
        else None,
        token=_fingerprint(weights[few], specs[few]) if offload else None,
        step_scalars=_first_scalars(weights, specs, schedule, sending, rank)
        if offload and mail
        else None,
        open_steps=None if offload else jnp.zeros(schedule.groups, jnp.int32),
        scalars=None
        if offload
        else AdamScalars(*(jnp.zeros((), jnp.float32) for _ in AdamScalars._fields)),
        schedule_state=_first_schedule_state(specs, schedule, offload),
        reach=Reach(*(jnp.zeros((), jnp.float32) for _ in Reach._fields))
        if offload and schedule.provisional_share is not None
        else None,
        layout={LAYOUT_NAME: jnp.array(version_number(), jnp.int32)},
        static=static,
    )


def _in_full(x: jax.Array, specs: tuple[LeafSpec, ...], like: Any) -> jax.Array:
    """What all devices hold alike, with its sharding written as a step returns it."""
    explicit = any(spec.placement is not None and spec.placement.explicit for spec in specs)
    if not explicit or not x.size or not isinstance(like.sharding, NamedSharding):
        return x
    # There a type says so for each axis.
    return jax.device_put(x, NamedSharding(like.sharding.mesh, PartitionSpec(*[None] * x.ndim)))


def _first_schedule_state(
    specs: tuple[LeafSpec, ...], schedule: Schedule, offload: bool
) -> ScheduleState | None:
    if offload or not schedule.adaptive:
        return None
    leaves = sum(not spec.resident for spec in specs)
    return jax.tree.map(jnp.array, first_schedule_state(schedule, leaves))


def _init_leaf(
    here: Here, p: jax.Array, *, spec: LeafSpec, offload: bool, sending: SendGradients
) -> LeafState:
    part = here.part
    if part.resident:
        return LeafState(
            channels=None,
            steps=jnp.zeros((), jnp.int32),
            master=p.astype(jnp.float32) if part.keeps_master else None,
            mu=jnp.zeros(part.shape, jnp.float32),
            nu=jnp.zeros(part.shape, jnp.float32),
            scores=None,
            deferred=None,
            spec=spec,
        )
    first = first_channels(part)
    own = here.own(p)
    return LeafState(
        channels=here.to_global(first),
        steps=jnp.zeros((*part.stack, part.k), jnp.int32),
        master=take(own, first, part).astype(jnp.float32) if part.keeps_master else None,
        mu=jnp.zeros(part.selected_shape, jnp.float32),
        nu=jnp.zeros(part.selected_shape, jnp.float32),
        scores=jnp.zeros((*part.stack, part.n), jnp.float32),
        deferred=None if offload else in_graph.init_leaf(own, part, sending),
        spec=spec,
    )


def _leaf_zeros(p: jax.Array, spec: LeafSpec, sending: SendGradients, rank: int) -> jax.Array:
    """One leaf's mail before the first step."""
    layout, dtype = Layout(spec), spec.mail_dtype

    def on_device(here: Here, _: jax.Array) -> jax.Array:
        # Where the step leaves gradients on the device, this is one element per device: it has the
        # sharding of what the step returns in its place, and is not empty, which some savers
        # refuse.
        shape = here.part.shape if sending.sums_on_device else (1,) * len(spec.shape)
        return jnp.zeros(shape, dtype)

    if not sending.in_step:
        return on_each_device(on_device, spec, [layout.block], layout.part)(p)
    if spec.placement is None:
        return host_zeros(spec.shape, dtype, rank, p)

    def zeros(here: Here, _: jax.Array) -> jax.Array:
        return with_rank(jnp.zeros(here.part.shape, dtype), rank)

    return to_host(on_each_device(zeros, spec, [layout.block], layout.mail(rank))(p), rank)


@partial(jax.jit, static_argnames=("spec", "sending", "rank"), keep_unused=True)
def _mail_zeros(p: jax.Array, spec: LeafSpec, sending: SendGradients, rank: int) -> jax.Array:
    return _leaf_zeros(p, spec, sending, rank)


def _first_scalars(
    weights: list[jax.Array],
    specs: tuple[LeafSpec, ...],
    schedule: Schedule,
    sending: SendGradients,
    rank: int,
) -> StepScalars:
    """Step scalars of zero, on every device that takes part."""
    sizes = StepScalars.sizes(specs, schedule.needs_statistics)
    in_step = sending.in_step
    placed = [i for i, spec in enumerate(specs) if spec.placement is not None]
    if not placed and not in_step:
        return StepScalars(*(jnp.zeros(size, dtype) for size, dtype in sizes))
    if not placed:
        like = next(iter(weights), None)
        return StepScalars(*(host_zeros((size,), dtype, rank, like) for size, dtype in sizes))

    def zeros(here: Here, _: jax.Array) -> list[jax.Array]:
        return [with_rank(jnp.zeros(size, dtype), rank if in_step else 1) for size, dtype in sizes]

    i = placed[0]
    made = on_each_device(zeros, specs[i], [Layout(specs[i]).block], REPLICATED)(weights[i])
    return StepScalars(*(to_host(x, rank) if in_step else x for x in made))


@partial(jax.jit, static_argnames="specs")
def _fingerprint(weights: list[jax.Array], specs: tuple[LeafSpec, ...]) -> jax.Array:
    """A number that differs between runs and is the same when a run is repeated.

    Tokens start from it, so that an engine knows another run's state. Some entries of some leaves
    are enough: they come from a seed or from a checkpoint.
    """
    total = jnp.zeros((), jnp.uint32)
    for i, (p, spec) in enumerate(zip(weights, specs, strict=True)):
        corner = on_each_device(partial(_corner, number=i), spec, [Layout(spec).block], REPLICATED)
        total += corner(p)
    return (total & 0x3FFFFFFF).astype(jnp.int32)


def _corner(here: Here, p: jax.Array, *, number: int) -> jax.Array:
    corner = p[tuple(slice(0, 8) for _ in p.shape)].astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(corner, jnp.uint32).ravel()
    odd = 2 * jnp.arange(bits.size, dtype=jnp.uint32) + 2 * number + 1
    return here.sum_everywhere(jnp.sum(bits * odd))
