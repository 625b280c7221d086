"""A scan over layers in host memory: while one is at work, the next one is on its way.

Its backward pass computes each layer again, from what went into it. So neither other layers'
weights nor what was inside of them are on the device. Gradients of layers in host memory leave for
it one layer after the other, too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zenflow_jax._device.host_slices import check_slices
from zenflow_jax._device.memory import fetch_layer
from zenflow_jax._spec.leaf import is_hosted


def scan_fetched(
    body: Callable[[Any, tuple[Any, Any, Any]], tuple[Any, Any]],
    carry: Any,
    layers: Any,
    still: Any,
    probes: Any,
) -> tuple[Any, Any]:
    """`jax.lax.scan` over (layers, still, probes), of which arrays may be in host memory.

    By `still` there is no derivative. Probes are not fetched: nobody reads their values.
    """
    lengths = {x.shape[0] for x in jax.tree.leaves((layers, still, probes))}
    if len(lengths) > 1:
        raise ValueError(f"Layers have stacks of {sorted(lengths)} entries. Stack as many of each.")
    hosted, layers = _divided(layers, is_hosted)
    fixed, still = _divided(still, is_hosted)
    floats, numbers = _divided((layers, probes), _is_float)
    moving, rest = _divided(carry, _is_float)
    others = numbers, still

    def one(varied: Any, constant: Any) -> Any:
        (moving, hosted, floats), (rest, fixed, (numbers, still)) = varied, constant
        layers, probes = _joined(floats, numbers)
        layer = _joined(hosted, layers), _joined(fixed, still), probes
        carry, y = body(_joined(moving, rest), layer)
        (moving, rest), (y, y_rest) = _divided(carry, _is_float), _divided(y, _is_float)
        return (moving, y), (rest, y_rest)

    first, (first_floats, first_others) = fetch_layer((hosted, fixed), 0), _first((floats, others))
    example = (moving, first[0], first_floats), (rest, first[1], first_others)
    # What the body reads besides has derivatives as well.
    one, consts = jax.closure_convert(one, *example)
    run = jax.custom_vjp(lambda varied, fixed: _forward(one, varied, fixed)[0])
    run.defvjp(partial(_differentiated, one), partial(_backward, one))
    carry, ys = run((moving, hosted, floats, consts), (rest, fixed, others))
    return _joined(*carry), _joined(*ys)


def _forward(one: Callable, varied: Any, constant: Any) -> tuple[Any, Any]:
    """The scan, and what its backward pass needs: what went into each layer."""
    (moving, hosted, floats, consts), (rest, fixed, others) = varied, constant
    hosted, fixed = check_slices((hosted, fixed))
    order = _order((hosted, fixed))

    def step(state: Any, layer: Any) -> Any:
        (moving, rest), fetched = state
        i, floats, others = layer
        following = fetch_layer((hosted, fixed), jnp.minimum(i + 1, order[-1]))
        made = one((moving, fetched[0], floats), (rest, fetched[1], others), *consts)
        (new, y), (new_rest, y_rest) = made
        return ((new, new_rest), following), ((moving, rest), (y, y_rest))

    state = (moving, rest), fetch_layer((hosted, fixed), 0)
    (carry, _), (carries, ys) = jax.lax.scan(step, state, (order, floats, others))
    return (carry, ys), (carries, hosted, floats, consts, fixed, others)


def _differentiated(one: Callable, varied: Any, constant: Any) -> tuple[Any, Any]:
    """`_forward` where there are derivatives; refuses `jax.vmap` around it."""
    _outside_of_vmap(varied[0])
    return _forward(one, varied, constant)


@jax.custom_batching.custom_vmap
def _outside_of_vmap(carry: Any) -> Any:
    return carry


@_outside_of_vmap.def_vmap
def _refuse_vmap(*_: Any) -> Any:
    # It would add the gradients of all examples up where they are, in host memory.
    raise ValueError(
        "`jax.vmap` around `streaming.scan_layers` cannot differentiate layers in host memory. "
        "Call it in the body: `lambda x, layer: (jax.vmap(block, (0, None))(x, layer), None)`."
    )


def _backward(one: Callable, residuals: Any, g: Any) -> tuple[Any, Any]:
    carries, hosted, floats, consts, fixed, others = residuals
    (g_moving, _), (g_ys, _) = g
    order = _order((hosted, fixed))

    def step(state: Any, layer: Any) -> Any:
        g_moving, g_consts, fetched = state
        i, (moving, rest), floats, others, g_y = layer
        following = fetch_layer((hosted, fixed), jnp.maximum(i - 1, 0))

        def again(varied: Any, consts: Any) -> Any:
            return one(varied, (rest, fetched[1], others), *consts)

        _, pull, _ = jax.vjp(again, (moving, fetched[0], floats), consts, has_aux=True)
        (g_moving, g_layer, g_floats), more = pull((g_moving, g_y))
        # Mail is there; zeros in its place, of a layer that is not used, are not.
        g_layer = jax.device_put(g_layer, jax.memory.Space.Host)
        g_floats = jax.tree.map(_in_memory_of, g_floats, floats)
        return (g_moving, jax.tree.map(jnp.add, g_consts, more), following), (g_layer, g_floats)

    zeros = jax.tree.map(jnp.zeros_like, consts)
    state = g_moving, zeros, fetch_layer((hosted, fixed), len(order) - 1)
    scanned = order, carries, floats, others, g_ys
    state, (g_hosted, g_floats) = jax.lax.scan(step, state, scanned, reverse=True)
    return (state[0], g_hosted, g_floats, state[1]), None


def _order(stacked: Any) -> np.ndarray:
    return np.arange(len(jax.tree.leaves(stacked)[0]))


def _first(stacked: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.index_in_dim(x, 0, keepdims=False), stacked)


def _divided(tree: Any, belongs: Callable[[Any], bool]) -> tuple[Any, Any]:
    """The leaves that belong, and the others; None in the place of each other."""
    ours = jax.tree.map(lambda x: x if belongs(x) else None, tree)
    return ours, jax.tree.map(lambda x: None if belongs(x) else x, tree)


def _joined(*trees: Any) -> Any:
    def one(*leaves: Any) -> Any:
        return next((x for x in leaves if x is not None), None)

    return jax.tree.map(one, *trees, is_leaf=lambda x: x is None)


def _in_memory_of(x: Any, like: Any) -> Any:
    # Once: XLA for GPUs fails where something is put there that is there already (jax 0.10.2).
    moves = is_hosted(like) and not is_hosted(x)
    return jax.device_put(x, jax.memory.Space.Host) if moves else x


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
