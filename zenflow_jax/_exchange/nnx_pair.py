"""Converts a flax nnx model and its optimizer to trees of arrays, and back.

Imported on first use: flax takes as long to import as all of this library.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def is_pair(values: Sequence[Any]) -> bool:
    """Whether a model and an optimizer come first."""
    return (
        len(values) >= 2
        and isinstance(values[0], nnx.Module)
        and isinstance(values[1], nnx.Optimizer)
    )


def arrays(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Parameters and optimizer state.

    Raises:
        TypeError: If it is no such pair.
    """
    for name, x, kind in (("model", model, nnx.Module), ("optimizer", optimizer, nnx.Optimizer)):
        if not isinstance(x, kind):
            raise TypeError(
                f"expected `{name}` to be an `nnx.{kind.__name__}`, got {type(x).__name__}. Pass "
                "the model and the `nnx.Optimizer` themselves, in this order; for trees of arrays "
                "there are the methods without `_nnx`."
            )
    params = nnx.as_pure(nnx.state(model, optimizer.wrt))
    return params, nnx.as_pure(optimizer.opt_state)


def update(model: nnx.Module, optimizer: nnx.Optimizer, params: Any, opt_state: Any) -> None:
    """Puts both into the pair."""
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))


def copy_with(model: Any, optimizer: nnx.Optimizer, find: Callable[[Any, Any], Any]) -> Any:
    """A model like `model` with the parameters that `find(params, opt_state)` gives.

    Neither changes the other: what is not trained is copied.
    """
    new = find(*arrays(model, optimizer))
    graphdef, params, others = nnx.split(model, optimizer.wrt, ...)
    # New variables of the same arrays: `merge` would give the copy those of the model.
    params = jax.tree.map(lambda x: x, params)
    copy = nnx.merge(graphdef, params, jax.tree.map(jnp.copy, others))
    nnx.update(copy, new)
    return copy
