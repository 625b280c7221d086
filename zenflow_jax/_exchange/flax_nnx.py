"""The parameters and the optimizer state in objects of flax nnx.

flax is imported on first use, because that takes as long as importing this whole library.
"""

from typing import Any


def nnx_arrays(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Returns the parameters and the optimizer state of a pair."""
    from flax import nnx

    params = nnx.as_pure(nnx.state(model, optimizer.wrt))
    return params, nnx.as_pure(optimizer.opt_state)


def update_nnx(model: Any, optimizer: Any, params: Any, opt_state: Any) -> None:
    from flax import nnx

    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))
