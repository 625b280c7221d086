"""Refuses optimizers that cannot update one leaf at a time, from their traced programs."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from zenflow_jax.layerwise._optimizer import alone
from zenflow_jax.layerwise._tracing import jaxprs, live_inputs


class _Twins:
    """Two leaves in place of one, under the same key.

    If an optimizer mixes a label's leaves, it mixes twins, even where a block has one such leaf.
    """

    def __init__(self, key: Any, first: Any, second: Any):
        self.key, self.first, self.second = key, first, second


jax.tree_util.register_pytree_with_keys(
    _Twins,
    lambda twins: (((twins.key, twins.first), (twins.key, twins.second)), twins.key),
    lambda key, pair: _Twins(key, *pair),
)


def check_separable(optimizer: optax.GradientTransformation, name: str, tree: Any) -> None:
    """Refuses an optimizer whose result for one leaf of a block depends on another leaf."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for _, x in pairs]
    paths = [path for path, _ in pairs]
    keys = [path[-1] if path else jax.tree_util.SequenceKey(0) for path in paths]
    params = treedef.unflatten(_Twins(key, x, x) for key, x in zip(keys, shapes, strict=True))
    try:
        init, state = jax.make_jaxpr(optimizer.init, return_shape=True)(params)
        update, made = jax.make_jaxpr(optimizer.update, return_shape=True)(params, state, params)
        for one in (alone(treedef, j, x) for j, x in enumerate(shapes)):
            jax.eval_shape(optimizer.update, one, jax.eval_shape(optimizer.init, one), one)
    except Exception as error:
        error.add_note(
            f"This happened in `optimizer`, called with the tree of {name}, in which each leaf was "
            "a pair, or all but one were None. A trainer updates one leaf at a time, without other "
            "arguments than gradients and weights: masks and labels must be functions of one "
            "layer's tree, in which other leaves are None."
        )
        raise
    equations = (x for jaxpr in (*jaxprs(init), *jaxprs(update)) for x in jaxpr.eqns)
    if any(x.primitive.name.startswith(("random_", "threefry")) for x in equations):
        raise ValueError(
            "`optimizer` draws random numbers, which would be the same for leaves of the same "
            "shape, because it updates one leaf at a time. Use an optimizer without random numbers."
        )
    if [(x.shape, x.dtype) for x in jax.tree.leaves(made[1])] != [
        (x.shape, x.dtype) for x in jax.tree.leaves(state)
    ]:
        raise ValueError(
            "`optimizer` changes the shapes or dtypes of its state in an update, so its state has "
            "no fixed place in host memory. Use an optimizer whose state keeps them."
        )
    for j, path in enumerate(paths):
        read = _read(init, update, 2 * j, 2 * len(paths), len(jax.tree.leaves(state)))
        if read - {2 * j}:
            other = paths[min(read - {2 * j}) // 2]
            raise ValueError(
                f"`optimizer` mixes leaves: its update of {leaf_name(name, path)} also depends on "
                f"{leaf_name(name, other) if other != path else 'leaves like it'}, but a trainer "
                "updates one leaf at a time. Clip the global norm with `max_grad_norm`; otherwise "
                "use an optimizer that treats each leaf by itself."
            )


def _read(init: Any, update: Any, leaf: int, count: int, states: int) -> set[int]:
    """Returns the leaves whose gradients or weights ever reach the update of a leaf.

    `update` is (gradients, state, params) -> (updates, new state), and what reaches the state in
    one step reaches the updates of the next.
    """
    known: set[int] = set()
    while True:
        wanted = [i == leaf for i in range(count)] + [i in known for i in range(states)]
        inputs = live_inputs(update.jaxpr, wanted)
        reached = {i - count for i in inputs if count <= i < count + states}
        if reached <= known:
            break
        known |= reached
    leaves = {i % (count + states) for i in inputs} - set(range(count, count + states))
    return leaves | live_inputs(init.jaxpr, [i in known for i in range(states)])


def leaf_name(name: str, path: Any) -> str:
    """Returns a leaf's name from its block's name and its key path in the block."""
    inner = jax.tree_util.keystr(path, simple=True, separator=".")
    return f"{name}.{inner}" if inner else name
