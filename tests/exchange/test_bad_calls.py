"""Wrong calls of a running engine; `test_bad_input.py` tests mistakes before a run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenflow_jax
from tests.mistakes import (
    DEVICE,
    IN_HOST_MEMORY,
    NO_STATE,
    PARAMS,
    SQUARE,
    STATE,
    TWO_STATES,
    TX,
    assert_told,
    make,
    numpy_of,
    shapes_of,
    step,
    step_of,
    with_weight_in_host_memory,
)
from zenflow_jax import HostEngine
from zenflow_jax.attach import attach


@pytest.fixture
def running():
    """Yields an engine after its first exchange, with the result."""
    engine = HostEngine(PARAMS, STATE, host_kernel="numpy")
    yield engine, *engine.exchange(*step(PARAMS, STATE))
    engine.close()  # no `with`: leaving a block would report unflushed updates


def finish(engine, params, state, steps=4, step=step):
    for _ in range(steps):
        params, state = engine.exchange(*step(params, state))
    return engine.flush(params, state)[0]


@pytest.fixture(scope="module")
def undisturbed():
    with HostEngine(PARAMS, STATE, host_kernel="numpy") as engine:
        return finish(engine, PARAMS, STATE, 5)


def on_device(tree):
    """Returns the tree in device memory, as from `jax.jit(tx.init, out_shardings=...)`."""
    place = jax.sharding.SingleDeviceSharding(DEVICE, memory_kind="device")
    return jax.device_put(tree, place)


MISPLACED = "The state of ['weight'] is not where `tx.init(params)` puts it"

# Calls with the first exchange's result.
BEFORE = [
    (lambda e, p, s: e.exchange(p, s), RuntimeError, "state of a new st"),
    (lambda e, p, s: e.exchange(p, optax.adam(1.0).init(p)), ValueError, NO_STATE),
    (lambda e, p, s: e.flush(p, (s, s)), ValueError, TWO_STATES),
    (lambda e, p, s: e.exchange(p, make(update_interval=1).init(p)), ValueError, "settings differ"),
    (lambda e, p, s: e.flush(p, numpy_of(s)), TypeError, "ndarray"),
    (lambda e, p, s: e.flush(p, STATE), RuntimeError, "the last `exchange` or `flush` returned"),
]
# Calls with the next step's result. A window closes here.
AFTER = [
    (lambda e, p, s: e.flush(p, s), RuntimeError, "Call `exchange` first"),
    (lambda e, p, s: e.exchange(SQUARE, s), ValueError, "is float32 (3, 6)"),
    (lambda e, p, s: e.exchange(numpy_of(p), s), TypeError, "ndarray"),
    (lambda e, p, s: e.exchange(with_weight_in_host_memory(p), s), ValueError, IN_HOST_MEMORY),
    (lambda e, p, s: e.exchange(p, numpy_of(s)), TypeError, "ndarray"),
    (lambda e, p, s: e.exchange(p, on_device(s)), ValueError, MISPLACED),
    (lambda e, p, s: e.exchange(p, shapes_of(s)), (TypeError, ValueError), "ShapeDtypeStruct"),
]


def test_the_engine_rejects_wrong_calls_and_the_run_continues(running, undisturbed):
    engine, *made = running
    for calls, advance in ((BEFORE, step), (AFTER, engine.exchange)):
        for call, exception, word in calls:
            assert_told(functools.partial(call, engine, *made), exception, word)
        assert engine.stats.steps == 1
        made = advance(*made)
    jax.tree.map(np.testing.assert_array_equal, finish(engine, *made, 3), undisturbed)


@pytest.mark.parametrize("tx", [TX, optax.MultiSteps(TX, 1)], ids=["alone", "in a branch"])
def test_a_state_in_device_memory_is_rejected_before_jax_reads_it_and_can_be_placed(tx):
    state = on_device(tx.init(PARAMS))
    call = functools.partial(HostEngine, PARAMS, state, host_kernel="numpy")
    assert_told(call, ValueError, MISPLACED)
    assert_told(functools.partial(attach(step_of(tx)), PARAMS, state), ValueError, MISPLACED)
    runs = []
    for first in zenflow_jax.place(PARAMS, state), tx.init(PARAMS):
        with HostEngine(PARAMS, first, host_kernel="numpy") as engine:
            runs.append(finish(engine, PARAMS, first, step=step_of(tx)))
    jax.tree.map(np.testing.assert_array_equal, *runs)


NANS = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), PARAMS)


# Errors in a step's mail are raised when the mail is read, some steps later.
@pytest.mark.parametrize(
    ("tx", "params", "word"),
    [
        (optax.MultiSteps(TX, 2).gradient_transformation(), PARAMS, "the mail of step 1"),
        (optax.apply_if_finite(TX, 3), NANS, "the mail of step 1"),
        (make(lambda t: jnp.where(t == 1, np.nan, 1e-2)), PARAMS, "learning_rate=nan"),
    ],
    ids=["MultiSteps", "apply_if_finite", "a rate of NaN"],
)
def test_a_wrong_step_is_reported(tx, params, word):
    state = tx.init(params)
    with HostEngine(params, state, host_kernel="numpy") as engine:
        call = functools.partial(finish, engine, params, state, step=step_of(tx))
        assert_told(call, RuntimeError, word)


def test_two_steps_without_exchange_are_reported_and_the_engine_remains_failed(running):
    engine, params, state = running
    new = step(*step(params, state))
    told = "followed another step without an `exchange`"
    assert_told(lambda: finish(engine, *engine.exchange(*new)), RuntimeError, told)
    for call in (engine.exchange, engine.flush):
        assert_told(lambda call=call: call(params, state), RuntimeError, "last checkpoint")
    engine.close()
    for call in (engine.exchange, engine.flush):
        assert_told(lambda call=call: call(params, state), RuntimeError, "engine is closed")
