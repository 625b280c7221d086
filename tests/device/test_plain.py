"""Without offloaded leaves, `zenflow` is a plain transformation: no engine, no host memory.

The checks are those of optax's tests for contributed optimizers (`contrib/_common_test.py`, optax
0.2.8), except for 16-bit leaves, whose updates are float32, and float64, which is rejected.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import zenflow_jax
from zenflow_jax import HostEngine, find_state, zenflow
from zenflow_jax._device.memory import HOST

RTOL = 1e-5  # a few float32 roundings in each of some steps
OPTIONS = {"weight_decay": 1e-2, "max_grad_norm": 1e3}  # never clips
ADAMW = {"weight_decay": 1e-2}
VECTORS = ((jnp.zeros(3), jnp.zeros(())), (jnp.array([1.0, -1.0, 2.0]), jnp.ones(())))
MATRICES = (
    {"a": jnp.zeros((2, 2)), "b": jnp.zeros((3, 2, 4)), "c": jnp.zeros(3)},
    {"a": jnp.eye(2), "b": jnp.full((3, 2, 4), -1.0), "c": jnp.ones(3)},
)


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax's own transformations need it
        yield


@pytest.fixture(
    params=[
        ({}, VECTORS),
        ({"topk_ratio": 1}, MATRICES),
        ({"topk_ratio": 1, "send_gradients": "after_step", "rolling": False}, MATRICES),
        ({"resident": lambda path, leaf: True, "full_warm_up_rounds": 2}, MATRICES),
    ],
    ids=["vectors", "all channels", "after_step", "resident"],
)
def problem(request):
    """Returns a function that makes zenflow, parameters, and a function for the gradients."""
    options, (params, target) = request.param

    def gradients(params):
        return jax.tree.map(lambda p, q: 2 * (p - q), params, target)

    def make(learning_rate=1e-1):
        return zenflow(learning_rate, **OPTIONS, **options)

    return make, params, gradients


def step_of(tx, gradients):
    def step(params, state):
        updates, state = tx.update(gradients(params), state, params, unexpected=1)
        return optax.apply_updates(params, updates), state

    return step


def scanned(tx, params, gradients, steps=300):
    def body(carry, _):
        return step_of(tx, gradients)(*carry), None

    return jax.lax.scan(body, (params, tx.init(params)), length=steps)[0]


def assert_close(trees, others):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, RTOL, 1e-6), trees, others)


def assert_same(trees, others):
    jax.tree.map(np.testing.assert_array_equal, trees, others)


def test_it_equals_adamw_in_a_scan_and_its_state_can_be_mapped(problem):
    make, params, gradients = problem
    tx = make()
    state = tx.init(params)
    assert_same(optax.tree_map_params(tx, lambda x: x, state), state)
    ours, state = scanned(tx, params, gradients)
    assert_close(ours, scanned(optax.adamw(1e-1, **ADAMW), params, gradients)[0])
    assert int(state.step) == 300


@pytest.mark.parametrize("wrap", ["MultiSteps", "apply_if_finite"])
def test_wrappers_that_withhold_updates_work_with_and_without_an_engine(problem, wrap):
    make, params, gradients = problem
    tx, calls = make(), 3
    if wrap == "MultiSteps":
        wrapped = optax.MultiSteps(tx, every_k_schedule=4).gradient_transformation()
        calls = 12  # the parameters do not change in between, so the mean is each gradient
    else:
        wrapped = optax.apply_if_finite(tx, 3)
    step, state = jax.jit(step_of(wrapped, gradients)), jax.jit(wrapped.init)(params)
    made = with_engine = params, state
    with HostEngine(*with_engine) as engine:
        for _ in range(calls):
            made = step(*made)
            with_engine = engine.exchange(*step(*with_engine))
    assert_same(made, with_engine)
    assert_close((made[0], find_state(made[1])), scanned(tx, params, gradients, 3))


def test_an_engine_changes_nothing_and_may_come_late_miss_steps_and_resume(problem, tmp_path):
    make, params, gradients = problem
    tx = make()

    def nans(params):
        return jax.tree.map(lambda g: g * jnp.nan, gradients(params))

    good, bad = (jax.jit(step_of(tx, g), donate_argnums=(0, 1)) for g in (gradients, nans))
    steps = [good, good, good, bad, good, good, good]

    def fresh():
        return jax.tree.map(jnp.copy, (params, tx.init(params)))

    expected = fresh()
    for step in steps:
        expected = step(*expected)
    assert not np.isnan(jax.tree.leaves(expected[0])[0]).any()
    assert HOST not in {x.sharding.memory_kind for x in jax.tree.leaves(expected)}

    made = steps[0](*fresh())
    with HostEngine(*made) as engine:
        for step in steps[1:5]:
            made = step(*made)
            returned = engine.exchange(*made)
            assert returned[0] is made[0]
            assert returned[1] is made[1]
        returned = engine.flush(*made)
        assert returned[0] is made[0]
        assert returned[1] is made[1]
        assert engine.stats.steps == 4
        engine_state = engine.state()
        with ocp.CheckpointManager(tmp_path) as manager:
            manager.save(0, args=zenflow_jax.EngineSave(engine))
            manager.wait_until_finished()
            restored = manager.restore(0, args=zenflow_jax.EngineRestore())
    HostEngine(*made, engine_state=restored).close()
    with HostEngine(*made, engine_state=engine_state) as engine:
        made = steps[6](*steps[5](*made))
        made = engine.exchange(*made)
    assert_same(made, expected)
