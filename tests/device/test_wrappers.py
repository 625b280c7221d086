"""`zenflow` inside the wrappers of optax, flax and jax does what it does alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zenflow_jax
from tests.device.small_runs import (
    ATOL,
    PLAIN,
    SETTINGS,
    SHAPES,
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


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_inside_a_wrapper_it_does_what_it_does_alone(wrapper):
    params, _ = train(WRAPPERS[wrapper]())
    assert_close(params, alone())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_engine_serves_it_inside_a_wrapper(wrapper):
    tx = WRAPPERS[wrapper](offload=True)
    params = example_params()
    state = tx.init(params)
    update = jax.jit(tx.update)
    with zenflow_jax.HostEngine(params, state, host_kernel="numpy", threads=1) as engine:
        for t in range(1, STEPS + 1):
            with jax.numpy_dtype_promotion("standard"):
                updates, state = update(gradients_at(t), state, params)
            params, state = engine.exchange(apply(params, updates), state)
        assert_close(params, alone())
        engine.flush(params, state)
    assert engine.stats.steps == STEPS


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_tree_map_params_reaches_the_state_inside_a_wrapper(wrapper, offload):
    tx = WRAPPERS[wrapper](offload=offload)
    state = tx.init(example_params())
    same = optax.tree_map_params(tx, lambda x: x, state)
    assert jax.tree.structure(same) == jax.tree.structure(state)

    marked = optax.tree_map_params(tx, lambda _: "params", state, transform_non_params=lambda _: 0)
    ours = zenflow_jax.find_state(marked)
    assert set(jax.tree.leaves(ours.leaves)) == {"params"}
    assert (ours.step, ours.skipped) == (0, 0)


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


@pytest.mark.parametrize(
    "make_tx",
    [
        lambda tx: optax.masked(tx, {"bias": False, "weight": False}),
        lambda tx: optax.partition(
            {"ours": tx, "sgd": optax.sgd(1e-2)}, {"bias": "sgd", "weight": "sgd"}
        ),
    ],
    ids=["masked", "partition"],
)
def test_a_group_without_leaves_is_no_problem(make_tx):
    tx = make_tx(make(offload=True))
    params = example_params()
    state = tx.init(params)
    _, new = tx.update(gradients_at(1), state, params)
    assert jax.tree.structure(new) == jax.tree.structure(state)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("empty", [{}, (), {"none": None}], ids=str)
def test_parameters_without_leaves_keep_the_structure_of_the_state(empty, offload):
    tx = make(offload=offload)
    state = tx.init(empty)
    updates, new = tx.update(empty, state, empty)
    assert updates == empty
    assert jax.tree.structure(new) == jax.tree.structure(state)


@pytest.mark.parametrize("start", [1e-2, jnp.float32(1e-2)], ids=["number", "array"])
def test_an_injected_learning_rate_may_be_set_between_steps(start):
    tx = injected(start)
    params = example_params()
    state = tx.init(params)
    update = jax.jit(tx.update)
    for t in range(1, STEPS + 1):
        state.hyperparams["learning_rate"] = schedule(jnp.int32(t - 1))
        with jax.numpy_dtype_promotion("standard"):
            updates, state = update(gradients_at(t), state, params)
        params = apply(params, updates)
    assert_close(params, alone())


@pytest.mark.slow
def test_injected_hyperparameters_of_low_precision_leaves_are_kept_in_float32():
    # optax gives hyperparameters the parameters' dtype; bfloat16(0.999) is 1.
    params = example_params("bfloat16")
    factory = optax.inject_hyperparams(
        zenflow_jax.zenflow, zenflow_jax.STATIC_ARGS, hyperparam_dtype=jnp.float32
    )
    gradients = functools.partial(gradients_at, dtype="bfloat16")
    actual, _ = train(factory(schedule, **SETTINGS), 3, params=params, gradients=gradients)
    expected, _ = train(PLAIN, 3, params=params, gradients=gradients)
    for key in expected:
        np.testing.assert_array_equal(actual[key], expected[key])


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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_multi_steps_makes_one_step_of_several_and_none_in_between(dtype):
    gradients = functools.partial(gradients_at, dtype=dtype)
    tx = optax.MultiSteps(make(), every_k_schedule=2)
    params = example_params(dtype)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for t in range(1, 4):
        for last in (False, True):
            # The mean of a gradient and itself is that gradient.
            with jax.numpy_dtype_promotion("standard"):
                updates, state = update(gradients(t), state, params)
            assert last or not any(u.any() for u in jax.tree.leaves(updates))
            params = apply(params, updates)
            assert int(zenflow_jax.find_state(state).step) == (t if last else t - 1)
    expected, _ = train(PLAIN, 3, params=example_params(dtype), gradients=gradients)
    assert_close(params, expected)


class Model(nnx.Module):
    def __init__(self, params):
        self.bias = nnx.Param(params["bias"])
        self.weight = nnx.Param(params["weight"])
        self.seen = nnx.Variable(jnp.zeros((), jnp.int32))  # no parameter


@nnx.jit
def nnx_step(model, optimizer, gradients):
    def loss(model):  # whose gradients are those
        return sum(jnp.sum(getattr(model, key)[...] * g) for key, g in gradients.items())

    optimizer.update(model, nnx.grad(loss)(model))


def nnx_params(model):
    return {key: getattr(model, key)[...] for key in SHAPES}


def test_an_engine_serves_an_nnx_optimizer_in_place():
    model = Model(example_params())
    optimizer = nnx.Optimizer(model, make(offload=True), wrt=nnx.Param)
    with zenflow_jax.HostEngine(
        nnx.state(model, nnx.Param), optimizer.opt_state, host_kernel="numpy", threads=1
    ) as engine:
        for t in range(1, STEPS + 1):
            nnx_step(model, optimizer, gradients_at(t))
            engine.exchange_nnx(model, optimizer)
        assert_close(nnx_params(model), alone())
        engine.flush_nnx(model, optimizer)


@pytest.mark.slow
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


def test_scan_equals_a_loop():
    def step(carry, gradients):
        params, state = carry
        updates, state = PLAIN.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), None

    params = example_params()
    gradients = jax.tree.map(lambda *g: jnp.stack(g), *map(gradients_at, range(1, STEPS + 1)))
    (params, state), _ = jax.jit(functools.partial(jax.lax.scan, step))(
        (params, PLAIN.init(params)), gradients
    )
    assert_close(params, alone())
    assert int(state.step) == STEPS


@pytest.mark.slow
def test_vmap_equals_a_loop_over_models():
    def several(first, start):
        return jax.tree.map(lambda *x: jnp.stack(x), *(first(start + i) for i in range(2)))

    def params_of(model):
        return jax.tree.map(lambda p: p + model, example_params())

    params = several(lambda model: params_of(float(model)), 0)
    state = jax.vmap(PLAIN.init)(params)
    update = jax.jit(jax.vmap(PLAIN.update))
    for t in range(1, 4):
        updates, state = update(several(gradients_at, 10 * t), state, params)
        params = optax.apply_updates(params, updates)
    for model in range(2):
        expected, _ = train(
            PLAIN,
            3,
            params=params_of(float(model)),
            gradients=lambda t, model=model: gradients_at(10 * t + model),
        )
        assert_close(jax.tree.map(lambda p, model=model: p[model], params), expected)
