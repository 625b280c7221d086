"""The optimizer that `benchmarks/step_time.py` compares with is correct."""

import jax
import jax.numpy as jnp
import optax
import pytest

from benchmarks.step_time_peers import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    adamw,
)
from tests.comparisons import assert_same_bits

pytestmark = pytest.mark.usefixtures("promotion_as_users_have_it")


def test_mixed_precision_adamw_equals_optax_adamw_on_masters_and_rounds_them():
    optimizer = adamw()
    tx = optax.chain(
        optax.clip_by_global_norm(MAX_GRAD_NORM),
        optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY),
    )
    keys = jax.random.split(jax.random.key(0), 6)
    params = {"w": jax.random.normal(keys[0], (5, 3), jnp.bfloat16), "scale": jnp.ones(3)}
    state = optimizer.init(params)
    weights = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    moments = tx.init(weights)

    @jax.jit
    def expected_step(gradients, moments, weights):
        updates, moments = tx.update(gradients, moments, weights)
        return optax.apply_updates(weights, updates), moments

    apply = jax.jit(optimizer.apply)
    for key in keys[1:]:
        gradients = jax.tree.map(
            lambda p, key=key: jax.random.normal(key, p.shape).astype(p.dtype), params
        )
        params, state = apply(gradients, state, params)
        exact = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        weights, moments = expected_step(exact, moments, weights)
        assert_same_bits(state.master, weights)
        assert_same_bits(params, jax.tree.map(lambda w, p: w.astype(p.dtype), weights, params))
    assert params["w"].dtype == jnp.bfloat16
