"""Without offloaded leaves, `zenflow` is a plain transformation: no engine, no host memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.comparisons import assert_same_bits
from zenflow_jax import HostEngine, find_state, zenflow
from zenflow_jax._device.memory import HOST

RTOL = 1e-5  # a few float32 roundings in each of some steps
OPTIONS = {"weight_decay": 1e-2, "max_grad_norm": 1e3}  # never clips
PARAMS = {"a": jnp.zeros((2, 2)), "b": jnp.zeros((3, 2, 4)), "c": jnp.zeros(3)}
TARGET = {"a": jnp.eye(2), "b": jnp.full((3, 2, 4), -1.0), "c": jnp.ones(3)}
ALL_RESIDENT = {
    "vectors": {"params": {"c": PARAMS["c"], "d": jnp.zeros(())}},
    "all channels": {"topk_ratio": 1, "send_gradients": "after_step", "rolling": False},
    "named": {"resident": lambda path, leaf: True, "full_warm_up_rounds": 2},
}


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax's own transformations need it
        yield


@pytest.fixture(params=ALL_RESIDENT.values(), ids=ALL_RESIDENT)
def problem(request):
    """Returns zenflow and parameters."""
    options = dict(request.param)
    params = options.pop("params", PARAMS)
    return zenflow(1e-1, **OPTIONS, **options), params


def step_of(tx, scale=1.0):
    def step(params, state):
        g = {name: scale * 2 * (p - TARGET.get(name, 1.0)) for name, p in params.items()}
        updates, state = tx.update(g, state, params, unexpected=1)
        return optax.apply_updates(params, updates), state

    return step


def scanned(tx, params, steps=300):
    def body(carry, _):
        return step_of(tx)(*carry), None

    return jax.lax.scan(body, (params, tx.init(params)), length=steps)[0]


def assert_close(trees, others):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, RTOL, 1e-6), trees, others)


def test_it_equals_adamw_in_a_scan(problem):
    tx, params = problem
    ours, state = scanned(tx, params)
    expected = optax.with_extra_args_support(optax.adamw(1e-1, weight_decay=1e-2))
    assert_close(ours, scanned(expected, params)[0])
    assert int(state.step) == 300


@pytest.mark.parametrize(
    ("wrap", "calls"),
    # The parameters do not change between micro-steps, so the mean is each gradient.
    [
        (lambda tx: optax.MultiSteps(tx, 4).gradient_transformation(), 12),
        (lambda tx: optax.apply_if_finite(tx, 3), 3),
    ],
)
def test_wrappers_that_withhold_updates_work_with_and_without_an_engine(problem, wrap, calls):
    tx, params = problem
    wrapped = wrap(tx)
    step = jax.jit(step_of(wrapped))
    made = with_engine = params, jax.jit(wrapped.init)(params)
    with HostEngine(*with_engine) as engine:
        for _ in range(calls):
            made = step(*made)
            with_engine = engine.exchange(*step(*with_engine))
    assert_same_bits(made, with_engine)
    assert_close((made[0], find_state(made[1])), scanned(tx, params, 3))


def test_an_engine_changes_nothing_and_may_come_late_miss_steps_and_resume(problem):
    tx, params = problem
    good, bad = (jax.jit(step_of(tx, scale), donate_argnums=(0, 1)) for scale in (1.0, np.nan))
    first, *steps, last = good, good, good, bad, good, good
    made = expected = first(*jax.tree.map(jnp.copy, (params, tx.init(params))))
    made = jax.tree.map(jnp.copy, made)
    for step in (*steps, last):
        expected = step(*expected)
    assert not np.isnan(jax.tree.leaves(expected[0])[0]).any()
    assert HOST not in {x.sharding.memory_kind for x in jax.tree.leaves(expected)}
    with HostEngine(*made) as engine:
        for step in steps:
            made = step(*made)
            for returned in (engine.exchange(*made), engine.flush(*made)):
                assert returned[0] is made[0]
                assert returned[1] is made[1]
        assert engine.stats.steps == len(steps)
        engine_state = engine.state()
    with HostEngine(*made, engine_state=engine_state) as engine:
        assert_same_bits(engine.exchange(*last(*made)), expected)
