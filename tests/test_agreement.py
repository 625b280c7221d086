"""Runs that must equal the slow reference.

Parameters and selected channels are compared at every step; masters, moments and step counts at the
end, on device and host. `test_equality.py` has the runs that must equal `optax.adamw`.
"""

import itertools

import numpy as np
import pytest

from tests import comparisons
from tests.comparisons import MAX_NORM, SEEDS, WARM, seeded
from tests.runs import FEW, FIRST, SCANNED, SECOND, THIRD, Plan, Settings, Training
from zenflow_jax import AutoSelect, AutoWindow

AGREEMENTS = {
    "one step stale": (
        SECOND,
        dict(topk_ratio=0.5, update_interval=1, select_interval=2, provisional_share=1),
        Plan(12),
    ),
    "selecting at every window, skipping and flushing everywhere": (
        THIRD,
        dict(topk_ratio=0.3, select_interval=4, provisional_share=0.5),
        # Flushes inside a window, twice, in a window with only skipped steps, and at a boundary.
        Plan(23, bad=(3, 4, 9, 10, 11, 12, 17), flush_at=(6, 7, 10, 16)),
    ),
    "all windows at once, two of four steps stale": (
        FIRST,
        dict(
            WARM,
            update_interval=4,
            select_interval=8,
            rolling=False,
            window_scaling=None,
            staleness=2,
            provisional_share=0.25,
        ),
        # Has a window with only skipped steps, and flushes inside a window, twice, and at a
        # boundary.
        Plan(23, bad=(2, 6, 7, 8, 9, 14), flush_at=(11, 12, 16, 20)),
    ),
    "in turn, two steps stale, scaled, float32 that is sent as bf16": (
        THIRD,
        dict(
            WARM,
            update_interval=4,
            select_interval=4,
            staleness=2,
            provisional_share=0.5,
            eps=0.01,  # too small by default to have an effect
            transfer_dtype="bfloat16",
        ),
        Plan(20, bad=(2, 12, 13, 14, 15, 17), flush_at=(11, 18)),
    ),
    # Has a window with only skipped steps.
    "in turn, not stale, selecting inside a window": (
        SECOND,
        dict(
            topk_ratio=0.3,
            update_interval=4,
            select_interval=6,
            full_warm_up_rounds=4,
            staleness=0,
        ),
        Plan(20, bad=(2, 9, 10, 11, 12), flush_at=(14,)),
    ),
    "stacks in ranges, two steps stale, adaptive selections": (
        SCANNED,
        dict(
            topk_ratio=0.3,
            update_interval=3,
            select_interval=AutoSelect(0.9, max_windows=3),
            staleness=2,
            provisional_share=0.5,
        ),
        Plan(20, bad=(4, 10), flush_at=(7,)),
    ),
    "windows too long to keep all gradients": (
        SECOND,
        dict(topk_ratio=0.3, update_interval=12, provisional_share=0.5, max_grad_norm=MAX_NORM),
        Plan(27, bad=(5, 20)),
    ),
    "windows too long to keep all gradients, as in the paper": (
        SECOND,
        dict(topk_ratio=0.3, update_interval=12, rolling=False, window_scaling=None),
        Plan(27, bad=(5, 20)),
    ),
    "adaptive windows and selections, first steps all skipped": (
        FEW,
        dict(
            topk_ratio=0.3,
            max_grad_norm=5.0,
            full_warm_up_rounds=2,
            provisional_share=0.5,
            update_interval=AutoWindow(4, 0.4),
            select_interval=AutoSelect(0.6, 4),
        ),
        Plan(30, bad=(1, 2, 3, 4, 5, 6, 7, 17, 18, 19), flush_at=(15,)),
    ),
}


COMMON = {"weight_decay": 0.1, "provisional_share": None}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), list(zip(AGREEMENTS, itertools.cycle(SEEDS))))
def test_an_engine_equals_the_reference(name, seed):
    leaves, options, plan = AGREEMENTS[name]
    options = Settings(**COMMON | options)
    with seeded(leaves, options, seed) as training:
        slow = comparisons.assert_agrees(training, plan)
        if isinstance(options.update_interval, AutoWindow):
            assert len(set(np.diff(slow.turns[0].boundaries[2:]))) > 1
        stats = training.engine.stats
        assert (stats.steps, stats.skipped_steps) == (plan.steps, len(plan.bad))
        assert (stats.windows, stats.reselections) == (slow.windows, slow.reselections)


@pytest.mark.slow
def test_compact_moments_equal_those_of_a_reference_that_rounds_them():
    leaves, options, plan = AGREEMENTS["all windows at once, two of four steps stale"]
    options = Settings(**COMMON | options)
    with Training(leaves, options, host_state="compact") as training:
        exact, _ = comparisons.reference(training, plan)
        expected, _ = comparisons.reference(training, plan, host_state="compact")
        assert len({chosen["rows"].tobytes() for chosen in expected.selected}) > 1
        with pytest.raises(AssertionError, match="numbers differ"):
            comparisons.assert_agree_where_rounded(exact, expected)
        comparisons.assert_agree_where_rounded(training.history(plan), expected)
