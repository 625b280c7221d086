"""`zenflow` inside wrappers of optax, flax and jax behaves as it does alone."""

from typing import Any

import jax
import optax
import pytest

import zenflow_jax
from tests import comparisons
from tests.device.small_runs import (
    SETTINGS,
    alone,
    example_params,
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
