"""The float32 weights of a run: what device, host and parameters each know, put together."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from zenflow_jax._channels import LeafSpec, along, positions, spread
from zenflow_jax._engine import HostEngine
from zenflow_jax._shards import Here, Layout, on_each_device
from zenflow_jax._state import find_state, match_leaves


def master_params(params: Any, opt_state: Any, engine: HostEngine | None = None) -> Any:
    """The masters of all parameters, float32, of which low-precision parameters are the casts.

    To keep a trained model at full precision. An update that is under way is waited for, and is in
    the result although it has not reached `params` yet; the gradients of an open window are in
    nothing. Call `engine.flush` (or `zenflow_jax.flush`) before, and result and parameters agree.

    Args:
        params: The parameters that the last `exchange` or `flush` returned.
        opt_state: The state that it returned.
        engine: The engine; None for `zenflow(..., offload=False)`.

    Returns:
        A tree like `params` of float32 arrays, placed like them: 4 bytes per parameter on the
        devices. Leaves that the state does not know (of `optax.masked`) are as they are.

    Raises:
        RuntimeError: If the engine is closed or has failed.
        ValueError: If the state or the parameters do not belong to it, or it is missing.
    """
    params = nnx.as_pure(params)
    state = find_state(nnx.as_pure(opt_state))
    if state.offload != (engine is not None):
        raise ValueError(
            "expected the engine with the state of `zenflow(..., offload=True)`, and none with "
            f"offload=False, got offload={state.offload} and {type(engine).__name__}. Pass the "
            "engine that trained, as the third argument, or leave it out."
        )
    weights, treedef, places = match_leaves(params, state)
    hosts = iter(()) if engine is None else engine._masters(state)
    for place, leaf in zip(places, state.leaves, strict=True):
        if leaf.deferred is not None:
            host = leaf.deferred.master
        else:
            host = None if leaf.spec.resident else next(hosts)
        weights[place] = _master(weights[place], leaf.master, leaf.channels, host, spec=leaf.spec)
    return jax.tree.unflatten(treedef, weights)


@partial(jax.jit, static_argnames="spec")
def _master(
    weight: Array,
    selected: Array | None,
    channels: Array | None,
    host: Array | None,
    *,
    spec: LeafSpec,
) -> Array:
    """One leaf: `host` on deferred channels; on the others `selected`, or the parameter itself."""
    layout = Layout(spec)
    if channels is None:
        return (weight if selected is None else selected).astype(jnp.float32)

    def one(
        here: Here, weight: Array, selected: Array | None, channels: Array, host: Array
    ) -> Array:
        place = positions(here.index(channels), here.block.n)
        mine = weight if selected is None else spread(here.gather(selected), place, here.block)
        return jnp.where(along(place >= 0, here.block), mine, here.gather(host))

    takes = [layout.block, selected if selected is None else layout.part, layout.channels]
    return on_each_device(one, spec, [*takes, layout.part], layout.block)(
        weight, selected, channels, host
    )
