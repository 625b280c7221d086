"""Where each array of a state belongs, and how what something else has moved gets back there.

Trainers place optimizer states by rules of their own: on a mesh they may replicate what they have
no partition spec for. The numbers are right there, but neither device nor host would read its part.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zenflow_jax._device.memory import HOST, read
from zenflow_jax._device.shards import REPLICATED, Layout
from zenflow_jax._device.state import LeafState, ZenFlowState, leaf_layout


def _says_host(x: jax.Array) -> bool:
    """Whether a traced function is told that an array in host memory is there.

    jax 0.10.2 tells it that an array on one device is in device memory where it was put together
    from pieces, as savers do. A function that reads it, as `optax.MultiSteps` does, fails then.
    """
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def with_shardings(state: ZenFlowState, leaves: Sequence[Any]) -> ZenFlowState:
    """The abstract state with the shardings that a real one has, as far as known.

    Args:
        state: Arrays or shapes.
        leaves: The parameters, or their shapes, with their shardings.
    """
    meshes = [x.sharding.mesh for x in leaves if isinstance(x.sharding, NamedSharding)]
    if not meshes or not isinstance(meshes[0], Mesh):
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
        layout = leaf_layout(leaf.spec, deferred=not state.offload)
        return jax.tree.map(partial(put, mesh=mesh_of(parameter)), leaf, layout)

    def put_mail(mail: Any, leaf: LeafState, parameter: Any) -> Any:
        if mail is None:
            return None
        return put(mail, Layout(leaf.spec).mail(len(mail.shape)), mail_kind, mesh_of(parameter))

    mail = state.mail and tuple(map(put_mail, state.mail, state.leaves, leaves))
    alike = state._replace(leaves=None, mail=None, step_scalars=None)
    return jax.tree.map(lambda x: put(x, REPLICATED), alike)._replace(
        leaves=tuple(map(put_leaf, state.leaves, leaves)),
        mail=mail,
        step_scalars=jax.tree.map(lambda x: put(x, REPLICATED, mail_kind), state.step_scalars),
    )


def put_back(
    state: ZenFlowState, weights: Sequence[jax.Array], *, memories: bool = False
) -> tuple[ZenFlowState, int]:
    """The state with each array where `tx.init` put it, and how many were elsewhere.

    Args:
        state: Of arrays, on the devices of the parameters.
        weights: The parameter of each leaf, where it has been since `tx.init`.
        memories: Whether what is in the wrong memory is put back, too. A step takes blank mail from
            either, but is compiled for each.
    """
    moved = 0
    on_mesh = any(len(weight.sharding.device_set) > 1 for weight in weights)
    default = next((weight.sharding.memory_kind for weight in weights), None)

    def one(x: jax.Array, like: Any, in_mail: bool) -> jax.Array:
        nonlocal moved
        where = like.sharding if on_mesh else x.sharding  # one device has all, however it is said
        kind = HOST if in_mail and state.send_gradients.in_step else default
        if not memories or kind is None:
            kind = x.sharding.memory_kind
        if kind is not None:
            where = where.with_memory_kind(kind)
        in_place = x.sharding.is_equivalent_to(where, x.ndim)
        says_so = on_mesh or not memories or kind != HOST or _says_host(x)
        if in_place and says_so:
            return x
        moved += 1
        return jax.device_put(np.array(read(x)) if in_place else x, where)

    expected = with_shardings(state, weights) if on_mesh else state
    mail = (state.mail, state.step_scalars), (expected.mail, expected.step_scalars)
    rest = [x._replace(mail=None, step_scalars=None) for x in (state, expected)]
    mail, step_scalars = jax.tree.map(partial(one, in_mail=True), *mail)
    placed = jax.tree.map(partial(one, in_mail=False), *rest)
    return placed._replace(mail=mail, step_scalars=step_scalars), moved
