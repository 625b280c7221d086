"""`attach`: results are bit-identical to a loop that calls `exchange`, for any form of step."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zenflow_jax
from tests.comparisons import assert_same_bits
from tests.runs import KERNEL
from zenflow_jax import HostEngine
from zenflow_jax.attach import attach

STEPS = 8  # two windows of four steps; the second window's update has not arrived
PARAMS = {
    "bias": np.linspace(-1, 1, 3, dtype=np.float32),
    "weight": np.linspace(-2, 2, 24, dtype=np.float32).reshape(8, 3),
}


TX = zenflow_jax.zenflow(1e-2, topk_ratio=0.25, update_interval=4, weight_decay=0.1)


def start(tx):
    params = jax.device_put(PARAMS, jax.devices()[0])
    return params, tx.init(params)


def gradients(params, t):
    return jax.tree.map(lambda p: p * jnp.sin(1.0 + t) + 0.1, params)


def pair_step(tx):
    @jax.jit
    def step(params, opt_state, t):
        with jax.numpy_dtype_promotion("standard"):  # `optax.MultiSteps` promotes dtypes
            updates, opt_state = tx.update(gradients(params, t), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, t * 2

    return step


PLAIN = pair_step(TX)


@pytest.fixture(scope="module")
def by_hand():
    """Returns the parameters of a loop that calls `exchange`, after each step and a flush."""
    (params, state), seen = start(TX), []
    with HostEngine(params, state, **KERNEL) as engine:
        for t in range(STEPS):
            params, state, _ = PLAIN(params, state, t)
            params, state = engine.exchange(params, state)
            seen.append(params)
        return [*seen, engine.flush(params, state)[0]]


def test_a_step_with_parameters_and_state_exchanges(by_hand):
    def with_a_key(key, *args):
        params, opt_state, other = PLAIN(*args)
        return key, params, opt_state, other

    with attach(with_a_key, engine_options=KERNEL) as step:
        both = start(TX)
        for t in range(STEPS):
            key, *both, other = step(jax.random.key(t), *both, t)
            assert (key, other) == (jax.random.key(t), t * 2)
            assert_same_bits(both[0], by_hand[t])
        both = step.flush(*both)
        assert_same_bits(both[0], by_hand[-1])
        assert step.engine.stats.steps == STEPS


@dataclasses.dataclass(frozen=True)
class State:
    params: Any
    opt_state: Any


class Triple(NamedTuple):
    epoch: int
    params: Any
    opt_state: Any


# For each train state: a function that builds it from parameters and state, and one that makes the
# step's result.
STATES = {
    "named tuple, alone": (lambda p, s: Triple(3, p, s), lambda state, other: state),
    "flax's, in a tuple": (
        lambda p, s: TrainState(0, None, params=p, tx=TX, opt_state=s),
        lambda state, other: (state, other),
    ),
    "dataclass, in a list": (State, lambda state, other: [other, state]),
}


@pytest.mark.parametrize(("build", "wrap"), STATES.values(), ids=STATES)
def test_a_step_with_a_train_state_exchanges(build, wrap, by_hand):
    def read(state):
        return state.params, state.opt_state

    def step(state, *, t):
        params, opt_state, other = PLAIN(*read(state), t)
        return wrap(build(params, opt_state), other)

    state = build(*start(TX))
    with attach(step, engine_options=KERNEL) as attached:
        for t in range(STEPS):
            out = attached(state, t=t)
            assert type(out) is type(wrap(state, t))
            values = out if type(out) in (tuple, list) else [out]
            state = next(x for x in values if type(x) is type(state))
        flushed = attached.flush(state)
    assert jax.tree.structure(flushed) == jax.tree.structure(state)
    assert_same_bits(read(flushed)[0], by_hand[-1])


def test_get_and_put_exchange_trees_at_other_places(by_hand):
    def step(carry, t):
        params, opt_state, other = PLAIN(carry[0]["w"], carry[1], t)
        return ({"w": params}, opt_state), other

    def get(carry, *rest):
        return carry[0]["w"], carry[1]

    def put(params, opt_state, carry, *rest):
        return ({"w": params}, opt_state), *rest

    params, opt_state = start(TX)
    carry = {"w": params}, opt_state
    with attach(step, get=get, put=put, engine_options=KERNEL) as attached:
        for t in range(STEPS):
            carry, other = attached(carry, t)
            assert other == t * 2
        (carry,) = attached.flush(carry)
    assert_same_bits(carry[0]["w"], by_hand[-1])


def test_with_multi_steps_a_flush_can_come_between_two_micro_batches():
    tx = optax.MultiSteps(TX, 2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def micro_step(params, opt_state, t):
        # These gradients depend only on `t`, so a flush cannot change them.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = tx.update(gradients(PARAMS, t), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, t

    outcomes = []
    for flushes_after in (8, 9):  # the ninth micro-step does not make an update
        with attach(micro_step, engine_options=KERNEL) as step:
            params, state = start(tx)
            both = jax.tree.map(jnp.copy, params), state  # the step donates both
            for t in range(1, 15):
                *both, _ = step(*both, t)
                if t == flushes_after:
                    both = step.flush(*both)
                    flushed = jax.tree.map(jnp.copy, both[0])
            outcomes.append((flushed, step.flush(*both)[0]))
            assert step.engine.stats.steps == 7
    jax.tree.map(np.testing.assert_array_equal, *outcomes)


def test_calls_that_cannot_be_exchanged_are_rejected():
    params, state = start(TX)
    by_position = "Tell `attach` where they are"
    engine = HostEngine(params, state, **KERNEL)
    attached = attach(PLAIN, engine)
    no_result = attach(lambda p, s: (p, 3), engine_options=KERNEL)

    for call, error, words in (
        (lambda: attach(print, engine, engine_options=KERNEL), TypeError, "has its options"),
        (lambda: attach(PLAIN)(state, params, 0), TypeError, by_position),
        (lambda: attach(PLAIN)(State(params, ())), ValueError, "contains 0 ZenFlowStates"),
        (lambda: attach(PLAIN)({"params": params, "opt_state": state}), TypeError, by_position),
        (lambda: no_result(params, state), TypeError, r"\(dict, int\) has neither"),
        (lambda: jax.jit(attach(PLAIN))(params, state, 0), TypeError, "outside jit"),
    ):
        with pytest.raises(error, match=words):
            call()
    attached.close()
    attached.close()
    with pytest.raises(RuntimeError, match="This engine is closed"):
        attached(params, state, 0)
