"""`attach`: the same bits as a loop that exchanges by itself, whatever the step's shape."""

import copy
import dataclasses
import functools
import operator
import pickle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import zenflow_jax
from tests.runs import KERNEL
from zenflow_jax import HostEngine
from zenflow_jax.attach import attach

STEPS = 7  # one window of four, and most of another
PARAMS = {
    "bias": np.linspace(-1, 1, 3, dtype=np.float32),
    "weight": np.linspace(-2, 2, 24, dtype=np.float32).reshape(8, 3),
}


def make(**options):
    options |= {"topk_ratio": 0.25, "update_interval": 4, "weight_decay": 0.1}
    return zenflow_jax.zenflow(1e-2, **options)


def start(tx):
    params = jax.device_put(PARAMS, jax.devices()[0])
    return params, tx.init(params)


def gradients(params, t):
    return jax.tree.map(lambda p: p * jnp.sin(1.0 + t) + 0.1, params)


def pair_step(tx):
    @jax.jit
    def step(params, opt_state, t):
        with jax.numpy_dtype_promotion("standard"):  # `optax.MultiSteps` is not strict-clean
            updates, opt_state = tx.update(gradients(params, t), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, t * 2

    return step


def go(step, both, steps):
    """Parameters and state after these steps."""
    for t in steps:
        *both, _ = step(*both, t)
    return both


def exchanged_by_hand(tx, steps, *, due=lambda state: True, flush_after=()):
    """The parameters after each step, and at last those after a flush."""
    step, (params, state), seen = pair_step(tx), start(tx), []
    with HostEngine(params, state, **KERNEL) as engine:
        for t in range(steps):
            params, state, _ = step(params, state, t)
            if due(state):
                params, state = engine.exchange(params, state)
            if t in flush_after:
                params, state = engine.flush(params, state)
            seen.append(params)
        return [*seen, engine.flush(params, state)[0]]


@pytest.fixture(scope="module")
def by_hand():
    return exchanged_by_hand(make(), STEPS)


def assert_same(params, expected):
    for key in PARAMS:
        np.testing.assert_array_equal(params[key], expected[key], strict=True)


class Named(NamedTuple):
    params: Any
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class OtherNames:
    model: Any
    opt_state: Any


def test_a_step_of_parameters_and_state_exchanges_by_itself(by_hand):
    tx = make()
    params, state = start(tx)
    with attach(pair_step(tx), engine_options=KERNEL) as step:
        for t in range(STEPS):
            params, state, other = step(params, state, t)
            assert other == t * 2
            assert_same(params, by_hand[t])
        params, state = step.flush(params, state)
        assert_same(params, by_hand[-1])
        assert step.engine.stats.steps == STEPS


USUAL = "params", "opt_state"
# How a train state is made of parameters and state, the names of these, and how they are read.
STATES = {
    "dict": (
        lambda p, s: {"params": p, "opt_state": s, "epoch": 3},
        None,
        operator.itemgetter(*USUAL),
    ),
    "named tuple": (Named, None, operator.attrgetter(*USUAL)),
    "dataclass of other names": (
        OtherNames,
        ("model", "opt_state"),
        operator.attrgetter("model", "opt_state"),
    ),
}
# What a step returns of a train state and something else, and where that state is in it.
RESULTS = {
    "alone": (lambda state, other: state, lambda result: result),
    "first": (lambda state, other: (state, other), operator.itemgetter(0)),
    "second": (lambda state, other: [other, state], operator.itemgetter(1)),
}


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("kind", STATES)
def test_a_step_of_a_train_state_exchanges_by_itself(kind, result, by_hand):
    (build, fields, read), (wrap, unwrap), tx = STATES[kind], RESULTS[result], make()
    inner = pair_step(tx)

    def step(state, *, t):
        params, opt_state, other = inner(*read(state), t)
        return wrap(build(params, opt_state), other)

    state = build(*start(tx))
    with attach(step, fields=fields, engine_options=KERNEL) as attached:
        for t in range(STEPS):
            out = attached(state, t=t)
            assert type(out) is type(wrap(state, t))
            state = unwrap(out)
        flushed = attached.flush(state)
    assert jax.tree.structure(flushed) == jax.tree.structure(state)
    assert_same(read(flushed)[0], by_hand[-1])


def test_flaxs_train_state_and_an_engine_of_ones_own(by_hand):
    tx = make()
    params, _ = start(tx)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    engine = HostEngine(state.params, state.opt_state, **KERNEL)
    step = jax.jit(lambda state, t: state.apply_gradients(grads=gradients(state.params, t)))
    with attach(step, engine) as step:
        assert step.engine is engine
        for t in range(STEPS):
            state = step(state, t)
        state = step.flush(state)
    assert_same(state.params, by_hand[-1])
    assert int(state.step) == STEPS
    with pytest.raises(RuntimeError, match="after `close`"):
        step(state, 0)


class Model(nnx.Module):
    def __init__(self, params):
        self.bias = nnx.Param(params["bias"])
        self.weight = nnx.Param(params["weight"])


def test_a_step_of_nnx_exchanges_in_place(by_hand):
    model = Model(start(make())[0])
    optimizer = nnx.Optimizer(model, make(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, t):
        def loss(model):
            g = gradients({key: model_of[key] for key in PARAMS}, t)
            return sum(jnp.sum(getattr(model, key)[...] * g[key]) for key in PARAMS)

        model_of = {key: getattr(model, key)[...] for key in PARAMS}
        optimizer.update(model, nnx.grad(loss)(model))
        return t * 2

    with attach(step, engine_options=KERNEL) as step:
        for t in range(STEPS):
            assert step(model, optimizer, t) == t * 2
        assert step.flush(model, optimizer) is None
    assert_same({key: getattr(model, key)[...] for key in PARAMS}, by_hand[-1])


def test_flush_every_counts_the_steps_of_the_run():
    tx = make()
    plain = pair_step(tx)
    with attach(plain, flush_every=3, engine_options=KERNEL) as step:
        both = go(step, start(tx), range(4))
        options = {"engine_state": step.engine.state(), **KERNEL}
        step.flush(*both)
    with attach(plain, flush_every=3, engine_options=options) as step:
        params, _ = step.flush(*go(step, both, range(4, 8)))
    assert_same(params, exchanged_by_hand(tx, 8, flush_after=(2, 5))[-1])


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_neither_an_engine_nor_an_attached_step_is_copied_or_pickled(duplicate):
    params, state = start(make())
    plain = pair_step(make())
    with HostEngine(params, state, **KERNEL) as engine:
        for running in (engine, attach(plain, engine)):
            with pytest.raises(TypeError, match=r"copied or pickled.*`engine\.state\(\)`"):
                duplicate(running)


def test_behind_multi_steps_it_exchanges_where_an_update_was_made():
    tx = optax.MultiSteps(make(), 2)
    with attach(pair_step(tx), engine_options=KERNEL) as step:
        params, _ = step.flush(*go(step, start(tx), range(12)))
        assert step.engine.stats.steps == 6
    assert_same(params, exchanged_by_hand(tx, 12, due=tx.has_updated)[-1])


@pytest.mark.parametrize("send_gradients", ["during_step", "per_window"])
def test_behind_multi_steps_a_flush_may_come_between_two_micro_batches(send_gradients):
    tx = optax.MultiSteps(make(send_gradients=send_gradients), 2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def micro_step(params, opt_state, t):
        # Of the step alone: the flush moves no gradient.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = tx.update(gradients(PARAMS, t), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, t

    outcomes = []
    for flushes_after in (6, 7):  # the seventh makes no update
        with attach(micro_step, engine_options=KERNEL) as step:
            params, state = start(tx)
            both = jax.tree.map(jnp.copy, params), state  # which are donated
            both = go(step, both, range(1, 1 + flushes_after))
            both = step.flush(*both)
            flushed = jax.tree.map(jnp.copy, both[0])
            params, _ = step.flush(*go(step, both, range(1 + flushes_after, 15)))
            outcomes.append((flushed, params))
            assert step.engine.stats.steps == 7
    jax.tree.map(np.testing.assert_array_equal, *outcomes)


@pytest.mark.usefixtures("annotations_are_not_checked")
def test_what_is_no_step_is_refused():
    engine = HostEngine(*start(make()), **KERNEL)
    step = attach(pair_step(make()), engine)
    for arguments, match in (
        (dict(step=3), "`step` must be a function, got int"),
        (dict(step=step), "attached already"),
        (dict(step=print, engine=3), "`engine` must be a HostEngine, got int"),
        (dict(step=print, engine=engine, engine_options=KERNEL), "with an `engine`"),
        (dict(step=print, engine_options=[1]), "must be a dict, got list"),
        (dict(step=print, flush_every=0), "`flush_every` must be at least 1, got 0"),
        (dict(step=print, flush_every=True), "got True"),
        (dict(step=print, fields="params"), "two names, got 'params'"),
        (dict(step=print, fields=("params",)), "two names"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            attach(**arguments)
    step.close()
    step.close()


def test_arguments_and_results_of_no_known_kind_are_refused():
    tx = make()
    params, state = start(tx)
    plain = pair_step(tx)
    for arguments in ((state, params, 0), (), (params,), (OtherNames(params, state), 0)):
        with pytest.raises(TypeError, match="by position, with zenflow's state in it, got"):
            attach(plain)(*arguments)
    with pytest.raises(RuntimeError, match="before its first call"):
        _ = attach(plain).engine
    with pytest.raises(TypeError, match="`model` and `opt_state` as the first argument, got"):
        attach(plain, fields=("model", "opt_state"))(params, state, 0)
    with pytest.raises(ValueError, match="one ZenFlowState in it, got 0"):
        attach(plain)({"params": params, "opt_state": optax.adam(1e-3).init(params)})
    with pytest.raises(TypeError, match=r"returns \(params, opt_state, ...\).*got \(int, dict"):
        attach(lambda *args: (3, *args), engine_options=KERNEL)(params, state)
    with pytest.raises(TypeError, match=r"one train state.*got 0 in \(int\)"):
        attach(lambda state: 3, engine_options=KERNEL)({"params": params, "opt_state": state})
    with pytest.raises(TypeError, match="under jit"):
        jax.jit(attach(plain))(params, state, 0)


def test_a_step_that_exchanges_already_is_refused():
    tx = make()
    params, state = start(tx)
    plain, engine = pair_step(tx), HostEngine(params, state, **KERNEL)

    def exchanged(params, state, t):
        return engine.exchange(*plain(params, state, t)[:2])

    with pytest.raises(RuntimeError, match="once after each step"):
        attach(exchanged, engine)(params, state, 0)
    engine.close()
