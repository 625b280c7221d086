"""What is resumed must be of one run and one moment, and what is not is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zenflow_jax
from tests import runs
from tests.runs import FIRST, SECOND, THIRD, Leaf, Training
from tests.test_resume import PLAN, SETTINGS, go, resumed, saved
from zenflow_jax._checkpoint import same_run

HERE = functools.partial(Training, threads=1, host_kernel="numpy")


def other(leaves, step, seed, bad):
    """The gradients of a run from the same weights, on other data."""
    return runs.gradients(leaves, step, seed + 1, bad)


def refused(training, tree, words):
    with pytest.raises(ValueError, match=words):
        resumed(training, tree)


@pytest.mark.parametrize(
    "leaves",
    [FIRST, *(pytest.param(x, marks=pytest.mark.slow) for x in (SECOND, THIRD))],
    ids=["first", "second", "third"],
)
def test_parameters_of_another_run_are_refused_leaf_by_leaf(leaves):
    # A float32 leaf is its own master where the device has it: nothing to compare with.
    alone = {x.name for x in leaves if x.axis is None and x.dtype == "float32"}
    with HERE(leaves, SETTINGS) as ours, HERE(leaves, SETTINGS, gradients=other) as theirs:
        for t in (1, 6, 8, 11, 13):
            go(ours, PLAN, t)
            go(theirs, PLAN, t)
            params, state, engine_state = saved(ours)
            for name in params.keys() - alone:
                mixed = params | {name: saved(theirs)[0][name]}
                words = rf"got others: of \d+ values of \['{name}'\] .* together, and change none"
                refused(ours, (mixed, state, engine_state), words)


def test_parameters_that_a_flush_has_not_reached_are_refused_and_those_it_has_with_the_old_state():
    with HERE(FIRST, SETTINGS) as training:
        training.go(11)
        params, state, engine_state = saved(training)
        training.flush()
        flushed = saved(training)
        refused(training, (params, *flushed[1:]), r"values of .* in `engine_state`, \d+ differ")
        refused(training, (flushed[0], state, engine_state), r"in `engine_state`, \d+ differ")
        refused(training, (flushed[0], state, flushed[2]), "after step 11 of another run")


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        ("float32", {}),
        ("float32", {"window_scaling": None}),
        ("bfloat16", {"window_scaling": 0.0}),
        ("bfloat16", {"rolling": False}),
        ("float16", {}),
    ],
)
def test_a_single_channel_of_a_pending_update_that_is_a_step_ahead_is_noticed(dtype, changes):
    leaf = Leaf("w", (12, 5), -2, dtype)
    with HERE((leaf,), dataclasses.replace(SETTINGS, **changes)) as training:
        training.go(10)  # a boundary
        params, state, engine_state = saved(training)
        resumed(training, (params, state, engine_state)).engine.close()
        ahead = training.engine.peek(training.params, training.state)["w"]
        different = np.flatnonzero(np.any(np.asarray(ahead != params["w"]), axis=1))
        assert different.size
        for channel in different:
            mixed = {"w": params["w"].at[channel].set(ahead[channel])}
            refused(training, (mixed, state, engine_state), r"of 40 values of \['w'\]")


@pytest.mark.parametrize(
    ("then", "now"), [("compact", "compact"), ("compact", "float32"), ("float32", "compact")]
)
def test_a_foreign_checkpoint_is_refused_also_where_moments_are_rounded(then, now):
    make = functools.partial(HERE, FIRST, SETTINGS, host_state=then)
    with make() as ours, make(gradients=other) as theirs:
        for t in (8, 11, 13):
            go(ours, PLAN, t)
            go(theirs, PLAN, t)
            params, state, engine_state = saved(ours)
            resumed(ours, (params, state, engine_state), host_state=now).engine.close()
            for name in params:
                if name == "bias":
                    continue  # resident
                mixed = params | {name: saved(theirs)[0][name]}
                with pytest.raises(ValueError, match=rf"of \d+ values of \['{name}'\]"):
                    resumed(ours, (mixed, state, engine_state), host_state=now)


@pytest.mark.parametrize("now", ["compact", "float32"])
def test_most_channels_that_are_a_step_ahead_are_noticed_where_moments_were_rounded(now):
    leaf = Leaf("w", (12, 40), -2, "float32")
    with HERE((leaf,), SETTINGS, host_state="compact") as training:
        training.go(10)  # a boundary
        params, state, engine_state = saved(training)
        resumed(training, (params, state, engine_state), host_state=now).engine.close()
        ahead = training.engine.peek(training.params, training.state)["w"]
        different = np.flatnonzero(np.any(np.asarray(ahead != params["w"]), axis=1))
        assert different.size
        for channel in different:
            mixed = {"w": params["w"].at[channel].set(ahead[channel])}
            with pytest.raises(ValueError, match=r"of \d+ values of \['w'\]") as refusal:
                resumed(training, (mixed, state, engine_state), host_state=now)
            found = int(str(refusal.value).split(" differ")[0].rsplit(" ", 1)[1])
            assert found > 20, "of the channel's 40"


def test_a_large_leaf_is_compared_in_all_its_parts():
    places = same_run._spread(600 * 128)
    assert 500 < places.size <= same_run.COMPARED
    for shape in ((600, 128), (128, 600), (8, 75, 128)):
        for i, n in zip(np.unravel_index(places, shape), shape, strict=True):
            halves = np.bincount(i * 8 // n if n > 8 else i, minlength=8)
            assert halves.min() > 0.8 * places.size / 8


def test_the_engine_state_of_a_run_from_the_same_weights_is_refused_at_the_same_step():
    with HERE(FIRST, SETTINGS) as ours, HERE(FIRST, SETTINGS, gradients=other) as theirs:
        for t in (1, 6):
            go(ours, PLAN, t)
            go(theirs, PLAN, t)
            params, state, _ = saved(ours)
            refused(ours, (params, state, saved(theirs)[2]), f"after step {t} of another run")


def test_two_runs_that_go_on_from_one_checkpoint_are_two():
    with HERE(FIRST, SETTINGS) as training:
        training.go(6)
        checkpoint = saved(training)
    first, second = resumed(training, checkpoint), resumed(training, checkpoint)
    # Until they have made a step they are the same, and their states may be mixed.
    resumed(training, (*saved(first)[:2], saved(second)[2])).engine.close()
    with first.engine, second.engine:
        second.gradients = other
        for each in (first, second):
            each.go(1)
        params, state, _ = saved(first)
        refused(training, (params, state, saved(second)[2]), "after step 7 of another run")
        for each in (first, second):
            each.flush()


def test_the_number_of_a_run_is_in_nothing_but_tickets():
    with HERE(FIRST, SETTINGS) as one, HERE(FIRST, SETTINGS) as another:
        go(one, PLAN, 11)
        go(another, PLAN, 11)
        mine, yours = saved(one), saved(another)
        assert mine[1].token != yours[1].token
        assert mine[2]["counts"].pop("token") != yours[2]["counts"].pop("token")
        without = [
            (params, dataclasses.replace(state, token=None), engine_state)
            for params, state, engine_state in (mine, yours)
        ]
        runs.assert_same_bits(*(jax.tree.map(np.asarray, tree) for tree in without))


def test_numbers_that_are_not_finite_are_compared_as_well():
    with HERE(FIRST, SETTINGS) as training:
        training.params["rows"] = training.params["rows"].at[7].set(jnp.nan)
        training.engine = zenflow_jax.HostEngine(training.params, training.state, threads=1)
        training.go(11)
        params, state, engine_state = saved(training)
        resumed(training, (params, state, engine_state)).engine.close()
        assert np.isnan(np.asarray(params["rows"])).any()
        mixed = params | {"rows": jnp.nan_to_num(params["rows"])}
        refused(training, (mixed, state, engine_state), r"values of \['rows'\]")
        training.engine.close()
