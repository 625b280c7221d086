"""`benchmarks/step_time.py`: each peer's step is correct, and so are the reported figures."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from benchmarks.step_time_model import Model, committed
from benchmarks.step_time_peers import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    PEERS,
    WEIGHT_DECAY,
    Runner,
    adamw,
)
from tests.comparisons import assert_same_bits
from tests.compilations import times_compiled

STEPS = 3
# Two programs sum float32 in different orders; an element whose gradient is near zero may then
# take an Adam step of any size, and differently rounded bf16 weights change the next gradient.
ATOL = 0.02 * STEPS * LEARNING_RATE
VOCABULARY, LENGTH = 32, 8


pytestmark = pytest.mark.usefixtures("promotion_as_users_have_it")


class Bigram(nnx.Module):
    """Compiles quickly. The parked part of `scale` has a parameter's shape and dtype."""

    def __init__(self):
        options = {"param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
        self.embed = nnx.Embed(VOCABULARY, 16, **options)
        self.scale = nnx.Param(jnp.ones((1, 1, 16), jnp.float32))
        self.head = nnx.Linear(16, VOCABULARY, use_bias=False, **options)

    def losses(self, tokens, targets):
        logits = self.head(self.embed(tokens) * self.scale[...]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


@pytest.fixture(scope="module")
def model():
    graphdef, shapes = nnx.split(nnx.eval_shape(Bigram))
    return Model(graphdef, nnx.as_pure(shapes), lambda: committed(nnx.as_pure(nnx.state(Bigram()))))


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(VOCABULARY, size=(8, 2, LENGTH + 1), dtype=np.int32)


@pytest.fixture(scope="module")
def limit(model, tokens):
    """Runs the peer `adamw` for some steps."""
    runner = Runner(PEERS["adamw"], model, tokens)
    with jax.numpy_dtype_promotion("standard"):
        runner.set_up()
        runner.advance(STEPS)
        runner.settle()
    return runner


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


@pytest.mark.slow
def test_parked_state_is_bit_identical_to_state_on_the_device_and_stays_in_host_memory(
    model, tokens, limit
):
    runner = Runner(PEERS["parked"], model, tokens)
    runner.set_up()
    kinds = jax.tree.map(lambda x: x.sharding.memory_kind, runner.state)
    runner.advance(STEPS)
    runner.settle()
    assert_same_bits(runner.params, limit.params)
    assert_same_bits(runner.state, limit.state)
    assert jax.tree.map(lambda x: x.sharding.memory_kind, runner.state) == kinds
    matrices = sum(x.size for x in jax.tree.leaves(runner.params) if x.ndim > 1)
    assert runner.parked_bytes == 12 * matrices
    assert limit.parked_bytes == 0
    assert times_compiled(runner._step) == 1
