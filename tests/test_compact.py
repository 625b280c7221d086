"""`compact` rounds Adam's moments exactly as the host does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenflow_jax
from tests.comparisons import assert_same_bits
from zenflow_jax._compact import _decode, _encode
from zenflow_jax._host.arrays import HostArray

pytestmark = pytest.mark.usefixtures("as_scripts_run")

SHAPES = [(40, 96), (3, 9, 100), (70, 31), (5, 2)]


def numbers(shape, *, first):
    """Returns numbers of all sizes, in large, tiny and zero buckets."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * np.exp(4 * rng.standard_normal(shape))
    x[rng.random(shape) < 0.2] = 0
    scales = rng.choice([0, 1e-25, 1e-12, 1, 1e10], size=(*shape[:-1], 1))
    x = (x * scales).astype(np.float32)
    return x if first else x * x


def on_the_host(x, *, first):
    """Returns the host's moment with these numbers."""
    width = x.shape[-1]
    moment = HostArray.zeros((1, x.size // width, width), np.int8 if first else np.uint8)
    moment.write(x)
    return moment


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_scales_and_decoded_moments_are_the_hosts_bit_for_bit(shape, first, jit):
    x = numbers(shape, first=first)
    with jax.disable_jit(not jit):
        moment = jax.jit(_encode, static_argnums=1)(x, first)
        decoded = jax.jit(_decode)(*moment)
        again = jax.jit(_encode, static_argnums=1)(decoded, first)
    host = on_the_host(x, first=first)
    scales = host.extra.reshape(*shape[:-1], -1)
    assert_same_bits([*moment], [host.values.reshape(shape), scales])
    assert_same_bits(decoded, host.as_float32().reshape(shape))
    assert_same_bits(again, moment)


def some_params(dtype=jnp.float32):
    rng = np.random.default_rng(1)
    shapes = {"kernel": (3, 40), "scale": (40,), "stack": (2, 5, 64)}
    params = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), params)


def some_gradients(params, step):
    rng = np.random.default_rng(step)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape) * 10.0 ** (step % 3), x.dtype), params
    )


def updates_of(tx, params, steps=4):
    """Returns updates and last state of steps, one operation at a time: none is fused."""
    with jax.disable_jit():
        state, updates = tx.init(params), []
        for step in range(steps):
            new, state = tx.update(some_gradients(params, step), state, params)
            updates.append(new)
    return updates, state


def test_updates_are_those_of_adamw_with_moments_that_the_host_rounded():
    params, adamw = some_params(), optax.adamw(1e-2)

    def rounded(moments, first):
        def one(x):
            return on_the_host(np.asarray(x), first=first).as_float32().reshape(x.shape)

        return {name: one(x) if x.ndim > 1 else x for name, x in moments.items()}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        new: Any = adamw.update(updates, state, params)
        updates, (adam, *rest) = new
        adam = adam._replace(mu=rounded(adam.mu, True), nu=rounded(adam.nu, False))
        return updates, (adam, *rest)

    reference, _ = updates_of(optax.GradientTransformation(adamw.init, update), params)
    updates, _ = updates_of(zenflow_jax.compact(adamw), params)
    assert_same_bits(updates, reference)
    plain, _ = updates_of(adamw, params)
    assert_same_bits(updates[-1]["scale"], plain[-1]["scale"])
    assert not np.array_equal(updates[-1]["kernel"], plain[-1]["kernel"])


ADAM_FOR_ALL: Any = {"w": None}


@pytest.mark.parametrize(
    ("optimizer", "in_float32", "in_bfloat16"),  # bytes for each parameter
    [
        (optax.adamw(1e-3), 2.1875, 2.1875),
        (optax.adamw(1e-3, mu_dtype=jnp.bfloat16), 2.1875, 2.1875),
        (optax.lion(1e-3), 1.0625, 1.0625),
        (optax.contrib.muon(1e-3, muon_weight_dimension_numbers=ADAM_FOR_ALL), 2.1875, 2.1875),
        (optax.contrib.muon(1e-3), 4, 2),  # its own momentum stays
    ],
)
def test_a_state_takes_few_bytes_and_keeps_its_structure(optimizer, in_float32, in_bfloat16):
    tx = zenflow_jax.compact(optimizer)
    for dtype, per_parameter in ((jnp.float32, in_float32), (jnp.bfloat16, in_bfloat16)):
        params = {"w": jnp.ones((64, 96), dtype)}
        state = jax.jit(tx.init)(params)
        _, new = jax.jit(tx.update)(params, state, params)
        assert jax.eval_shape(tx.init, params) == jax.eval_shape(lambda x: x, state)
        moments = [x for x in jax.tree.leaves(new) if x.ndim > 1]
        assert sum(x.nbytes for x in moments) == per_parameter * params["w"].size
