"""`attach`: the same bits as a loop that exchanges by itself, whatever the step's shape."""

import copy
import dataclasses
import pickle
from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import zenflow_jax
from zenflow_jax import HostEngine
from zenflow_jax.attach import attach

STEPS = 7  # one window of four, and most of another
PARAMS = {
    "bias": np.linspace(-1, 1, 3, dtype=np.float32),
    "weight": np.linspace(-2, 2, 24, dtype=np.float32).reshape(8, 3),
}
PLAIN: dict[str, Any] = {"host_kernel": "numpy", "threads": 1}


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


@pytest.fixture(scope="module")
def by_hand():
    """The parameters after each exchange, and at last those after a flush."""
    tx = make()
    step, (params, state), found = pair_step(tx), start(tx), []
    with HostEngine(params, state, **PLAIN) as engine:
        for t in range(STEPS):
            params, state, _ = step(params, state, t)
            params, state = engine.exchange(params, state)
            found.append(params)
        params, state = engine.flush(params, state)
    return jax.tree.map(np.asarray, [*found, params])


def assert_same(found, expected):
    for key in PARAMS:
        np.testing.assert_array_equal(found[key], expected[key], strict=True)


class Named(NamedTuple):
    params: Any
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class OtherNames:
    model: Any
    opt_state: Any


@flax.struct.dataclass
class Struct:
    params: Any
    opt_state: Any


STATES = {
    "dict": (lambda p, s: {"params": p, "opt_state": s, "epoch": 3}, None),
    "named tuple": (Named, None),
    "flax dataclass": (Struct, None),
    "dataclass of other names": (OtherNames, ("model", "opt_state")),
}


def test_a_step_of_parameters_and_state_exchanges_by_itself(by_hand):
    tx = make()
    params, state = start(tx)
    with attach(pair_step(tx), engine_options=PLAIN) as step:
        for t in range(STEPS):
            params, state, other = step(params, state, t)
            assert other == t * 2
            assert_same(params, by_hand[t])
        params, state = step.flush(params, state)
        assert_same(params, by_hand[-1])
        assert step.engine.stats.steps == STEPS


@pytest.mark.parametrize("place", [None, 0, 1], ids=["alone", "first", "second"])
@pytest.mark.parametrize("kind", STATES)
def test_a_step_of_a_train_state_exchanges_by_itself(kind, place, by_hand):
    build, fields = STATES[kind]
    tx = make()
    inner = pair_step(tx)

    def step(state, *, t):
        both = state.values() if isinstance(state, dict) else None
        params, opt_state = (
            list(both)[:2]
            if both
            else (getattr(state, name) for name in fields or ("params", "opt_state"))
        )
        params, opt_state, other = inner(params, opt_state, t)
        new = build(params, opt_state)
        return new if place is None else (new, other) if place == 0 else [other, new]

    state = build(*start(tx))
    with attach(step, fields=fields, engine_options=PLAIN) as attached:
        for t in range(STEPS):
            out = attached(state, t=t)
            state = out if place is None else out[place]
            assert type(out) is (type(state) if place is None else [tuple, list][place])
        found = attached.flush(state)
    assert type(found) is type(state)
    params = (
        found["params"]
        if isinstance(found, dict)
        else found[0]
        if isinstance(found, tuple)
        else getattr(found, (fields or ("params",))[0])
    )
    assert_same(params, by_hand[-1])
    if kind == "dict":
        assert found["epoch"] == 3


def test_flaxs_train_state_and_an_engine_of_ones_own(by_hand):
    tx = make()
    params, _ = start(tx)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    engine = HostEngine(state.params, state.opt_state, **PLAIN)
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

    with attach(step, engine_options=PLAIN) as step:
        for t in range(STEPS):
            assert step(model, optimizer, t) == t * 2
        assert step.flush(model, optimizer) is None
    assert_same({key: getattr(model, key)[...] for key in PARAMS}, by_hand[-1])


def test_flush_every_leaves_nothing_out_where_it_is_due():
    tx = make()
    (params, state), plain = start(tx), pair_step(tx)
    with attach(plain, flush_every=3, engine_options=PLAIN) as step:
        for t in range(6):
            params, state, _ = step(params, state, t)
    by_attach = params  # it ends right after a flush: nothing is lost at the end of `with`
    params, state = start(tx)
    with HostEngine(params, state, **PLAIN) as engine:
        for t in range(6):
            params, state, _ = plain(params, state, t)
            params, state = engine.exchange(params, state)
            if t in (2, 5):
                params, state = engine.flush(params, state)
    assert_same(by_attach, params)


@pytest.mark.parametrize("resumes", [True, False], ids=["after a resume", "an engine in mid-run"])
def test_flush_every_counts_the_steps_of_the_run(resumes):
    tx = make()
    (params, state), plain = start(tx), pair_step(tx)
    with HostEngine(params, state, **PLAIN) as engine:
        for t in range(8):
            params, state, _ = plain(params, state, t)
            params, state = engine.exchange(params, state)
            if t in (2, 5):
                params, state = engine.flush(params, state)
        by_hand, _ = engine.flush(params, state)
    params, state = start(tx)
    engine = HostEngine(params, state, **PLAIN)
    step = attach(plain, engine, flush_every=3)
    for t in range(4):
        params, state, _ = step(params, state, t)
    options = {"engine_state": engine.state(), **PLAIN}
    with attach(
        plain,
        None if resumes else engine,
        flush_every=3,
        engine_options=options if resumes else None,
    ) as step:
        for t in range(4, 8):
            params, state, _ = step(params, state, t)
        params, _ = step.flush(params, state)
    engine.close()
    assert_same(params, by_hand)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_neither_an_engine_nor_an_attached_step_is_copied_or_pickled(duplicate):
    params, state = start(make())
    plain = pair_step(make())
    with HostEngine(params, state, **PLAIN) as engine:
        for running in (engine, attach(plain, engine)):
            with pytest.raises(TypeError, match=r"copied or pickled.*`engine\.state\(\)`"):
                duplicate(running)


def test_behind_multi_steps_it_exchanges_where_an_update_was_made():
    tx = optax.MultiSteps(make(), 2)
    (params, state), plain = start(tx), pair_step(tx)
    with attach(plain, engine_options=PLAIN) as step:
        for t in range(12):
            params, state, _ = step(params, state, t)
        by_attach, _ = step.flush(params, state)
        assert step.engine.stats.steps == 6
    params, state = start(tx)
    with HostEngine(params, state, **PLAIN) as engine:
        for t in range(12):
            params, state, _ = plain(params, state, t)
            if tx.has_updated(state):
                params, state = engine.exchange(params, state)
        params, state = engine.flush(params, state)
    assert_same(by_attach, params)


@pytest.mark.parametrize("send_gradients", ["during_step", "per_window"])
def test_behind_multi_steps_a_flush_may_come_between_two_micro_batches(send_gradients):
    tx = optax.MultiSteps(make(send_gradients=send_gradients), 2)

    @partial(jax.jit, donate_argnums=(0, 1))
    def micro_step(params, opt_state, t):
        # Of the step alone: the flush moves no gradient.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = tx.update(gradients(PARAMS, t), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    found = []
    for flushes_after in (6, 7):  # the seventh makes no update
        params, state = start(tx)
        params = jax.tree.map(jnp.copy, params)  # which are donated
        with attach(micro_step, engine_options=PLAIN) as step:
            for t in range(1, 15):
                params, state = step(params, state, t)
                if t == flushes_after:
                    looked_at = step.engine.peek(params, state)
                    params, state = step.flush(params, state)
                    found.append((looked_at, jax.tree.map(jnp.copy, params)))
            found.append(step.flush(params, state)[0])
            assert step.engine.stats.steps == 7
    jax.tree.map(np.testing.assert_array_equal, found[:2], found[2:])


def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(by_hand):
    tx = make()
    (params, state), plain = start(tx), pair_step(tx)
    with attach(plain, engine_options=PLAIN) as step:
        for t in range(5):
            params, state, _ = step(params, state, t)
        saved = step.engine.state()
        kept = jax.tree.map(jnp.copy, params), jax.tree.map(jnp.copy, state)
        step.flush(params, state)
    params, state = kept
    with pytest.raises(ValueError, match="engine_state"):
        attach(plain)(params, state, 5)
    params, state = kept
    with attach(plain, engine_options={"engine_state": saved, **PLAIN}) as step:
        for t in range(5, STEPS):
            params, state, _ = step(params, state, t)
        params, state = step.flush(params, state)
    assert_same(params, by_hand[-1])


@pytest.fixture
def unchecked():
    """As users have it: nothing but the library's own checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_step_is_refused():
    engine = HostEngine(*start(make()), **PLAIN)
    step = attach(pair_step(make()), engine)
    for arguments, match in (
        (dict(step=3), "`step` must be a function, got int"),
        (dict(step=step), "attached already"),
        (dict(step=print, engine=3), "`engine` must be a HostEngine, got int"),
        (dict(step=print, engine=engine, engine_options=PLAIN), "with an `engine`"),
        (dict(step=print, engine_options=[1]), "must be a dict, got list"),
        (dict(step=print, flush_every=0), "whole number from 1 or None, got 0"),
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
        attach(lambda *args: (3, *args), engine_options=PLAIN)(params, state)
    with pytest.raises(TypeError, match=r"one train state.*got 0 in \(int\)"):
        attach(lambda state: 3, engine_options=PLAIN)({"params": params, "opt_state": state})
    with pytest.raises(TypeError, match="under jit"):
        jax.jit(attach(plain))(params, state, 0)


def test_a_step_that_exchanges_already_is_refused():
    tx = make()
    params, state = start(tx)
    plain, engine = pair_step(tx), HostEngine(params, state, **PLAIN)

    def exchanged(params, state, t):
        params, state, _ = plain(params, state, t)
        return engine.exchange(params, state)

    with pytest.raises(RuntimeError, match="once after each step"):
        attach(exchanged, engine)(params, state, 0)
    engine.close()


def test_updates_that_were_left_behind_are_an_error():
    tx = make()
    params, state = start(tx)
    with (
        pytest.raises(RuntimeError, match="left with updates that never reached"),
        attach(pair_step(tx), engine_options=PLAIN) as step,
    ):
        step(params, state, 0)
