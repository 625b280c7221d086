"""`zenflow` inside the wrappers of optax, flax and jax does what it does alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenflow_jax
from tests.device.small_runs import (
    ATOL,
    PLAIN,
    SETTINGS,
    STEPS,
    alone,
    apply,
    assert_close,
    example_params,
    gradients_at,
    make,
    schedule,
    train,
)


def injected(learning_rate: Any = schedule, **options):
    factory = optax.inject_hyperparams(zenflow_jax.zenflow, static_args=zenflow_jax.STATIC_ARGS)
    return factory(learning_rate, **{**SETTINGS, **options})


# Each takes zenflow's options and gives a transformation that does the same as zenflow alone.
WRAPPERS = {
    "chain": lambda **o: optax.chain(optax.scale(4.0), optax.scale(0.25), make(**o)),
    "masked": lambda **o: optax.masked(make(**o), {"bias": True, "weight": True}),
    "partition": lambda **o: optax.partition(
        {"ours": make(**o), "frozen": optax.set_to_zero()}, {"bias": "ours", "weight": "ours"}
    ),
    "inject_hyperparams": injected,
    "apply_if_finite": lambda **o: optax.apply_if_finite(make(**o), 3),
}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_inside_a_wrapper_it_does_what_it_does_alone(wrapper, offload):
    tx = WRAPPERS[wrapper](offload=offload)
    state = tx.init(example_params())
    marked = optax.tree_map_params(tx, lambda _: "params", state, transform_non_params=lambda _: 0)
    ours = zenflow_jax.find_state(marked)
    assert set(jax.tree.leaves(ours.leaves)) == {"params"}
    assert (ours.step, ours.skipped) == (0, 0)
    params, _ = train(tx, offload=offload)
    assert_close(params, alone())


@pytest.mark.parametrize("offload", [True, False])
def test_optax_finds_and_sets_by_name_what_is_in_a_chain(offload):
    state = optax.chain(optax.clip(1.0), make(offload=offload)).init(example_params())
    assert optax.tree.get(state, "step") is state[1].step
    assert optax.tree.get(state, "ZenFlowState") is state[1]
    assert optax.tree.get(state, "no such name") is None
    reached = {id(x) for _, x in optax.tree.get_all_with_path(state, "mu")}
    assert reached >= {id(leaf.mu) for leaf in state[1].leaves}
    new = optax.tree.set(state, skipped=jnp.int32(3))
    assert int(optax.tree.get(new, "skipped")) == 3
    assert jax.tree.structure(new) == jax.tree.structure(state)


def test_partition_gives_each_group_its_own_optimizer():
    labels = {"bias": "sgd", "weight": "ours"}
    params, _ = train(optax.partition({"ours": make(), "sgd": optax.sgd(1e-2)}, labels))
    np.testing.assert_allclose(params["weight"], alone()["weight"], rtol=0, atol=ATOL)
    expected, _ = train(optax.sgd(1e-2))
    np.testing.assert_allclose(params["bias"], expected["bias"], rtol=0, atol=ATOL)


def test_apply_if_finite_keeps_a_bad_step_from_being_counted():
    tx = optax.apply_if_finite(make(), 3)

    def with_a_bad_step(t):
        bad = jax.tree.map(lambda g: g * jnp.nan, gradients_at(t))
        return bad if t == 3 else gradients_at(t if t < 3 else t - 1)

    params, state = train(tx, STEPS + 1, gradients=with_a_bad_step)
    assert_close(params, alone())
    assert int(state.total_notfinite) == 1
    assert int(zenflow_jax.find_state(state).step) == STEPS
    assert int(zenflow_jax.find_state(state).skipped) == 0


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("params", [{}, (), {"none": None}, {"kept": jnp.ones(3)}], ids=str)
def test_a_tree_or_a_group_without_leaves_is_no_problem(params, offload):
    tx = optax.masked(make(offload=offload), jax.tree.map(lambda _: False, params))
    state = tx.init(params)
    updates, new = tx.update(params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.structure(new) == jax.tree.structure(state)


def test_an_injected_learning_rate_may_be_set_between_steps_and_is_kept_in_float32():
    # optax gives hyperparameters the parameters' dtype; bfloat16(0.999) is 1.
    factory = optax.inject_hyperparams(
        zenflow_jax.zenflow, zenflow_jax.STATIC_ARGS, hyperparam_dtype=jnp.float32
    )
    gradients = functools.partial(gradients_at, dtype="bfloat16")
    tx, params = factory(1e-2, **SETTINGS), example_params("bfloat16")
    expected, _ = train(PLAIN, 3, params=params, gradients=gradients)
    state, update = tx.init(params), jax.jit(tx.update)
    for t in range(1, 4):
        state.hyperparams["learning_rate"] = schedule(jnp.int32(t - 1))
        with jax.numpy_dtype_promotion("standard"):
            updates, state = update(gradients(t), state, params)
        params = apply(params, updates)
    for key in expected:
        np.testing.assert_array_equal(params[key], expected[key])


@pytest.mark.parametrize("offload", [False, True])
def test_jit_equals_eager(offload):
    # A boundary at every step, so that one step has all there is.
    tx = make(offload=offload, update_interval=1, select_interval=1, max_grad_norm=1.0)
    params = example_params()
    eager = tx.update(gradients_at(1), tx.init(params), params, value=1.0)  # for others in a chain
    compiled = jax.jit(tx.update)(gradients_at(1), tx.init(params), params)
    assert jax.tree.structure(compiled) == jax.tree.structure(eager)
    for a, b in zip(jax.tree.leaves(compiled), jax.tree.leaves(eager), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=ATOL, atol=ATOL)


def test_scan_and_vmap_equal_loops():
    def step(carry, gradients):
        params, state = carry
        updates, state = PLAIN.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), None

    def several(of_model):
        return jax.tree.map(lambda *x: jnp.stack(x), *of_model)

    def params_of(model):
        return jax.tree.map(lambda p: p + float(model), example_params())

    # The gradients of each step, of either model.
    gradients = several(
        [several([gradients_at(10 * model + t) for t in range(1, 4)]) for model in range(2)]
    )

    def run(params, gradients):
        return jax.lax.scan(step, (params, PLAIN.init(params)), gradients)[0]

    params, state = jax.jit(jax.vmap(run))(several([params_of(0), params_of(1)]), gradients)
    assert state.step.tolist() == [3, 3]
    for model in range(2):
        expected, _ = train(
            PLAIN,
            3,
            params=params_of(model),
            gradients=lambda t, model=model: gradients_at(10 * model + t),
        )
        assert_close(jax.tree.map(lambda p, model=model: p[model], params), expected)
