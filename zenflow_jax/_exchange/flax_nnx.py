"""The parameters and the optimizer state in objects of flax nnx.

flax is imported on first use, because that takes as long as importing this whole library.
"""

from collections.abc import Callable

from jaxtyping import PyTree


def call_nnx(
    method: Callable[..., tuple[PyTree, PyTree]], model: object, optimizer: object
) -> None:
    """Calls an engine's method with a pair's arrays, and updates the pair in place."""
    from flax import nnx

    if not isinstance(model, nnx.Module) or not isinstance(optimizer, nnx.Optimizer):
        raise TypeError(
            f"The arguments are a {type(model).__name__} and a {type(optimizer).__name__}. Pass an "
            "`nnx.Module` and its `nnx.Optimizer`; for trees of arrays, use the methods without "
            "`_nnx`."
        )
    params = nnx.as_pure(nnx.state(model, optimizer.wrt))
    params, opt_state = method(params, nnx.as_pure(optimizer.opt_state))
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))
