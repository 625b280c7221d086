"""A run's float32 weights, assembled from device, host and parameters."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from zenflow_jax._device.channels import broadcast_channels, gather_to_channels, positions, take
from zenflow_jax._device.leaves import match_leaves
from zenflow_jax._device.shards import BLOCK, HOST_ORDER, on_each_device
from zenflow_jax._device.state import LeafState, find_state, places_of
from zenflow_jax._device.step import current_masters, rounded
from zenflow_jax._engine import HostEngine
from zenflow_jax._spec.leaf import as_pure


def master_params(params: PyTree, opt_state: PyTree, engine: HostEngine) -> Any:
    """Returns the float32 masters, from which low-precision parameters are cast.

    For a parameter that has moved by provisional steps or lacks a pending update, the result is the
    parameter itself. Call `flush` first to merge all updates. If the masters do not fit on the
    devices, use `iter_master_params`.

    Args:
        params: The parameters that the last `exchange` or `flush` returned.
        opt_state: The state that the same call returned.
        engine: The engine that trained them.

    Returns:
        A tree like `params`, of float32 arrays with the parameters' placement. Leaves that are not
        in the state (with `optax.masked`) are returned unchanged.

    Raises:
        RuntimeError: If the engine is closed or has failed.
        ValueError: If state or parameters do not belong to the engine.

    Examples:
        >>> import jax, jax.numpy as jnp, zenflow_jax
        >>> params = jax.device_put({"w": jnp.ones((8, 4), jnp.bfloat16)}, jax.devices()[0])
        >>> opt_state = zenflow_jax.zenflow(1e-2).init(params)
        >>> with zenflow_jax.HostEngine(params, opt_state) as engine:
        ...     zenflow_jax.master_params(params, opt_state, engine)["w"].dtype
        dtype('float32')
    """
    masters = iter_master_params(params, opt_state, engine)
    return jax.tree.unflatten(jax.tree.structure(as_pure(params)), [x for _, x in masters])


def iter_master_params(
    params: PyTree, opt_state: PyTree, engine: HostEngine
) -> Iterator[tuple[jax.tree_util.KeyPath, Any]]:
    """Returns the leaves of `master_params` one by one, for example to write them to a file.

    Raises the errors of `master_params`, and an error if a step or flush runs in between. The
    devices hold one leaf's masters at a time if you drop them before you request the next leaf. In
    a run with several processes, every process must request all leaves.

    Args:
        params: As for `master_params`.
        opt_state: As for `master_params`.
        engine: As for `master_params`.

    Returns:
        Pairs of key path and masters, one for each leaf, in the order of `jax.tree.leaves(params)`.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, zenflow_jax
        >>> params = jax.device_put({"w": jnp.ones((8, 4), jnp.bfloat16)}, jax.devices()[0])
        >>> opt_state = zenflow_jax.zenflow(1e-2).init(params)
        >>> with zenflow_jax.HostEngine(params, opt_state) as engine:
        ...     for path, x in zenflow_jax.iter_master_params(params, opt_state, engine):
        ...         print(jax.tree_util.keystr(path), np.asarray(x).dtype)
        ['w'] float32
    """
    params, opt_state = as_pure(params), as_pure(opt_state)
    state = find_state(opt_state)
    places = match_leaves(params, [leaf.spec for leaf in state.leaves]).places
    numbers = itertools.count()  # offloaded leaf numbers
    leaf_at = {
        place: (leaf, None if leaf.spec.resident else next(numbers))
        for place, leaf in zip(places, state.leaves, strict=True)
    }
    # Before the first leaf is requested, so that a step in between is noticed.
    step, noted = engine.stats.steps, engine._settled(params, opt_state)

    def pairs() -> Iterator[tuple[jax.tree_util.KeyPath, Any]]:
        for place, (path, weight) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
            if place not in leaf_at:
                yield path, weight
                continue
            leaf, number = leaf_at[place]
            engine._check_usable()
            if engine._tokens.noted is not noted:
                raise RuntimeError(
                    f"Parameters changed while the masters of step {step} were being read. Read "
                    "all before the next step, `flush` or `iter_master_params`."
                )
            host = None if number is None else engine._updates.masters(number, weight)
            yield path, _master(weight, leaf.replace(spec=leaf.spec.anonymous), host)

    return pairs()


@jax.jit
def _master(weight: Array, leaf: LeafState, host: Array | None) -> Array:
    """Returns a leaf's masters: `host` on deferred channels, else the device's or the parameter.

    `host` is used only where the parameter is a cast of it.
    """
    spec = leaf.spec
    if leaf.channels is None:
        return current_masters(weight, leaf, spec).astype(jnp.float32)

    def masters(shard, weight, leaf, host):
        place = positions(shard.to_local(leaf.channels), shard.block.n)
        wide = selected = weight.astype(jnp.float32)
        if leaf.master is not None:
            selected_values = take(weight, shard.to_local(leaf.channels), shard.block)
            master = shard.gather(current_masters(shard.own(selected_values), leaf, shard.part))
            selected = gather_to_channels(master, place, shard.block)
        host = shard.gather(shard.block.turned(host))
        host = jnp.where(rounded(host, weight.dtype) == wide, host, wide)
        return jnp.where(broadcast_channels(place >= 0, shard.block), selected, host)

    takes = [BLOCK, places_of(spec), HOST_ORDER]
    return on_each_device(masters, spec, takes, BLOCK, weight, leaf, host)
