"""Two leaves and their states, for wrong calls of `zenflow` and of engines."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zenflow_jax import zenflow

DEVICE = jax.devices()[0]
SETTINGS = {"topk_ratio": 0.3, "update_interval": 2, "select_interval": 2}
PARAMS = jax.device_put({"bias": jnp.zeros(3), "weight": jnp.ones((6, 3))}, DEVICE)
SQUARE = {"bias": jnp.zeros(3), "weight": jnp.ones((3, 6))}
NO_STATE, TWO_STATES = "contains 0 ZenFlowStates", "contains 2 ZenFlowStates"
IN_HOST_MEMORY = "memory_kind=pinned_host), but was on one device, in device memory"


def make(learning_rate: Any = 1e-2, **options: Any) -> Any:
    return zenflow(learning_rate, **{**SETTINGS, **options})


TX = make()
STATE = TX.init(PARAMS)


def assert_told(call: Callable[[], Any], exception: Any, word: str) -> None:
    with pytest.raises(exception) as caught:
        call()
    assert word in str(caught.value)


def with_weight_in_host_memory(params: Any) -> Any:
    place = jax.sharding.SingleDeviceSharding(DEVICE, memory_kind="pinned_host")
    return {**params, "weight": jax.device_put(params["weight"], place)}


def numpy_of(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def shapes_of(tree: Any) -> Any:
    return jax.eval_shape(lambda: tree)


def step_of(tx: Any) -> Any:
    @jax.jit
    def step(params, state):
        gradients = jax.tree.map(lambda p: jnp.sin(3 * p) + 0.1, params)
        with jax.numpy_dtype_promotion("standard"):  # optax promotes dtypes
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

    return step


step = step_of(TX)
