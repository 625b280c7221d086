"""Checks what a step is given and says what is wrong with it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._plan.leaf import LeafSpec, plain_name
from zenflow_jax._plan.mesh import placement_of


def check_outside_of_shard_map(what: str) -> None:
    """Refuses calls inside `shard_map` and `pmap`, where each device would decide by itself."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes:
        raise ValueError(
            f"expected `{what}` outside of `jax.shard_map` and `jax.pmap`, got it inside one over "
            f"{', '.join(map(repr, axes))}: call it on the gradients that come out."
        )


def check_update(updates: Any, params: Any, state: Any, offload: bool) -> list[Any]:
    """The parameters' leaves; an error if they or the gradients are not those of the state."""
    if not isinstance(state, ZenFlowState) or state.offload != offload:
        got = (
            f"one with offload={state.offload}"
            if isinstance(state, ZenFlowState)
            else f"a {type(state).__name__}"
        )
        raise ValueError(
            f"expected the ZenFlowState that `tx.init(params)` returned, with offload={offload}, "
            f"got {got}."
        )
    if params is None:
        raise ValueError(
            "expected the parameters, as in `tx.update(gradients, opt_state, params)`, got None."
        )
    weights = jax.tree.leaves(params)
    specs = [leaf.spec for leaf in state.leaves]
    gradients = jax.tree.leaves(updates)
    for what, tree, leaves in (("gradients", updates, gradients), ("params", params, weights)):
        if len(leaves) != len(specs):
            raise ValueError(
                f"`{what}` must have the {len(specs)} leaves that `init` saw, got {len(leaves)}."
            )
        for (path, _), spec in zip(jax.tree.leaves_with_path(tree), specs, strict=True):
            if plain_name(path) != spec.name:
                raise ValueError(
                    f"`{what}` must have {spec.name} where `init` saw it, got {plain_name(path)}."
                )
        for x, spec in zip(leaves, specs, strict=True):
            if tuple(x.shape) != spec.shape:
                raise ValueError(
                    f"`{what}` must have shape {spec.shape} at {spec.name}, as `init` saw it, got "
                    f"{tuple(x.shape)}."
                )
    for x, spec in zip(weights, specs, strict=True):
        if np.dtype(x.dtype) != spec.dtype:
            raise ValueError(
                f"`params` must be {spec.dtype.name} at {spec.name}, as `init` saw it, got "
                f"{x.dtype}."
            )
    for x, spec in zip(gradients, specs, strict=True):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"`gradients` must be real floating point, got {x.dtype} at {spec.name}."
            )
    return weights


def check_placement(weights: Sequence[Any], specs: Sequence[LeafSpec]) -> None:
    """Refuses leaves that do not lie where the state takes them to be: on one device, or a mesh."""
    for weight, spec in zip(weights, specs, strict=True):
        if not isinstance(weight, jax.Array) or isinstance(weight, Tracer):
            raise TypeError(
                f"expected `params` of jax arrays, got {type(weight).__name__} at {spec.name}: use "
                "`jax.device_put`, outside of jit."
            )
        if 0 in spec.shape:
            continue  # an empty leaf has no place
        now, then = placement_of(weight), spec.placement
        if now is None and not isinstance(weight.sharding, jax.sharding.SingleDeviceSharding):
            raise ValueError(
                f"expected each leaf on one device or placed by a NamedSharding, got {spec.name} "
                f"on {weight.sharding}."
            )
        if then is None and now is not None and now.mesh.size > 1:
            raise ValueError(
                f"expected {spec.name} on one device, as the state takes it to be, got "
                f"{weight.sharding}: call `tx.init` outside of jit, or pass `param_shardings`."
            )
        if (
            then is not None
            and (then.mesh.size > 1 or now is not None)
            and (
                now is None
                or now.mesh.shape_tuple != then.mesh.shape_tuple
                or now.cuts != then.cuts
            )
        ):
            raise ValueError(
                f"expected {spec.name} divided by the mesh axes {then.block} of "
                f"{dict(then.mesh.shape)}, as `tx.init` saw it, got {weight.sharding}: keep it "
                "there, as by `jax.jit(step, out_shardings=...)`."
            )
    devices = {frozenset(weight.sharding.device_set) for weight in weights}
    if len(devices) > 1:
        names = sorted(sorted(map(str, group)) for group in devices)
        raise ValueError(f"expected all leaves on the same devices, got {names[0]} and {names[1]}.")
