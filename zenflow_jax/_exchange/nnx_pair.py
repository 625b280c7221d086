"""Converts a flax nnx model and its optimizer to trees of arrays, and back.

flax is imported on first use: it takes as long to import as all of this library.
"""

from collections.abc import Sequence
from typing import Any


def is_pair(values: Sequence[Any]) -> bool:
    from flax import nnx

    kinds = nnx.Module, nnx.Optimizer
    return len(values) >= 2 and all(map(isinstance, values, kinds))


def arrays(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Parameters and optimizer state; refuses what is no such pair."""
    from flax import nnx

    for name, x, kind in (("model", model, nnx.Module), ("optimizer", optimizer, nnx.Optimizer)):
        if not isinstance(x, kind):
            raise TypeError(
                f"expected `{name}` to be an `nnx.{kind.__name__}`, got {type(x).__name__}. Pass "
                "the model and the `nnx.Optimizer` themselves, in this order; for trees of arrays "
                "there are the methods without `_nnx`."
            )
    params = nnx.as_pure(nnx.state(model, optimizer.wrt))
    return params, nnx.as_pure(optimizer.opt_state)


def update(model: Any, optimizer: Any, params: Any, opt_state: Any) -> None:
    from flax import nnx

    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))
