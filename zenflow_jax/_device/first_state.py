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
from zenflow_jax._device.memory import commit, host_zeros, mail_rank, to_host, with_rank
from zenflow_jax._device.placing import check_placement, with_shardings
from zenflow_jax._device.shards import BLOCK, HOST_ORDER, REPLICATED, Shard, on_each_device
from zenflow_jax._device.state import LeafState, LeafStates, Static, ZenFlowState, places_of
from zenflow_jax._spec.leaf import LeafSpec
from zenflow_jax._spec.rules import SendGradients
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
    if traced or all(spec.placement is None for spec in specs):
        return commit(make(weights), next(iter(weights), None))
    # Unread parameters still determine the devices.
    return make(weights, jit=partial(jax.jit, keep_unused=True))


def _make(
    weights: list[jax.Array],
    *,
    specs: tuple[LeafSpec, ...],
    static: Static,
    jit: Callable[..., Any] = lambda f, **_: f,
) -> ZenFlowState:
    rank, sending = mail_rank(specs), static.send_gradients
    state = jit(partial(_build, specs=specs, static=static))(weights)
    # Mail is made separately, a leaf at a time, because the device has no room for all of it.
    first_mail = jit(_first_mail, static_argnums=(1, 2, 3))
    mail = tuple(
        None if spec.resident else first_mail(p, spec.anonymous, sending, rank)
        for p, spec in zip(weights, specs, strict=True)
    )
    scalars = jit(partial(_first_scalars, specs=specs, static=static))(weights)
    return state._replace(mail=mail, step_scalars=scalars)


def _build(
    weights: list[jax.Array], *, specs: tuple[LeafSpec, ...], static: Static
) -> ZenFlowState:
    """Makes the state without mail."""
    leaves = []
    for p, spec in zip(weights, specs, strict=True):
        make = on_each_device(partial(_first_leaf, spec=spec), spec, [BLOCK], places_of(spec))
        leaves.append(make(p))
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
        step_scalars=StepScalars(None, None),
        layout={LAYOUT_NAME: jnp.array(LAYOUT, jnp.int32)},
    )


def _first_leaf(shard: Shard, p: jax.Array, *, spec: LeafSpec) -> LeafState:
    part, own = shard.part, shard.own(p)
    if part.resident:
        return LeafState(
            channels=None,
            steps=jnp.zeros((), jnp.int32),
            master=p.astype(jnp.float32) if part.keeps_master else None,
            mu=jnp.zeros(part.shape, jnp.float32),
            nu=jnp.zeros(part.shape, jnp.float32),
            scores=None,
            spec=spec,
        )
    # The first k channels are selected until the first selection.
    first = jnp.broadcast_to(jnp.arange(part.k, dtype=jnp.int32), (*part.stack, part.k))
    return LeafState(
        channels=shard.to_global(first),
        steps=jnp.zeros((*part.stack, part.k), jnp.int32),
        master=take(own, first, part).astype(jnp.float32) if part.keeps_master else None,
        mu=jnp.zeros(part.selected_shape, jnp.float32),
        nu=jnp.zeros(part.selected_shape, jnp.float32),
        scores=jnp.zeros((*part.stack, part.n), jnp.float32),
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
    elif spec.placement is None:
        return host_zeros(spec.on_host.shape, spec.mail_dtype, rank, p)

    def zeros(shard: Shard, _: jax.Array) -> jax.Array:
        shape = shard.part.on_host.shape if sending.in_step else (1,) * len(spec.shape)
        return with_rank(jnp.zeros(shape, spec.mail_dtype), rank)

    mail = on_each_device(zeros, spec, [BLOCK], partial(HOST_ORDER, rank=rank))(p)
    return to_host(mail, rank) if sending.in_step else mail


def _first_scalars(
    weights: list[jax.Array], specs: tuple[LeafSpec, ...], static: Static
) -> StepScalars:
    """Makes zero-valued step scalars on all of the run's devices."""
    offloaded = sum(not spec.resident for spec in specs)
    sizes = StepScalars.sizes(static.schedule.first_state(offloaded).sums.size)
    in_step = static.send_gradients.in_step
    rank = mail_rank(specs) if in_step else 1
    placed = [(p, x) for p, x in zip(weights, specs, strict=True) if x.placement is not None]
    if in_step and not placed:
        like = next(iter(weights), None)
        return StepScalars(*(host_zeros((size,), dtype, rank, like) for size, dtype in sizes))

    def zeros(*_: jax.Array) -> list[jax.Array]:
        return [with_rank(jnp.zeros(size, dtype), rank) for size, dtype in sizes]

    if not placed:
        return StepScalars(*zeros())
    p, spec = placed[0]
    scalars = on_each_device(zeros, spec, [BLOCK], REPLICATED)(p)
    return StepScalars(*(to_host(x, rank) if in_step else x for x in scalars))
