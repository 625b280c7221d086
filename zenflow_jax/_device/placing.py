"""Checks the placement of parameters, and computes and restores the placement of a state.

Trainers may place optimizer states by their own rules. The values stay correct, but device and host
would read the wrong parts.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from zenflow_jax._device.leaves import match_leaves
from zenflow_jax._device.memory import HOST, read
from zenflow_jax._device.shards import REPLICATED, Layout
from zenflow_jax._device.state import (
    LeafState,
    ZenFlowState,
    find_state,
    leaf_layout,
    replace_state,
)
from zenflow_jax._spec.leaf import LeafSpec, as_pure, check_memory
from zenflow_jax._spec.mesh import placement_of


def check_placement(
    weights: Sequence[Any], specs: Sequence[LeafSpec], *, abstract: bool = False
) -> None:
    """Rejects a parameter that is not where `init` saw it: on one device, or on a mesh.

    With `abstract`, `weights` are shapes with shardings. Then a mesh with one device counts as a
    mesh, because on such a mesh, states made under jit and outside jit have different treedefs.
    """
    for weight, spec in zip(weights, specs, strict=True):
        if not abstract and (not isinstance(weight, jax.Array) or isinstance(weight, Tracer)):
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
        if expected is None and placed is not None and (abstract or placed.mesh.size > 1):
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
                f"{spec.name} has the sharding {weight.sharding}, but in `tx.init` it was divided "
                f"by the mesh axes {expected.block} of {dict(expected.mesh.shape)}. Keep that "
                "sharding, for example with `jax.jit(step, out_shardings=...)`."
            )
    devices = {frozenset(weight.sharding.device_set) for weight in weights}
    if len(devices) > 1:
        names = sorted(sorted(map(str, group)) for group in devices)
        raise ValueError(
            f"Leaves are on different devices: {names[0]} and {names[1]}. Put them all on the same "
            "devices."
        )


def _is_typed_as_host(x: jax.Array) -> bool:
    """Returns whether an array in host memory is also typed as such, which matters for tracing.

    In jax 0.10.2, an array that a checkpoint library assembled from pieces has a different type.
    """
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def with_shardings(state: ZenFlowState, leaves: Sequence[Any]) -> ZenFlowState:
    """Adds a real state's shardings to an abstract state, as far as they are known."""
    known = [x.sharding for x in leaves if x.sharding is not None]
    meshes = [x for x in known if isinstance(x, NamedSharding) and not x.mesh.empty]
    if not known or (not meshes and isinstance(known[0], NamedSharding)):
        return state
    first = (meshes or known)[0]

    def put(x: Any, spec: PartitionSpec, memory_kind: str | None = None, like: Any = first) -> Any:
        if not isinstance(like, NamedSharding):
            like = first
        if isinstance(like, NamedSharding):
            sharding = NamedSharding(like.mesh, spec, memory_kind=memory_kind)
        else:
            sharding = like.with_memory_kind(memory_kind or like.memory_kind)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    mail_kind = HOST if state.send_gradients.in_step else None

    def put_leaf(leaf: LeafState, parameter: Any) -> LeafState:
        layout = leaf_layout(leaf.spec)
        return jax.tree.map(partial(put, like=parameter.sharding), leaf, layout)

    def put_mail(mail: Any, leaf: LeafState, parameter: Any) -> Any:
        if mail is None:
            return None
        return put(mail, Layout(leaf.spec).mail(len(mail.shape)), mail_kind, parameter.sharding)

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

    `memories` includes arrays in the wrong memory: a step accepts them, but is compiled again.
    """
    moved = 0
    on_mesh = any(len(weight.sharding.device_set) > 1 for weight in weights)
    default = weights[0].sharding.memory_kind if weights else None
    devices = weights[0].sharding.device_set if weights else None

    def put(x: jax.Array, like: Any, in_mail: bool) -> jax.Array:
        nonlocal moved
        # On one device, every spelling of the sharding is correct.
        where = like.sharding if on_mesh else x.sharding
        if not on_mesh and devices not in (None, where.device_set):
            where = SingleDeviceSharding(*devices)
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


def place(params: Any, opt_state: Any) -> Any:
    """Moves an optimizer state to where `tx.init(params)` puts it outside jit.

    A state that was made under jit, restored, or moved by a trainer may have its mail in device
    memory, or its arrays on other devices.

    Args:
        params: The parameters, correctly placed.
        opt_state: The parameters' optimizer state. On a mesh of several devices, `zenflow` needs
            `param_shardings` to make the state under jit.

    Returns:
        The optimizer state. Arrays that are already in place, and other transformations' states,
        are returned as they are. For a step's `out_shardings`, use
        `jax.tree.map(lambda x: x.sharding, opt_state)`.

    Raises:
        ValueError: If the state was made for other parameters, or for another placement.

    Examples:
        >>> import jax, jax.numpy as jnp, zenflow_jax
        >>> params = jax.device_put({"w": jnp.ones((8, 4))}, jax.devices()[0])
        >>> tx = zenflow_jax.zenflow(1e-2)
        >>> state = jax.jit(tx.init, out_shardings=params["w"].sharding)(params)
        >>> zenflow_jax.place(params, state).mail[0].sharding.memory_kind
        'pinned_host'
    """
    params, opt_state = as_pure(params), as_pure(opt_state)
    state = jax.tree.map(jax.numpy.asarray, find_state(opt_state))  # restored arrays may be NumPy's
    weights = weights_in_place(params, state)
    return replace_state(opt_state, put_back(state, weights, memories=True)[0])


def state_shardings(tx: Any, param_shapes: Any, param_shardings: Any) -> Any:
    """Returns the shardings, with memory kinds, of the state that `tx.init` makes.

    Pass them to jit (`out_shardings` of the function that makes the state, `in_shardings` and
    `out_shardings` of the step), or to a checkpoint library for restored arrays.

    Args:
        tx: A transformation that contains `zenflow`. On a mesh, `zenflow` needs `param_shardings`.
        param_shapes: The parameters, or their shapes from `jax.eval_shape`.
        param_shardings: Tree of shardings like the parameters, or a prefix of it.

    Returns:
        A tree of shardings like the state. In other transformations, an array with a parameter's
        path and shape has that parameter's sharding; all other arrays are replicated.

    Raises:
        ValueError: If `zenflow` does not know the mesh.

    Examples:
        >>> import jax, jax.numpy as jnp, zenflow_jax
        >>> params = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
        >>> on_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        >>> tx = zenflow_jax.zenflow(1e-2)
        >>> shardings = zenflow_jax.state_shardings(tx, params, on_device)
        >>> shardings.mail[0].memory_kind
        'pinned_host'
    """
    params = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        param_shapes,
        jax.tree.broadcast(param_shardings, param_shapes),
    )
    opt_state = jax.eval_shape(tx.init, params)
    state = find_state(opt_state)
    weights = weights_in_place(params, state, abstract=True)
    paths = jax.tree_util.tree_leaves_with_path(params)
    everywhere = paths[0][1].sharding
    if isinstance(everywhere, NamedSharding):
        everywhere = NamedSharding(everywhere.mesh, REPLICATED)

    longest_first = sorted(paths, key=lambda pair: -len(pair[0]))

    def sharding_of(path: Any, x: Any) -> Any:
        for param_path, param in longest_first:
            if x.shape == param.shape and path[len(path) - len(param_path) :] == param_path:
                return param.sharding
        return everywhere

    shardings = jax.tree_util.tree_map_with_path(sharding_of, opt_state)
    placed = jax.tree.map(lambda x: x.sharding, with_shardings(state, weights))
    return replace_state(shardings, placed)


def weights_in_place(params: Any, state: ZenFlowState, *, abstract: bool = False) -> list[Any]:
    """Returns the parameters of the state's leaves, after checking their placement."""
    leaves, _, places = match_leaves(params, state)
    weights = [leaves[i] for i in places]
    check_placement(weights, [leaf.spec for leaf in state.leaves], abstract=abstract)
    return weights
