"""Sharded runs equal `optax.adamw` on the same mesh, and a reference that knows the shards."""

import contextlib
import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from tests import comparisons, meshes, runs
from tests.compilations import compilations, times_compiled
from tests.meshes import IN_RANGES, LEAVES, MORE_LEAVES, STALE, assert_agrees
from tests.runs import Plan, Settings, Training

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit

# A step is skipped, and the run ends early, with one leaf's update in flight.
PLAN = Plan(14, bad=(6,), flush_at=(9,))
EVERY = Settings(
    topk_ratio=0.2, update_interval=1, select_interval=3, staleness=0, weight_decay=0.1
)


@contextlib.contextmanager
def started(where, settings, *, leaves=LEAVES, in_context=True, **more):
    """Starts a run on a mesh; users usually set a mesh with Explicit, but not with Auto axes."""
    name, placement, kind = where
    mesh = meshes.make_mesh(name, kind)
    set_mesh = kind == EXPLICIT and in_context
    context = jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext()
    shardings = meshes.shardings(mesh, placement, leaves)
    # Steps donate unless a test concerns donation, so runs share compiled steps.
    options = {"donate": True, "shardings": shardings, **more}
    with context, Training(leaves, settings, **options) as training:
        yield training


@contextlib.contextmanager
def traced_once(training, *, donate=True):
    """Checks that the step donates."""
    traces, training_step = [], training.program.__wrapped__

    @functools.partial(jax.jit, donate_argnums=(0, 1) if donate else ())
    def step(*args):
        traces.append(None)
        return training_step(*args)

    training.program = step
    yield
    assert len(traces) == 1
    # The spelling of users' parameters may differ from jit's output, but only in the first step.
    assert times_compiled(step) <= 2


# Each placement takes two seconds to compile, so other runs use some of these placements.
# `test_elastic.py` compares another placement with the reference.
@pytest.mark.parametrize(
    ("where", "more"),
    [
        (("data", "replicated", AUTO), {}),
        (
            ("three", "both", EXPLICIT),
            {"leaves": MORE_LEAVES, "in_context": False, "send_gradients": "after_step"},
        ),
        (("three", "channels", AUTO), {"partition": False, "donate": False, "threads": 2}),
        (
            ("three", "stacks", AUTO),
            {"leaves": MORE_LEAVES, "send_gradients": "after_step"},
        ),
    ],
    ids=str,
)
def test_a_run_with_stale_windows_equals_a_reference_that_knows_the_shards(where, more):
    with started(where, STALE, **more) as training:
        with traced_once(training, donate=more.get("donate", True)):
            assert_agrees(training, PLAN)
            with compilations() as names:
                training.go(4)  # another selection
            assert names == []


def test_compact_moments_on_a_mesh_are_rounded_like_the_references():
    # Each channel is whole and on one device only, so groups match the reference.
    with started(("fsdp", "channels", AUTO), STALE, host_state="compact") as training:
        assert_agrees(training, PLAN)


# The tests above compare placements with the reference; this test compares with optax.
def test_a_run_with_windows_of_one_step_equals_optax_adamw_on_the_same_mesh():
    with started(("three", "both", AUTO), EVERY) as training:
        ours = [values for _, values in training.follow(Plan(8))]
        theirs = comparisons.adamw(LEAVES, None, EVERY.weight_decay, 8, 0, training.shardings)
        comparisons.assert_close(ours, theirs)


def test_a_run_with_stacks_in_ranges_equals_the_reference_and_keeps_shardings_passed_to_jit():
    with started(("three", "both", AUTO), STALE, leaves=IN_RANGES) as training:
        assert [len(leaf.spec.groups) for leaf in training.state.leaves] == [1, 3]
        step = training.program
        placed = jax.tree.map(lambda x: x.sharding, (training.params, training.state))
        told = jax.jit(
            step.__wrapped__,
            in_shardings=(*placed, training.shardings),
            out_shardings=placed,
            donate_argnums=(0, 1),
        )
        training.program = told
        assert len(assert_agrees(training, PLAN).turns) == 4
        assert jax.tree.map(lambda x: x.sharding, (training.params, training.state)) == placed
        assert times_compiled(told) == 1


def other_on_the_last_device(values, shardings):
    """Returns parameters that differ only on the last device, which the others must find out."""
    changed, others = {}, runs.initial_values(LEAVES, 1)
    for name, value in values.items():
        index = shardings[name].devices_indices_map(value.shape)[jax.devices()[-1]]
        changed[name] = np.array(value)
        changed[name][index] = others[name][index]
    return changed


def test_weights_loaded_after_the_engine_was_created_are_trained():
    where, ends = ("three", "both", EXPLICIT), []
    for early in (False, True):
        with started(where, STALE) as run:
            loaded = other_on_the_last_device(runs.initial_values(LEAVES), run.shardings)
            run.params = runs.place(loaded, run.shardings)
            if early:
                run.state = run.tx.init(run.params)
                run.renew()
            run.go(6)
            run.flush()
            ends.append((run.values(), run.moments()))
    comparisons.assert_same_bits(*ends)


@pytest.mark.parametrize(
    ("where", "leaf", "check"),
    [
        (("three", "both", EXPLICIT), "rows", "all"),
        (("data", "replicated", AUTO), "stacked_columns", "samples"),
    ],
    ids=str,
)
def test_parameters_changed_by_other_code_are_rejected(where, leaf, check):
    with started(where, STALE, check=check) as run:
        run.go(8)  # the next step is compared
        other = other_on_the_last_device(run.params, run.shardings)[leaf]
        run.params = run.params | runs.place({leaf: other}, run.shardings)
        with pytest.raises(RuntimeError, match=rf"zenflow changed \['{leaf}'\] in or after step"):
            run.go(6)
