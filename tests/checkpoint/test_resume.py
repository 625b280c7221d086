"""A run is bit-identical if it is saved at any step and resumed with new objects."""

import copy
import dataclasses

import jax
import numpy as np
import pytest

import zenflow_jax
from tests import comparisons, runs
from tests.resuming import (
    PLAN,
    SETTINGS,
    counted,
    end,
    go,
    put_by_name,
    resumed,
    saved,
    without_tokens,
)
from tests.runs import FIRST, SCANNED, SECOND, Training
from zenflow_jax import AutoSelect, AutoWindow, HostEngine
from zenflow_jax._spec.checks import UnfitRunError
from zenflow_jax._version import LAYOUT_NAME

# As a share of a leaf's largest moment: slightly more than half the gap between two 8-bit codes.
ROUNDED = 0.01
ADAPTIVE = {"update_interval": AutoWindow(5, 0.4), "select_interval": AutoSelect(0.6, 3)}


AT_ONCE = {"rolling": False, "window_scaling": None, "staleness": 3}
RUNS = {
    "in turn, 8-bit moments": (FIRST, {}, {"host_state": "compact"}),
    "at once, as in the paper, gradients leave after steps": (
        SECOND,
        AT_ONCE | {"send_gradients": "after_step"},
        {},
    ),
    "windows too long to keep all gradients": (SECOND, {"update_interval": 9}, {}),
    "stacks in ranges": (SCANNED, {"staleness": 2}, {}),
    "adaptive": (FIRST, ADAPTIVE, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("leaves", "changes", "engine"), RUNS.values(), ids=RUNS)
def test_a_run_resumed_from_any_step_is_bit_identical(leaves, changes, engine):
    settings = dataclasses.replace(SETTINGS, **changes)
    checkpoints, counts = [], []
    with Training(leaves, settings, donate=True, **engine) as whole:
        for t in range(PLAN.steps):
            go(whole, PLAN, t)
            checkpoints.append(saved(whole))
            counts.append(counted(whole))
        go(whole, PLAN, PLAN.steps)
        expected = end(whole)
        with Training(leaves, settings, donate=True, **engine) as untouched:
            go(untouched, PLAN, PLAN.steps)
            comparisons.assert_same_bits(end(untouched), expected)
        last = PLAN.steps - 1
        for t, checkpoint in enumerate(checkpoints[:last]):
            with resumed(whole, checkpoint, **engine) as again:
                # By then, the update in flight has arrived, and all later results depend on it.
                soon = min(t + 4, last) if t % 6 else last
                go(again, PLAN, soon)
                ours, theirs = map(without_tokens, (saved(again), checkpoints[soon]))
                comparisons.assert_same_bits(ours, theirs)
                assert counted(again) == counts[soon], t


@pytest.mark.parametrize("then", ["float32", "compact"])
def test_a_run_can_resume_with_another_format_for_moments(then):
    kept = "compact" if then == "float32" else "float32"
    with Training(FIRST, SETTINGS, host_state=then) as training:
        go(training, PLAN, 11)  # updates are in flight
        checkpoint = saved(training)
    with resumed(training, checkpoint, host_state=kept) as again:
        # Values saved before the next update are rounded at most once.
        once = again.engine.state()["leaves"]
        for ours, theirs in zip(once, checkpoint[2]["leaves"], strict=True):
            for name in ("master", "steps"):
                comparisons.assert_same_bits(ours[name], theirs[name])
            for name in ("mu", "nu"):
                x, y = np.asarray(ours[name]), np.asarray(theirs[name])
                assert (kept == "float32") == np.array_equal(x, y)
                np.testing.assert_allclose(x, y, rtol=0, atol=ROUNDED * abs(y).max())
        with resumed(training, saved(again), host_state=then) as back:
            comparisons.assert_same_bits(back.engine.state()["leaves"], once)
            go(back, PLAN, PLAN.steps)
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(Training.values(back)))


def test_a_run_resumes_from_numpy_arrays():
    with Training(FIRST, SETTINGS, donate=True) as whole:
        go(whole, PLAN, 9)
        weights = runs.initial(FIRST)
        fresh = whole.tx.init(weights)
        params, state, engine_state = jax.device_get(
            (whole.params, whole.state, whole.engine.state())
        )
        go(whole, PLAN, 14)
        expected = end(whole)
        placed = runs.place(params, None), put_by_name(state, fresh), engine_state
        with resumed(whole, placed) as again:
            go(again, PLAN, 14)
            comparisons.assert_same_bits(end(again), expected)


@pytest.fixture(scope="module")
def after_six():
    """Returns the trees of a run that was saved after six steps."""
    with Training(FIRST, SETTINGS) as training:
        training.go(6)
        return saved(training)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"update_interval": AutoWindow(4)}, "`update_interval` is AutoWindow.*, but was 4"),
        ({"select_interval": AutoSelect(0.5, 8)}, "`select_interval` is AutoSelect.*, but was 8"),
        ({"rolling": False, "staleness": 1}, "`rolling` is False, but was True"),
        ({"window_scaling": None}, "`window_scaling` is False, but was True"),
        ({"topk_ratio": 0.5}, r"\['columns'\] is .*channels': 5.* but was .*channels': 3"),
    ],
    ids=str,
)
def test_options_that_differ_from_the_saved_runs_are_rejected_by_name(after_six, changes, words):
    params, state, engine_state = after_six
    settings = dataclasses.replace(SETTINGS, **changes)
    fresh = runs.transformation(FIRST, settings).init(runs.initial(FIRST))
    fresh = fresh._replace(step=state.step, token=state.token)
    with pytest.raises(UnfitRunError, match=f"{words}.*Resume with the saved run's parameters"):
        HostEngine(params, fresh, engine_state=engine_state)


def test_a_saved_state_matches_the_template_and_another_runs_state_is_rejected():
    with Training(FIRST, SETTINGS) as training:
        training.go(5)
        earlier = saved(training)[2]
        training.go(1)
        params, state, real = training.params, training.state, training.engine.state()
        template = zenflow_jax.abstract_engine_state(state)
        assert jax.tree.structure(real) == jax.tree.structure(template)
        for x, y in zip(jax.tree.leaves(real), jax.tree.leaves(template), strict=True):
            assert (type(x), x.shape, x.dtype) == (np.ndarray, y.shape, y.dtype)
        # As if another version divided leaves by a different rule.
        text = bytes(np.asarray(real[LAYOUT_NAME]))
        regrouped = real | {LAYOUT_NAME: np.frombuffer(text.replace(b"[2]", b"[1]"), np.uint8)}
        damaged = np.frombuffer(text.replace(b":", b";", 1), np.uint8)
        low = jax.tree.map(lambda x: np.float16(x), real["leaves"])
        for engine_state, words in (
            (regrouped, r"\['columns'\] is .*'groups': \[2\].* but was .*'groups': \[1\]"),
            (earlier, r"step 5, but `opt_state` after step 6\. Save"),
            (real["leaves"], "`engine_state` has none. Pass the result of"),
            (real | {"leaves": real["leaves"][1:]}, "arrays in `engine_state` differ"),
            (real | {"leaves": low}, "arrays in `engine_state` differ"),
            (real | {LAYOUT_NAME: damaged}, "Expecting ':' delimiter"),
        ):
            with pytest.raises(ValueError, match=words):
                HostEngine(params, state, engine_state=engine_state)


def test_an_engine_shares_no_memory_with_the_state_that_it_returns_or_resumes_from():
    with Training(FIRST, SETTINGS, donate=True) as training:
        go(training, PLAN, 7)
        saved_tree = training.engine.state()
        params, state, _ = saved(training)
        # The window is open and has sums; the values are NumPy arrays, which are writable.
        values = jax.tree.map(np.array, saved_tree)
        assert any(leaf["total"].any() for leaf in values["leaves"])
        go(training, PLAN, PLAN.steps)
        comparisons.assert_same_bits(jax.tree.map(np.asarray, saved_tree), values)
        taken = copy.deepcopy(values)
        with resumed(training, (params, state, taken)) as again:
            go(again, PLAN, 8)
            again.engine.state()  # sums mail
            go(again, PLAN, PLAN.steps)
        comparisons.assert_same_bits(taken, values)


def test_masters_from_different_steps_are_rejected():
    with Training(FIRST, SETTINGS) as training:
        go(training, PLAN, 5)
        for later in (training.flush, lambda: go(training, PLAN, 6)):
            each = zenflow_jax.iter_master_params(training.params, training.state, training.engine)
            later()
            with pytest.raises(RuntimeError, match="while the masters of step 5 were being read"):
                list(each)
    # Before the first step, the engine adopts all parameters that it gets.
    with Training(FIRST, SETTINGS) as training:
        trees = training.params, runs.initial(FIRST, seed=1)
        pair = [zenflow_jax.iter_master_params(x, training.state, training.engine) for x in trees]
        with pytest.raises(RuntimeError, match="Parameters changed while the masters of step 0"):
            list(zip(*pair, strict=True))
