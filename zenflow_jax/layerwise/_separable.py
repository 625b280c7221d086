"""Refuses optimizers that cannot update one leaf at a time, from their traced programs."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

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


def check_separable(optimizer: optax.GradientTransformation, name: str, tree: PyTree) -> None:
    """Refuses an optimizer whose result for one leaf of a block depends on another leaf."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    paths = [path for path, _ in pairs]
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for _, x in pairs]
    keys = [path[-1] if path else jax.tree_util.SequenceKey(0) for path in paths]
    twins = treedef.unflatten(_Twins(key, x, x) for key, x in zip(keys, shapes, strict=True))
    alone = (
        treedef.unflatten([x if i == j else None for i in range(len(pairs))])
        for j, x in enumerate(shapes)
    )

    def updates(g: PyTree, params: PyTree) -> Any:
        """Returns the updates of many steps, in which a state may carry a leaf to another."""

        def step(state: PyTree, _: object) -> tuple[Any, Any]:
            updates, state = optimizer.update(g, state, params)
            return state, updates

        return jax.lax.scan(step, optimizer.init(params), length=2)[1]

    try:
        closed = jax.make_jaxpr(updates)(twins, twins)
        for x in alone:
            jax.eval_shape(updates, x, x)
    except Exception as error:
        error.add_note(
            f"This happened in `optimizer`, which gets only gradients and weights, one leaf at a "
            f"time: the tree of {name} with None in place of all other leaves. Masks and labels "
            "must be functions of one layer's tree, and a state must keep its shapes."
        )
        raise
    equations = (x for jaxpr in jaxprs(closed) for x in jaxpr.eqns)
    if any(x.primitive.name.startswith(("random_", "threefry")) for x in equations):
        raise ValueError(
            "`optimizer` draws random numbers, which would be the same for leaves of the same "
            "shape, because it updates one leaf at a time. Use an optimizer without random numbers."
        )
    count = 2 * len(paths)
    for j, path in enumerate(paths):
        live = live_inputs(closed.jaxpr, [i == 2 * j for i in range(count)])
        if others := {i % count for i in live} - {2 * j}:
            other = paths[min(others) // 2]
            raise ValueError(
                f"`optimizer` mixes leaves: its update of {leaf_name(name, path)} also depends on "
                f"{leaf_name(name, other) if other != path else 'leaves like it'}, but a trainer "
                "updates one leaf at a time. Clip the global norm with `max_grad_norm`."
            )


def leaf_name(name: str, path: jax.tree_util.KeyPath) -> str:
    """Returns a leaf's name from its block's name and its key path in the block."""
    inner = jax.tree_util.keystr(path, simple=True, separator=".")
    return f"{name}.{inner}" if inner else name
