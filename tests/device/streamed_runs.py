"""Runs a model with or without streamed layers, for tests of streaming."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zenflow_jax
from tests.runs import KERNEL
from zenflow_jax import streaming

LAYERS, WIDTH, INNER = 3, 16, 36  # 36: the last number of packed signs is not full
OPTIONS = {
    "topk_ratio": 0.2,
    "update_interval": 3,
    "select_interval": 6,
    "full_warm_up_rounds": 2,
    "max_grad_norm": 0.5,
}


def model(dtype, shardings=None):
    rng = np.random.default_rng(0)
    shapes = {"up": (LAYERS, WIDTH, INNER), "down": (LAYERS, INNER, WIDTH)}
    layers = {name: rng.normal(size=shape) / 6 for name, shape in shapes.items()}
    layers["scale"] = np.ones((LAYERS, WIDTH))
    params = {"layers": layers, "head": rng.normal(size=(WIDTH, 5))}
    params = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), params)
    return jax.device_put(params, shardings or jax.local_devices()[0])


def block(x, layer):
    return x + jnp.tanh((x * layer["scale"][None]) @ layer["up"]) @ layer["down"], None


def loss(params, x, y, body=block):
    x, _ = streaming.scan_layers(body, x, params["layers"])
    logits = (x @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def batches(steps, dtype):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        y = rng.integers(0, 5, 32, np.int32)
        x = rng.normal(size=(32, WIDTH)) + y[:, None]
        yield x.astype(jnp.dtype(dtype)), y


def run(dtype, *, stream, steps=14, bad=None, shardings=None, **options):
    """Returns parameters and their leaves' state after some steps and a flush."""
    tx = zenflow_jax.zenflow(3e-2, **(OPTIONS | options), param_shardings=shardings)
    params = model(dtype, shardings)
    opt_state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params, opt_state, x, y):
        weights = streaming.stream(params, opt_state) if stream else params
        gradients = jax.grad(loss)(weights, x, y)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    with (
        jax.numpy_dtype_promotion("standard"),
        zenflow_jax.HostEngine(params, opt_state, **KERNEL) as engine,
    ):
        for i, (x, y) in enumerate(batches(steps, dtype)):
            x[0, 0] = np.nan if i == bad else x[0, 0]
            params, opt_state = step(params, opt_state, x, y)
            params, opt_state = engine.exchange(params, opt_state)
        params, opt_state = engine.flush(params, opt_state)
    state = zenflow_jax.find_state(opt_state)
    return params, state.leaves, state.grad_norm
