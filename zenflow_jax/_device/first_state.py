"""Builds the initial state, placed in the same way as the results of `update`.

If the first and second states' shardings differ even in spelling, jit compiles the step twice. So
on a mesh, the first state is also made by jit.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import PyTree

from zenflow_jax._device.channels import take
from zenflow_jax._device.checksums import checksums
from zenflow_jax._device.memory import mail_rank, to_host, with_rank
from zenflow_jax._device.placing import check_placement, with_shardings
from zenflow_jax._device.shards import BLOCK, HOST_ORDER, REPLICATED, Shard, on_each_device
from zenflow_jax._device.state import LeafState, LeafStates, Static, ZenFlowState, places_of
from zenflow_jax._spec.checks import SendGradients
from zenflow_jax._spec.leaf import LeafSpec
from zenflow_jax._spec.scalars import StepScalars
from zenflow_jax._version import LAYOUT, LAYOUT_NAME


def first_state(params: PyTree, specs: tuple[LeafSpec, ...], static: Static) -> ZenFlowState:
    """Makes the state for `zenflow().init`, from concrete, traced or abstract arrays."""
    leaves = jax.tree.leaves(params)
    traced = any(isinstance(x, Tracer) for x in leaves)
    if not traced and all(isinstance(x, jax.Array) for x in leaves):
        check_placement(leaves, specs)
    make = partial(_make, specs=specs, static=static)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        # Shapes have no values for masters, so the result also consists of shapes.
        return with_shardings(jax.eval_shape(make, leaves), leaves)
    weights = [jnp.asarray(p) for p in leaves]
    if not specs and not isinstance(params, Mapping | list | tuple | None):
        # `optax.tree_map_params` passes a placeholder, neither arrays nor an empty container, and
        # expects it in place of per-leaf states.
        return make(weights)._replace(leaves=params, mail=params)
    if not traced and any(spec.placement is not None for spec in specs):
        # Unread parameters still determine the devices.
        return make(weights, jit=partial(jax.jit, keep_unused=True))
    state = make(weights)
    if traced or not weights or not weights[0].committed:
        return state
    # A jitted step returns a committed state; after another first state it would compile again.
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, with_shardings(state, weights)))


def _make(
    weights: list[jax.Array],
    *,
    specs: tuple[LeafSpec, ...],
    static: Static,
    jit: Callable[..., Any] = lambda f, **_: f,
) -> ZenFlowState:
    rank, sending = mail_rank(specs), static.send_gradients
    state = jit(partial(_without_mail, specs=specs, static=static))(weights)
    # Mail is made separately, a leaf at a time, because the device has no room for all of it.
    first_mail = jit(_first_mail, static_argnums=(1, 2, 3))
    mail = tuple(
        None if spec.resident else first_mail(p, spec.anonymous, sending, rank)
        for p, spec in zip(weights, specs, strict=True)
    )
    return state._replace(mail=mail)


def _without_mail(
    weights: list[jax.Array], *, specs: tuple[LeafSpec, ...], static: Static
) -> ZenFlowState:
    """Makes the state without mail; its numbers are on all of the run's devices."""
    pairs = list(zip(weights, specs, strict=True))
    leaves = [
        on_each_device(partial(_first_leaf, spec=x), x, [BLOCK], places_of(x), p) for p, x in pairs
    ]
    in_step = static.send_gradients.in_step
    rank = mail_rank(specs) if in_step else 1
    statistics = static.schedule.first_state(sum(not spec.resident for spec in specs)).sums.size

    def zeros(*_: jax.Array) -> StepScalars:
        sizes = StepScalars.sizes(statistics)
        return StepScalars(*(with_rank(jnp.zeros(size, dtype), rank) for size, dtype in sizes))

    placed = [(p, x) for p, x in pairs if x.placement is not None]
    scalars = zeros()
    if placed:
        p, spec = placed[0]
        scalars = on_each_device(zeros, spec, [BLOCK], REPLICATED, p)
    if in_step:
        scalars = StepScalars(*(to_host(x, rank) for x in scalars))
    # Tokens start from a number that differs between runs, but not when a run is repeated, so that
    # an engine recognizes another run's state. The number is computed from a few leaves.
    few = slice(None, None, len(weights) // 8 + 1)
    bits = sum(checksums(weights[few]), start=jnp.zeros((), jnp.uint32))
    return ZenFlowState(
        step=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
        grad_norm=jnp.zeros((), jnp.float32),
        leaves=LeafStates(tuple(leaves), static),
        mail=(),
        token=(bits & 0x3FFFFFFF).astype(jnp.int32),
        step_scalars=scalars,
        layout={LAYOUT_NAME: jnp.array(LAYOUT, jnp.int32)},
    )


def _first_leaf(shard: Shard, p: jax.Array, *, spec: LeafSpec) -> LeafState:
    part, master, shape = shard.part, shard.own(p), shard.part.shape
    channels = scores = None
    if not part.resident:
        # The first k channels are selected until the first selection.
        first = jnp.broadcast_to(jnp.arange(part.k, dtype=jnp.int32), (*part.stack, part.k))
        channels, scores = shard.to_global(first), jnp.zeros((*part.stack, part.n), jnp.float32)
        master, shape = take(master, first, part), part.selected_shape
    return LeafState(
        channels=channels,
        steps=jnp.zeros(() if channels is None else channels.shape, jnp.int32),
        master=master.astype(jnp.float32) if part.keeps_master else None,
        mu=jnp.zeros(shape, jnp.float32),
        nu=jnp.zeros(shape, jnp.float32),
        scores=scores,
        spec=spec,
    )


def _first_mail(p: jax.Array, spec: LeafSpec, sending: SendGradients, rank: int) -> jax.Array:
    """Makes one leaf's mail before the first step.

    The array has the shape of mail if a branch of `optax.MultiSteps` may return it. Otherwise it is
    one element per device, with the same sharding; it is not empty, because some checkpoint
    libraries reject empty arrays.
    """
    if not sending.in_step:
        rank = len(spec.shape)

    def zeros(shard: Shard, _: jax.Array) -> jax.Array:
        shape = shard.part.on_host.shape if sending.in_step else (1,) * len(spec.shape)
        return with_rank(jnp.zeros(shape, spec.mail_dtype), rank)

    mail = on_each_device(zeros, spec, [BLOCK], partial(HOST_ORDER, rank=rank), p)
    return to_host(mail, rank) if sending.in_step else mail
