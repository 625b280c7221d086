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


@jax.jit
def plain_step(params, opt_state, t):
    updates, opt_state = TX.update(gradients(params, t), opt_state, params)
    return optax.apply_updates(params, updates), opt_state, t * 2


@pytest.fixture(scope="module")
def by_hand():
    """Returns the parameters of a loop that calls `exchange`, after each step and a flush."""
    (params, state), seen = start(TX), []
    with HostEngine(params, state, **KERNEL) as engine:
        for t in range(STEPS):
            params, state, _ = plain_step(params, state, t)
            params, state = engine.exchange(params, state)
            seen.append(params)
        return [*seen, engine.flush(params, state)[0]]


@dataclasses.dataclass(frozen=True)
class State:
    params: Any
    opt_state: Any


class Triple(NamedTuple):
    epoch: int
    params: Any
    opt_state: Any


def of_fields(state):
    return state.params, state.opt_state


# For each form of step: a function that makes the values that it carries, one that finds parameters
# and state in them, the type of its results (None if it returns one value), and more options.
FORMS = {
    "parameters and state, after a key": (
        lambda p, s: (jax.random.key(0), p, s),
        lambda key, p, s: (p, s),
        tuple,
        {},
    ),
    "a named tuple, alone": (lambda p, s: (Triple(3, p, s),), of_fields, None, {}),
    "flax's state": (
        lambda p, s: (TrainState(0, None, params=p, tx=TX, opt_state=s),),
        of_fields,
        tuple,
        {},
    ),
    "a dataclass": (lambda p, s: (State(p, s),), of_fields, list, {}),
    "at other places": (
        lambda p, s: (({"w": p}, s),),
        lambda carry: (carry[0]["w"], carry[1]),
        tuple,
        {
            "get": lambda carry, *rest: (carry[0]["w"], carry[1]),
            "put": lambda p, s, carry, *rest: (({"w": p}, s), *rest),
        },
    ),
}


@pytest.mark.parametrize(("build", "read", "kind", "options"), FORMS.values(), ids=FORMS)
def test_a_step_of_any_form_exchanges(build, read, kind, options, by_hand):
    def step(*carried, t):
        params, opt_state, other = plain_step(*read(*carried), t)
        new = build(params, opt_state)
        return kind([*new, other]) if kind else new[0]

    carried = build(*start(TX))
    with attach(step, engine_options=KERNEL, **options) as attached:
        for t in range(STEPS):
            out = attached(*carried, t=t)
            assert type(out) is (kind or Triple)
            carried = tuple(out[: len(carried)]) if kind else (out,)
            assert not kind or out[-1] == t * 2
            assert_same_bits(read(*carried)[0], by_hand[t])
        flushed = attached.flush(*carried)
    flushed = flushed if type(flushed) is tuple else (flushed,)
    assert jax.tree.structure(flushed) == jax.tree.structure(carried)
    assert_same_bits(read(*flushed)[0], by_hand[-1])


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
    no_result = attach(lambda p, s: (p, 3), engine_options=KERNEL)
    for call, words in (
        (lambda: attach(plain_step)(state, params, 0), "Tell `attach` where they are"),
        (lambda: no_result(params, state), r"\(dict, int\) has neither"),
        (lambda: jax.jit(attach(plain_step))(params, state, 0), "outside jit"),
    ):
        with pytest.raises(TypeError, match=words):
            call()
    no_result.close()
