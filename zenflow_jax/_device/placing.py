"""Checks the placement of parameters, and puts misplaced arrays of a state back.

Trainers may place optimizer states by their own rules. The values stay correct, but device and host
would read the wrong parts.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from zenflow_jax._device.memory import HOST, read
from zenflow_jax._device.shards import REPLICATED, Layout
from zenflow_jax._device.state import LeafState, ZenFlowState, leaf_layout
from zenflow_jax._spec.leaf import LeafSpec, check_memory
from zenflow_jax._spec.mesh import placement_of


def check_placement(weights: Sequence[Any], specs: Sequence[LeafSpec]) -> None:
    """Raises if a parameter is not where `init` saw it: on one device, or on a mesh."""
    for weight, spec in zip(weights, specs, strict=True):
        if not isinstance(weight, jax.Array) or isinstance(weight, Tracer):
            raise TypeError(
                f"{spec.name} in `params` is {type(weight).__name__}, not a jax array. Use "
                "`jax.device_put`, outside jit."
            )
        check_memory(spec.name, weight)
        if 0 in spec.shape:
            continue  # an empty leaf has no placement
        placed, expected = placement_of(weight), spec.placement
        if placed is None and not isinstance(weight.sharding, jax.sharding.SingleDeviceSharding):
            raise ValueError(
                f"{spec.name} has the sharding {weight.sharding}. Put it on one device, or use a "
                "NamedSharding."
            )
        if expected is None and placed is not None and placed.mesh.size > 1:
            raise ValueError(
                f"{spec.name} has the sharding {weight.sharding}, but its state was made for one "
                "device. Call `tx.init` outside jit, or pass `param_shardings`."
            )
        if (
            expected is not None
            and (expected.mesh.size > 1 or placed is not None)
            and (
                placed is None
                or placed.mesh.shape_tuple != expected.mesh.shape_tuple
                or placed.cuts != expected.cuts
            )
        ):
            raise ValueError(
                f"{spec.name} has the sharding {weight.sharding}, but `tx.init` saw it divided by "
                f"the mesh axes {expected.block} of {dict(expected.mesh.shape)}. Keep it there, "
                "for example with `jax.jit(step, out_shardings=...)`."
            )
    devices = {frozenset(weight.sharding.device_set) for weight in weights}
    if len(devices) > 1:
        names = sorted(sorted(map(str, group)) for group in devices)
        raise ValueError(
            f"Leaves are on different devices: {names[0]} and {names[1]}. Put all on the same."
        )


def _is_typed_as_host(x: jax.Array) -> bool:
    """Returns whether the type of an array in host memory has that memory, for tracing.

    In jax 0.10.2, an array that was assembled from pieces, as savers do, has a different type.
    """
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def with_shardings(state: ZenFlowState, leaves: Sequence[Any]) -> ZenFlowState:
    """Adds a real state's shardings, as far as known, to an abstract state."""
    meshes = [x.sharding.mesh for x in leaves if isinstance(x.sharding, NamedSharding)]
    if not meshes or meshes[0].empty:
        return state

    def put(
        x: Any, spec: PartitionSpec, memory_kind: str | None = None, mesh: Any = meshes[0]
    ) -> Any:
        sharding = NamedSharding(mesh, spec, memory_kind=memory_kind)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    mail_kind = HOST if state.send_gradients.in_step else None

    def mesh_of(parameter: Any) -> Any:
        placed = isinstance(parameter.sharding, NamedSharding)
        return parameter.sharding.mesh if placed else meshes[0]

    def put_leaf(leaf: LeafState, parameter: Any) -> LeafState:
        layout = leaf_layout(leaf.spec)
        return jax.tree.map(partial(put, mesh=mesh_of(parameter)), leaf, layout)

    def put_mail(mail: Any, leaf: LeafState, parameter: Any) -> Any:
        if mail is None:
            return None
        return put(mail, Layout(leaf.spec).mail(len(mail.shape)), mail_kind, mesh_of(parameter))

    mail = tuple(map(put_mail, state.mail, state.leaves, leaves))
    alike = state._replace(leaves=None, mail=None, step_scalars=None)
    return jax.tree.map(lambda x: put(x, REPLICATED), alike)._replace(
        leaves=state.leaves.replace(map(put_leaf, state.leaves, leaves)),
        mail=mail,
        step_scalars=jax.tree.map(lambda x: put(x, REPLICATED, mail_kind), state.step_scalars),
    )


def put_back(
    state: ZenFlowState, weights: Sequence[jax.Array], *, memories: bool = False
) -> tuple[ZenFlowState, int]:
    """Returns the state with each array where `tx.init` put it, and the number of moved arrays.

    `memories` includes arrays in the wrong memory. A step accepts both, but is compiled for each.
    """
    moved = 0
    on_mesh = any(len(weight.sharding.device_set) > 1 for weight in weights)
    default = weights[0].sharding.memory_kind if weights else None

    def put(x: jax.Array, like: Any, in_mail: bool) -> jax.Array:
        nonlocal moved
        # On one device, every spelling of the sharding is correct.
        where = like.sharding if on_mesh else x.sharding
        kind = HOST if in_mail and state.send_gradients.in_step else default
        if not memories or kind is None:
            kind = x.sharding.memory_kind
        if kind is not None:
            where = where.with_memory_kind(kind)
        in_place = x.sharding.is_equivalent_to(where, x.ndim)
        well_typed = on_mesh or not memories or kind != HOST or _is_typed_as_host(x)
        if in_place and well_typed:
            return x
        moved += 1
        return jax.device_put(np.array(read(x)) if in_place else x, where)

    expected = with_shardings(state, weights) if on_mesh else state
    mail = (state.mail, state.step_scalars), (expected.mail, expected.step_scalars)
    rest = [x._replace(mail=None, step_scalars=None) for x in (state, expected)]
    mail, step_scalars = jax.tree.map(partial(put, in_mail=True), *mail)
    placed = jax.tree.map(partial(put, in_mail=False), *rest)
    return placed._replace(mail=mail, step_scalars=step_scalars), moved
