"""`zenflow` inside wrappers of optax behaves as it does alone."""

import functools

import jax
import optax
import pytest

import zenflow_jax
from tests import comparisons
from tests.runs import BUSY, FEW, Plan, Training
from zenflow_jax import zenflow

PLAN = Plan(5)
LEAVES = FEW[::2]  # in float32, which `apply_if_finite` needs
NAMES = [leaf.name for leaf in LEAVES]
WRAPPERS = {
    "masked": lambda **o: optax.masked(zenflow(**o), dict.fromkeys(NAMES, True)),
    "partition": lambda **o: optax.partition(
        {"ours": zenflow(**o), "frozen": optax.set_to_zero()}, dict.fromkeys(NAMES, "ours")
    ),
    "inject_hyperparams": optax.inject_hyperparams(zenflow, static_args=zenflow_jax.STATIC_ARGS),
    "apply_if_finite": lambda **o: optax.apply_if_finite(zenflow(**o), 3),
}


@functools.cache
def alone():
    with Training(LEAVES, BUSY) as training:
        return training.history(PLAN)


@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_transformation_behaves_as_it_does_alone(make):
    with Training(LEAVES, BUSY, make=make) as training:
        marked = optax.tree_map_params(
            training.tx, lambda _: "params", training.state, transform_non_params=lambda _: 0
        )
        ours = zenflow_jax.find_state(marked)
        assert set(jax.tree.leaves(ours.leaves)) == {"params"}
        assert (ours.step, ours.skipped) == (0, 0)
        history = training.history(PLAN)
    comparisons.assert_close(history.params, alone().params)
    comparisons.assert_same_bits(history.selected, alone().selected)
