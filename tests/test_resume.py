"""A run that is saved at any step, and resumed in new objects, ends with the same bits."""

import copy
import dataclasses

import jax
import numpy as np
import pytest

import zenflow_jax
from tests import runs
from tests.runs import FIRST, SECOND, THIRD, Plan, Settings, Training
from zenflow_jax import AutoSelect, AutoWindow

# Stale windows, a warm-up, selections, a skipped step, and an early end of a window.
SETTINGS = Settings(
    topk_ratio=0.3,
    update_interval=4,
    select_interval=8,
    full_warm_up_rounds=2,
    weight_decay=0.1,
    max_grad_norm=5.0,
)
PLAN = Plan(19, bad=(8,), flush_at=(13,))


def copied(tree):
    """Arrays that share nothing with those of the tree, placed alike."""
    return jax.tree.map(
        lambda x: jax.device_put(np.array(x), x.sharding) if isinstance(x, jax.Array) else x.copy(),
        tree,
    )


def saved(training):
    return copied((training.params, training.state, training.engine.state()))


def resumed(training, tree, **engine):
    """A training that goes on from there, with another engine."""
    new = copy.copy(training)
    new.params, new.state, engine_state = tree
    new.engine = zenflow_jax.HostEngine(
        new.params, new.state, engine_state=engine_state, threads=1, **engine
    )
    return new


def go(training, plan, until):
    while training.t < until:
        t = training.t + 1
        training.step(bad=t in plan.bad)
        training.exchange()
        if t in plan.flush_at:
            training.flush()


def end(training):
    training.flush()
    # Two engines in one process have tickets of their own.
    return training.params, dataclasses.replace(training.state, ticket=None)


@pytest.mark.parametrize(
    ("leaves", "changes", "kernel"),
    [
        (FIRST, {}, "numpy"),
        (SECOND, {}, "numba"),
        (THIRD, {"overlap_step": False}, "numba"),
        (
            FIRST,
            {"update_interval": AutoWindow(5, 0.4), "select_interval": AutoSelect(0.6, 3)},
            "numpy",
        ),
    ],
    ids=["first", "second", "synchronous", "adaptive"],
)
def test_a_run_resumed_from_any_step_ends_with_the_same_bits(leaves, changes, kernel):
    settings = dataclasses.replace(SETTINGS, **changes)
    options = {"donate": True, "host_kernel": kernel}
    checkpoints = []
    with Training(leaves, settings, threads=1, **options) as whole:
        for t in range(PLAN.steps):
            go(whole, PLAN, t)
            checkpoints.append(saved(whole))
        go(whole, PLAN, PLAN.steps)
        expected = end(whole)
        with Training(leaves, settings, threads=1, **options) as untouched:
            go(untouched, PLAN, PLAN.steps)
            runs.assert_same_bits(end(untouched), expected)
        stats = whole.engine.stats
        for t, checkpoint in enumerate(checkpoints):
            with resumed(whole, checkpoint, host_kernel=kernel) as again:
                again.t = t
                go(again, PLAN, PLAN.steps)
                runs.assert_same_bits(end(again), expected)
                new = again.engine.stats
                for name in ("steps", "windows", "window_lengths", "reselections", "kept_share"):
                    assert getattr(new, name) == getattr(stats, name), (t, name)
                assert new.skipped_steps == stats.skipped_steps
