"""`zenflow` inside wrappers of optax, flax and jax behaves as it does alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenflow_jax
from tests import comparisons
from tests.device.small_runs import (
    PLAIN,
    SETTINGS,
    alone,
    example_params,
    gradients_at,
    make,
    schedule,
    train,
)


def injected(learning_rate: Any = schedule, **options):
    factory = optax.inject_hyperparams(zenflow_jax.zenflow, static_args=zenflow_jax.STATIC_ARGS)
    return factory(learning_rate, **{**SETTINGS, **options})


# Each function takes zenflow's options and returns a transformation equivalent to zenflow alone.
WRAPPERS = {
    "masked": lambda **o: optax.masked(make(**o), {"bias": True, "weight": True}),
    "partition": lambda **o: optax.partition(
        {"ours": make(**o), "frozen": optax.set_to_zero()}, {"bias": "ours", "weight": "ours"}
    ),
    "inject_hyperparams": injected,
    "apply_if_finite": lambda **o: optax.apply_if_finite(make(**o), 3),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_transformation_behaves_as_it_does_alone(wrapper):
    tx = WRAPPERS[wrapper]()
    state = tx.init(example_params())
    marked = optax.tree_map_params(tx, lambda _: "params", state, transform_non_params=lambda _: 0)
    ours = zenflow_jax.find_state(marked)
    assert set(jax.tree.leaves(ours.leaves)) == {"params"}
    assert (ours.step, ours.skipped) == (0, 0)
    params, _ = train(tx)
    comparisons.assert_close([params], [alone()])


def test_an_injected_learning_rate_can_change_between_steps_and_stays_float32():
    # optax casts hyperparameters to the parameters' dtype; bfloat16(0.999) is 1.
    factory = optax.inject_hyperparams(
        zenflow_jax.zenflow, zenflow_jax.STATIC_ARGS, hyperparam_dtype=jnp.float32
    )
    gradients = functools.partial(gradients_at, dtype="bfloat16")
    tx, params = factory(1e-2, **SETTINGS), example_params("bfloat16")
    expected, _ = train(PLAIN, 3, params=params, gradients=gradients)

    def set_rate(t, state):
        state.hyperparams["learning_rate"] = schedule(jnp.int32(t - 1))

    params, _ = train(tx, 3, params=params, gradients=gradients, prepare=set_rate)
    for key in expected:
        np.testing.assert_array_equal(params[key], expected[key])
