"""The parameters and the optimizer state in objects of flax nnx.

flax is imported on first use, because that takes as long as importing this whole library.
"""

from typing import Any


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
