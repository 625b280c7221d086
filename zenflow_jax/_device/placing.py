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
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from zenflow_jax._device.leaves import match_leaves
from zenflow_jax._device.memory import HOST, read
from zenflow_jax._device.shards import REPLICATED, Shard
from zenflow_jax._device.state import ZenFlowState, find_state, places_of, replace_state
from zenflow_jax._spec.leaf import LeafSpec, as_pure
from zenflow_jax._spec.mesh import (
    ArrayOrShape,
    HasShape,
    MeshAxes,
    Placement,
    explicit_axes,
    placement_of,
)


def check_placement(weights: Sequence[Any], specs: Sequence[LeafSpec]) -> None:
    """Rejects a parameter that is not where `init` saw it: on one device, or on a mesh."""
    for weight, spec in zip(weights, specs, strict=True):
        if not isinstance(weight, jax.Array) or isinstance(weight, Tracer):
            raise TypeError(
                f"{spec.name} in `params` is {type(weight).__name__}, not a jax array. Use "
                "`jax.device_put`, outside jit."
            )
        if 0 in spec.shape:
            continue  # an empty leaf has no placement
        where, expected = _cuts(placement_of(weight)), _cuts(spec.placement)
        is_known = isinstance(weight.sharding, NamedSharding | SingleDeviceSharding)
        if where != expected or weight.sharding.memory_kind == HOST or not is_known:
            was = "on one device" if expected is None else f"divided by {expected[1]} of a mesh"
            raise ValueError(
                f"{spec.name} has the sharding {weight.sharding}, but was {was}, in device memory, "
                "in `tx.init`. Keep its sharding, for example with `jax.jit(step, "
                "out_shardings=...)`; call `tx.init` outside jit, or pass `param_shardings`."
            )


def _cuts(place: Placement | None) -> tuple[Any, MeshAxes] | None:
    return None if place is None or place.mesh.size == 1 else (place.mesh.shape_tuple, place.cuts)


def with_shardings(state: ZenFlowState, leaves: Sequence[ArrayOrShape]) -> ZenFlowState:
    """Adds a real state's shardings to an abstract state, as far as they are known."""
    known = [x.sharding for x in leaves if x.sharding is not None]
    meshes = [x for x in known if isinstance(x, NamedSharding) and not x.mesh.empty]
    if not known or (not meshes and isinstance(known[0], NamedSharding)):
        return state
    first, mail_kind = (meshes or known)[0], HOST if state.send_gradients.in_step else None

    def put(
        x: HasShape, spec: PartitionSpec, like: Sharding = first, kind: str | None = None
    ) -> jax.ShapeDtypeStruct:
        if isinstance(like, NamedSharding):
            like = NamedSharding(like.mesh, spec, memory_kind=kind)
        elif kind is not None:
            like = like.with_memory_kind(kind)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like)

    states, mail = [], []
    for leaf, sent, parameter in zip(state.leaves, state.mail, leaves, strict=True):
        like = parameter.sharding if isinstance(parameter.sharding, NamedSharding) else first
        shard = Shard(leaf.spec)
        layout = shard.partition(places_of(leaf.spec))
        states.append(jax.tree.map(partial(put, like=like), leaf, layout))
        at_host = None if sent is None else put(sent, shard.at_host(sent.ndim), like, mail_kind)
        mail.append(at_host)
    rest = state._replace(leaves=None, mail=None, step_scalars=None)
    return jax.tree.map(lambda x: put(x, REPLICATED), rest)._replace(
        leaves=state.leaves.replace(states),
        mail=tuple(mail),
        step_scalars=jax.tree.map(lambda x: put(x, REPLICATED, kind=mail_kind), state.step_scalars),
    )


def _is_at(x: jax.Array, where: jax.sharding.Sharding, *, typed: bool = False) -> bool:
    """Returns whether a program accepts `x` instead of an array with the sharding `where`.

    `typed` includes the type of arrays in host memory: a checkpoint library that assembles them
    from pieces leaves the type of arrays on the device (jax 0.10.2 and 0.12.0). A step is then
    traced once more, and a branch, as in `optax.MultiSteps`, cannot return them.
    """
    meshes = [s.mesh for s in (x.sharding, where) if isinstance(s, NamedSharding)]
    same = x.sharding.is_equivalent_to(where, x.ndim) and len({*map(explicit_axes, meshes)}) < 2
    if typed and where.memory_kind == HOST and len(where.device_set) == 1:
        same &= jax.typeof(x).memory_space == jax.memory.Space.Host
    return same or not x.size


def check_in_place(state: ZenFlowState, weights: Sequence[jax.Array]) -> None:
    """Rejects a state with arrays that are not where `tx.init` puts them.

    On a mesh, each device would mistake its piece of an array for other channels. Mail in device
    memory has not left during the step, and a branch cannot return it.
    """
    expected = jax.tree.leaves(with_shardings(state, weights))
    pairs = zip(jax.tree.leaves_with_path(state), expected, strict=True)
    misplaced = [path for (path, x), like in pairs if not _is_at(x, like.sharding)]
    if misplaced:
        of_leaves = [path[1].idx for path in misplaced if path[0].name in ("leaves", "mail")]
        names = [state.leaves[i].spec.name for i in of_leaves]
        names.append(jax.tree_util.keystr(misplaced[0]))
        raise ValueError(
            f"The state of {names[0]} is not where `tx.init(params)` puts it. Before the first "
            "step, call `zenflow_jax.place(params, opt_state)`, and pass the result's shardings to "
            'jit (docs/usage.md, "A state in another place").'
        )


def check_arrays(state: PyTree, kinds: type | tuple[type, ...] = jax.Array) -> None:
    """Rejects leaves that are not arrays, such as shapes that a checkpoint library left."""
    for path, x in jax.tree.leaves_with_path(state, is_leaf=lambda x: hasattr(x, "shape")):
        if not isinstance(x, kinds) or isinstance(x, Tracer):
            raise TypeError(
                f"The optimizer state contains a {type(x).__name__} instead of a jax array at "
                f"{jax.tree_util.keystr(path)}. Pass the step's state outside jit, for flax nnx to "
                "`exchange_nnx`; `zenflow_jax.place(params, opt_state)` puts restored NumPy arrays "
                "on the devices."
            )


def place(params: PyTree, opt_state: PyTree) -> Any:
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
    state = find_state(opt_state)
    check_arrays(state, (jax.Array, np.ndarray, np.generic, int, float))  # some may be restored
    state = jax.tree.map(jax.numpy.asarray, state)

    def put(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        if _is_at(x, like.sharding, typed=True):
            return x
        # Assembled arrays need a copy for another type.
        same = x.sharding.is_equivalent_to(like.sharding, x.ndim) and len(x.sharding.device_set) < 2
        return jax.device_put(np.array(read(x)) if same else x, like.sharding)

    expected = with_shardings(state, weights_in_place(params, state))
    return replace_state(opt_state, jax.tree.map(put, state, expected))


def weights_in_place(params: PyTree, state: ZenFlowState) -> list[Any]:
    """Returns the parameters of the state's leaves, after checking their placement."""
    specs = [leaf.spec for leaf in state.leaves]
    weights = match_leaves(params, specs).weights
    check_placement(weights, specs)
    return weights
