"""A scan over layers in host memory: while one is at work, the next one is on its way.

Its backward pass computes each layer again, from what went into it. So neither other layers'
weights nor what was inside of them are on the device. Gradients of layers in host memory leave for
it one layer after the other, too.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def in_host_memory(x: Any) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def scan_fetched(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, layers: Any
) -> tuple[Any, Any]:
    """`jax.lax.scan` over layers of which some arrays are in host memory."""
    hosted, layers = _divided(layers, in_host_memory)
    floats, others = _divided(layers, _is_float)
    moving, still = _divided(carry, _is_float)
    length = len(jax.tree.leaves(hosted)[0])
    numbers = jnp.arange(length)

    def one(moving: Any, fetched: Any, floats: Any, still: Any, others: Any) -> Any:
        carry, y = body(_joined(moving, still), _joined(fetched, floats, others))
        (moving, still), (y, y_others) = _divided(carry, _is_float), _divided(y, _is_float)
        return (moving, y), (still, y_others)

    def layer_of(stacked: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)

    # What the body reads besides has derivatives as well.
    one, consts = jax.closure_convert(
        one, moving, layer_of(hosted), layer_of(floats), still, layer_of(others)
    )

    @jax.custom_vjp
    def run(moving: Any, hosted: Any, floats: Any, consts: Any, still: Any, others: Any) -> Any:
        return forward(moving, hosted, floats, consts, still, others)[0]

    def forward(
        moving: Any, hosted: Any, floats: Any, consts: Any, still: Any, others: Any
    ) -> tuple[Any, Any]:
        def step(state: Any, layer: Any) -> Any:
            (moving, still), fetched = state
            i, floats, others = layer
            following = _fetch(hosted, jnp.minimum(i + 1, length - 1))
            (new, y), (new_still, y_others) = one(moving, fetched, floats, still, others, *consts)
            return ((new, new_still), following), ((moving, still), (y, y_others))

        first = (moving, still), _fetch(hosted, 0)
        last, (carries, ys) = jax.lax.scan(step, first, (numbers, floats, others))
        (moving, still), _ = last
        return ((moving, ys[0]), (still, ys[1])), (carries, hosted, floats, consts, others)

    def backward(residuals: Any, g: Any) -> Any:
        carries, hosted, floats, consts, others = residuals
        (g_moving, g_ys), _ = g

        def step(state: Any, layer: Any) -> Any:
            g_moving, g_consts, fetched = state
            i, (moving, still), floats, others, g_y = layer
            following = _fetch(hosted, jnp.maximum(i - 1, 0))

            def again(moving: Any, fetched: Any, floats: Any, consts: Any) -> Any:
                return one(moving, fetched, floats, still, others, *consts)

            _, pull, _ = jax.vjp(again, moving, fetched, floats, consts, has_aux=True)
            g_moving, g_layer, g_floats, more = pull((g_moving, g_y))
            g_consts = jax.tree.map(jnp.add, g_consts, more)
            g_layer = jax.device_put(g_layer, jax.memory.Space.Host)
            return (g_moving, g_consts, following), (g_layer, g_floats)

        zeros = jax.tree.map(jnp.zeros_like, consts)
        state = g_moving, zeros, _fetch(hosted, length - 1)
        scanned = numbers, carries, floats, others, g_ys
        state, (g_hosted, g_floats) = jax.lax.scan(step, state, scanned, reverse=True)
        g_moving, g_consts, _ = state
        return g_moving, g_hosted, g_floats, g_consts, None, None

    run.defvjp(forward, backward)
    (moving, y), (still, y_others) = run(moving, hosted, floats, consts, still, others)
    return _joined(moving, still), _joined(y, y_others)


def _fetch(hosted: Any, i: Any) -> Any:
    """Layer `i` of arrays in host memory, on the device."""
    layer = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), hosted)
    return jax.device_put(layer, jax.memory.Space.Device)


def _divided(tree: Any, belongs: Callable[[Any], bool]) -> tuple[Any, Any]:
    """The leaves that belong, and the others; None in the place of each other."""
    ours = jax.tree.map(lambda x: x if belongs(x) else None, tree)
    return ours, jax.tree.map(lambda x: None if belongs(x) else x, tree)


def _joined(*trees: Any) -> Any:
    def one(*leaves: Any) -> Any:
        return next((x for x in leaves if x is not None), None)

    return jax.tree.map(one, *trees, is_leaf=lambda x: x is None)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
