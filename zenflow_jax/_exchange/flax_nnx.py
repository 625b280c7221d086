"""The parameters and the optimizer state in objects of flax nnx.

flax is imported on first use, because that takes as long as importing this whole library.
"""

from collections.abc import Callable, Sequence
from typing import Any


def is_nnx_pair(values: Sequence[Any]) -> bool:
    from flax import nnx

    return len(values) >= 2 and all(map(isinstance, values, (nnx.Module, nnx.Optimizer)))


def is_graphdef(x: Any) -> bool:
    from flax import nnx

    return isinstance(x, nnx.GraphDef)


def merged_nnx(
    graphdef: Any, state: Any, fields: tuple[str, str] | None
) -> tuple[Any, Any, Callable[[], Any]]:
    """Merges an `nnx.State`; returns model, optimizer, and a function that returns their state."""
    from flax import nnx

    both = nnx.merge(graphdef, state)
    if fields is not None:
        model, optimizer = (getattr(both, name) for name in fields)
        return model, optimizer, lambda: nnx.state(both)
    parts = both if isinstance(both, tuple | list) else vars(both).values()
    models, optimizers = (
        [x for x in parts if isinstance(x, k)] for k in (nnx.Module, nnx.Optimizer)
    )
    if (len(models), len(optimizers)) != (1, 1):
        raise TypeError(
            f"The `nnx.State` belongs to a {type(both).__name__} with {len(models)} models and "
            f'{len(optimizers)} optimizers. Name one of each: `attach(step, fields=("model", '
            '"optimizer"))`.'
        )
    return models[0], optimizers[0], lambda: nnx.state(both)


def nnx_arrays(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Returns a pair's parameters and optimizer state; rejects other objects."""
    from flax import nnx

    for name, x, kind in (("model", model, nnx.Module), ("optimizer", optimizer, nnx.Optimizer)):
        if not isinstance(x, kind):
            raise TypeError(
                f"`{name}` is a {type(x).__name__}, not an `nnx.{kind.__name__}`. Pass the model "
                "and the `nnx.Optimizer`, in this order. For trees of arrays, use the methods "
                "without `_nnx`."
            )
    params = nnx.as_pure(nnx.state(model, optimizer.wrt))
    return params, nnx.as_pure(optimizer.opt_state)


def update_nnx(model: Any, optimizer: Any, params: Any, opt_state: Any) -> None:
    from flax import nnx

    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))
