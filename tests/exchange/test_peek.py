"""A look at the parameters in mid-run is the whole truth, and the run does not notice it."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zenflow_jax
from tests import comparisons, processes, runs
from tests.resuming import PLAN, SETTINGS, end, fail_elsewhere, resumed, saved
from tests.runs import FIRST, KERNEL, SECOND, Training


def peek(training):
    return training.engine.peek(training.params, training.state)


def casts(training):
    """The masters, each in the dtype of its parameter."""
    masters = zenflow_jax.master_params(training.params, training.state, training.engine)
    return {name: np.asarray(x).astype(training.params[name].dtype) for name, x in masters.items()}


@pytest.mark.parametrize(
    ("leaves", "changes", "options"),
    [
        (FIRST, {}, {"donate": True}),
        pytest.param(
            SECOND,
            {"send_gradients": "per_window"},
            {"prefetch_bytes": 0},
            marks=pytest.mark.slow,
        ),
        # Channels that have left are in no update that is under way.
        (FIRST, {"rolling": False, "select_interval": 4}, {}),
    ],
    ids=["first, donated", "second, added up on the device", "all at once"],
)
def test_a_peek_is_the_cast_of_every_master_and_does_not_change_a_bit_of_the_run(
    leaves, changes, options
):
    settings = dataclasses.replace(SETTINGS, **changes)
    with Training(leaves, settings, **options) as training, Training(leaves, settings) as untouched:
        ahead = 0
        for _ in range(PLAN.steps):
            training.go(1, PLAN)
            untouched.go(1, PLAN)
            expected, values = casts(untouched), untouched.values()
            ahead += any(np.any(expected[name] != p) for name, p in values.items())
            seen = peek(training)
            comparisons.assert_same_bits(jax.tree.map(np.asarray, seen), expected)
            for name, x in seen.items():
                assert x.sharding == training.params[name].sharding
            # Nothing that the run goes on with, so that a step may donate that.
            assert not {x.unsafe_buffer_pointer() for x in seen.values() if x.size} & {
                x.unsafe_buffer_pointer() for x in training.params.values()
            }
            comparisons.assert_same_bits(training.values(), values)
        assert ahead > 5  # updates were under way
        comparisons.assert_same_bits(end(training), end(untouched))
        comparisons.assert_same_bits(peek(training), training.params)


@pytest.mark.parametrize("prefetch_bytes", [None, 0])
def test_a_run_that_goes_on_from_a_checkpoint_shows_what_the_saved_one_did(prefetch_bytes):
    with Training(FIRST, SETTINGS) as training:
        training.go(11)
        expected = jax.tree.map(np.array, peek(training))
        again = resumed(training, saved(training), prefetch_bytes=prefetch_bytes)
        with again:
            comparisons.assert_same_bits(jax.tree.map(np.asarray, peek(again)), expected)


@pytest.mark.parametrize(
    ("sending", "steps"), [("during_step", 6), ("per_window", 8)], ids=["open", "just closed"]
)
def test_going_on_from_what_was_flushed_is_refused_and_peek_is_named(sending, steps):
    settings = dataclasses.replace(SETTINGS, send_gradients=sending)
    with Training(FIRST, settings) as training, Training(FIRST, settings) as expected:
        training.go(steps)
        expected.go(steps)
        engine, before = training.engine, (training.params, training.state)
        flushed = engine.flush(*before)
        training.step()
        stepped = training.params, training.state
        for call, args in (
            (engine.exchange, before),
            (engine.flush, before),
            (engine.peek, before),
            (engine.exchange, stepped),
        ):
            with pytest.raises(RuntimeError, match="lack the updates .* use `eval_params = engine"):
                call(*args)
        # It does no harm.
        training.t -= 1
        training.params, training.state = flushed
        expected.flush()
        training.go(6)
        expected.go(6)
        comparisons.assert_same_bits(training.values(), expected.values())


class Model(nnx.Module):
    def __init__(self):
        for leaf in FIRST:
            setattr(self, leaf.name, nnx.Param(runs.initial(FIRST)[leaf.name]))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(7))


def trained(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def test_methods_for_nnx_equal_the_functional_form_and_peek_gives_another_model(monkeypatch):
    monkeypatch.setattr(processes, "optimized", False)  # as `nnx.jit` is here
    with Training(FIRST, SETTINGS) as expected:
        model = Model()
        optimizer = nnx.Optimizer(model, expected.tx, wrt=nnx.Param)
        traced = []

        @nnx.jit
        def train_step(model, optimizer, gradients):
            traced.append(None)
            runs.update_nnx(model, optimizer, gradients)
            model.calls[...] += 1

        params = nnx.state(model, nnx.Param)
        with zenflow_jax.HostEngine(params, optimizer.opt_state, **KERNEL) as engine:
            for t in range(1, 8):
                expected.go(1)
                train_step(model, optimizer, jax.tree.map(jnp.asarray, runs.gradients(FIRST, t)))
                engine.exchange_nnx(model, optimizer)
                comparisons.assert_same_bits(trained(model), expected.params)
            seen = engine.peek_nnx(model, optimizer)
            comparisons.assert_same_bits(trained(seen), peek(expected))
            assert int(seen.calls[...]) == 7
            # Neither model's calls and keys are the other's.
            seen.dropout(jnp.ones(3))
            seen.calls[...] += 1
            seen.rows[...] = jnp.zeros_like(seen.rows[...])
            expected.flush()
            engine.flush_nnx(model, optimizer)
            comparisons.assert_same_bits(trained(model), expected.params)
            assert int(model.calls[...]) == 7
            assert int(model.dropout.rngs.count[...]) == 0
            assert len(traced) == 1


def fail(training):
    fail_elsewhere(training.engine)


def be_interrupted(training):
    def interrupt(*_):
        raise KeyboardInterrupt

    training.engine._updates.collect = interrupt
    with pytest.raises(KeyboardInterrupt):
        training.go(1)


THEIRS = KeyError("the user's")
LOST = [
    "closed after step 7 with updates that never reached the parameters",
    "from the last checkpoint",
    "HostEngine(params, opt_state, engine_state=...)",
]


@pytest.mark.parametrize(
    ("error", "steps", "calls", "words"),
    [
        (THEIRS, 7, [], LOST),
        (THEIRS, 2, [], []),  # all of them have reached them
        (THEIRS, 7, [Training.flush, lambda training: training.engine.close()], []),
        (THEIRS, 7, [fail], ["the engine has failed as well: process 1 failed: the memory"]),
        # That is what is raised.
        (RuntimeError("process 1 failed: the memory is gone. Deferred"), 7, [fail], []),
        (KeyboardInterrupt(), 5, [be_interrupted], ["interrupted in a call after step 5"]),
    ],
    ids=["lost", "nothing lost", "flushed", "failed", "raised", "interrupted"],
)
def test_an_exception_leaves_the_with_block_as_it_is_with_a_note_of_what_is_lost(
    error, steps, calls, words
):
    training = Training(FIRST, SETTINGS)
    error = copy.copy(error)  # notes stay with an exception

    def leave():
        with training.engine:
            training.go(steps)
            for call in calls:
                call(training)
            raise error

    with pytest.raises(type(error)) as caught:
        leave()
    assert caught.value is error
    assert error.__cause__ is error.__context__ is None
    notes = getattr(error, "__notes__", [])
    assert len(notes) == bool(words)
    assert all(word in note for note in notes for word in words)


def test_a_failure_that_the_caller_has_not_heard_of_is_raised_where_the_block_ends():
    def leave():
        with training.engine:
            training.go(7)
            fail(training)

    training = Training(FIRST, SETTINGS)
    with pytest.raises(RuntimeError, match="process 1 failed: the memory is gone"):
        leave()
