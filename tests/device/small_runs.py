"""Small runs of `zenflow` in optax, for tests of the transformation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import zenflow_jax
from tests import runs
from tests.runs import KERNEL, Leaf, apply

DEVICE = jax.devices()[0]
STEPS = 5
SETTINGS = {"topk_ratio": 0.3, "update_interval": 2, "select_interval": 2}
# 2 of the 6 channels of "weight" are selected.
LEAVES = Leaf("bias", (3,), None, "float32"), Leaf("weight", (6, 3), -2, "float32")


def schedule(count):
    return 1e-2 / (1.0 + 0.5 * count.astype(jnp.float32))


def make(learning_rate: Any = schedule, **options):
    return zenflow_jax.zenflow(learning_rate, **{**SETTINGS, **options})


def leaves_in(dtype: str):
    return tuple(leaf._replace(dtype=dtype) for leaf in LEAVES)


def example_params(dtype: str = "float32"):
    return runs.initial(leaves_in(dtype))


def gradients_at(step: int, dtype: str = "float32"):
    return jax.device_put(runs.gradients(leaves_in(dtype), step), DEVICE)


def train(tx, steps=STEPS, *, params=None, gradients=gradients_at, prepare=lambda t, state: None):
    """Returns parameters and state after `steps` exchanges; `prepare` changes a state."""
    params = example_params() if params is None else params
    state, update = tx.init(params), jax.jit(tx.update)
    engine = zenflow_jax.HostEngine(params, state, **KERNEL)
    for t in range(1, steps + 1):
        prepare(t, state)
        with jax.numpy_dtype_promotion("standard"):  # optax's wrappers promote dtypes
            updates, state = update(gradients(t), state, params)
        params = apply(params, updates)
        params, state = engine.exchange(params, state)
    engine.close()
    return params, state


PLAIN = make()  # for all runs without a wrapper, so that they share a program


@functools.cache
def alone():
    """Returns the parameters of the run without a wrapper."""
    return train(PLAIN)[0]


def exchanged(state):
    """Returns the state after an exchange, as far as the next step depends on it."""
    return state._replace(token=jnp.zeros_like(state.token))


def describe(tree):
    """Returns everything about a tree's arrays except the numbers."""
    return [
        (
            jax.tree_util.keystr(path),
            x.dtype.name,
            x.shape,
            x.weak_type,
            x.sharding,
            x.sharding.memory_kind,
            x.committed,
        )
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]
