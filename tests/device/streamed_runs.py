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
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"up": (LAYERS, WIDTH, INNER), "down": (LAYERS, INNER, WIDTH)}
    layers = {
        name: (jax.random.normal(key, shape) / 6).astype(dtype)
        for key, (name, shape) in zip(keys[:2], shapes.items(), strict=True)
    }
    layers["scale"] = jnp.ones((LAYERS, WIDTH), dtype)
    head = jax.random.normal(keys[2], (WIDTH, 5)).astype(dtype)
    # From NumPy, because a process cannot copy its device arrays to other processes' devices.
    params = jax.device_get({"layers": layers, "head": head})
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
        y = rng.integers(0, 5, 32)
        x = rng.normal(size=(32, WIDTH)) + y[:, None]
        yield jnp.asarray(x, dtype), jnp.asarray(y)


def run(dtype, *, stream, steps=14, bad=None, shardings=None, **options):
    """Returns parameters and their leaves' state after some steps and a flush."""
    tx = zenflow_jax.zenflow(3e-2, **(OPTIONS | options))
    params = model(dtype, shardings)
    opt_state = tx.init(params)

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
            x = x.at[0, 0].set(jnp.nan) if i == bad else x
            params, opt_state = step(params, opt_state, x, y)
            params, opt_state = engine.exchange(params, opt_state)
        params, opt_state = engine.flush(params, opt_state)
    state = zenflow_jax.find_state(opt_state)
    return params, state.leaves, state.grad_norm
