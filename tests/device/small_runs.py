"""Small runs of `zenflow` in optax, for tests of the transformation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import zenflow_jax
from tests.runs import KERNEL, apply

# Float32 parameters up to 3 (a unit in the last place is 2.4e-7), from the same operations compiled
# into another program; updates are near 1e-2.
ATOL = 1e-6

DEVICE = jax.devices()[0]
STEPS = 5
SETTINGS = {"topk_ratio": 0.3, "update_interval": 2, "select_interval": 2}
# Each parameter's shape: 2 of the 6 channels of "weight" are selected.
SHAPES = {"bias": (3,), "weight": (6, 3)}


def schedule(count):
    return 1e-2 / (1.0 + 0.5 * count.astype(jnp.float32))


def make(learning_rate: Any = schedule, **options):
    return zenflow_jax.zenflow(learning_rate, **{**SETTINGS, **options})


def example_params(dtype: Any = "float32"):
    rng = np.random.default_rng(1)
    params = {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
    # Committed to a device like a jitted step's results; otherwise the second step would compile
    # again.
    return jax.device_put(jax.tree.map(lambda p: jnp.asarray(p, dtype), params), DEVICE)


def gradients_at(step: int, dtype: Any = "float32"):
    rng = np.random.default_rng(100 + step)
    gradients = {
        # Channels of very different size, so that selections change.
        k: rng.normal(size=s).astype(np.float32) * np.exp(rng.normal(size=(*s[:-1], 1)))
        for k, s in SHAPES.items()
    }
    return jax.device_put(jax.tree.map(lambda g: jnp.asarray(g, dtype), gradients), DEVICE)


def train(tx, steps=STEPS, *, params=None, gradients=gradients_at, prepare=lambda t, state: None):
    """Returns parameters and state after `steps` exchanges; `prepare` changes a state."""
    params = example_params() if params is None else params
    state, update = tx.init(params), jax.jit(tx.update)
    engine = zenflow_jax.HostEngine(params, state, **KERNEL)
    for t in range(1, steps + 1):
        prepare(t, state)
        with jax.numpy_dtype_promotion("standard"):  # optax's wrappers are not strict-clean
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


def assert_close(actual, desired):
    for key in desired:
        a, b = (np.asarray(x[key], np.float32) for x in (actual, desired))
        np.testing.assert_allclose(a, b, rtol=0, atol=ATOL, err_msg=key)


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
