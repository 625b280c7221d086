"""Windows and selections that adapt: the engine, the in-graph mode and the reference do the same.

Gradients are scripted, so that it is known beforehand what the rules must do with them.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pytest

from tests import comparisons, runs
from tests.runs import FEW, FIRST, SECOND, Leaf, Leaves, Plan, Settings, Training
from zenflow_jax import AutoSelect, AutoWindow, EpochSelect

LONGEST = 6
RATIO = 0.3
AUTO = Settings(
    topk_ratio=RATIO,
    update_interval=AutoWindow(max_interval=LONGEST),
    select_interval=AutoSelect(max_windows=4),
    weight_decay=0.1,
    max_grad_norm=5.0,
)


class Weight(NamedTuple):
    """Of one step's gradient."""

    rest: float  # root mean square of all other channels; that of the important ones is 1
    first: int = 0  # the first important channel


def scripted(script: Callable[[int], Weight], topk_ratio: float) -> Callable[..., dict]:
    """As `runs.gradients`, by a script; as many channels are important as `topk_ratio` selects."""

    def make(leaves: Leaves, step: int, seed: int = 0, bad: bool = False) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((seed, step, 1))
        weight = script(step)
        return {leaf.name: _one(leaf, rng, weight, topk_ratio, bad) for leaf in leaves}

    return make


def _one(leaf: Leaf, rng, weight: Weight, topk_ratio: float, bad: bool) -> np.ndarray:
    # Any values but for their root mean squares: sums that cancel would leave nothing but rounding,
    # of which Adam makes a full step.
    values = rng.normal(size=leaf.shape)
    if leaf.axis is not None:
        n = leaf.shape[leaf.axis]
        k = int(np.ceil(round(topk_ratio * n, 6)))
        channels = np.moveaxis(values, leaf.axis, 0)  # a view
        important = np.isin(np.arange(n), (weight.first + np.arange(k)) % n)
        for chosen, size in ((important, 1.0), (~important, weight.rest)):
            # Each channel by itself, so that the important ones have the highest scores.
            squares = np.square(channels[chosen])
            rms = np.sqrt(squares.mean(axis=tuple(range(1, squares.ndim)), keepdims=True))
            channels[chosen] *= size / rms
    if bad and values.size:
        values.flat[0] = np.nan
    return np.asarray(values, np.dtype(leaf.dtype))


def ripe_after(steps: int) -> float:
    """`Weight.rest` with which windows of that weight are ripe after so many steps."""
    return 1.05 / steps


def all_three(leaves, settings, plan, gradients=runs.gradients, seed=0):
    """The reference, after engine and in-graph mode were found to do the same; engine's stats."""
    expected, slow = comparisons.reference(leaves, settings, plan, seed, gradients=gradients)
    for options in ({"offload": False}, {"threads": 1, "host_kernel": "numpy", "donate": True}):
        with Training(leaves, settings, seed=seed, gradients=gradients, **options) as training:
            comparisons.assert_agree(training.history(plan), expected)
            if training.engine is not None:
                stats = training.engine.stats
                assert stats.windows == sum(stats.window_lengths.values())
                assert stats.reselections == slow.reselections
            else:
                schedule_state, schedule = training.state.schedule_state, training.state.schedule
                if schedule.adaptive:
                    assert schedule_state.length == plan.steps - slow.turns[0].boundaries[-1]
                if schedule.needs_kept_share:
                    share = [turn.kept_share[-1] for turn in slow.turns]
                    np.testing.assert_allclose(schedule_state.kept_share, share, rtol=1e-5)
    return slow, stats


def windows_of(lengths):
    """A script for windows of these lengths, each ripe or full at its end and not before."""
    ends = list(accumulate(lengths))

    def script(t):
        i = next(i for i, end in enumerate(ends) if t <= end)
        # What the last step weighs is not known yet where the window closes.
        light = lengths[i] == LONGEST or t == ends[i]
        return Weight(0.02 if light else ripe_after(lengths[i] - 1))

    return script, ends


@pytest.mark.slow
@pytest.mark.parametrize(("leaves", "warm_up", "flush_at"), [(FIRST, 0, ()), (FEW, 3, (5, 7, 12))])
def test_windows_close_when_what_piled_up_weighs_as_much_as_one_step(leaves, warm_up, flush_at):
    lengths = [int(x) for x in np.random.default_rng(1).permutation([2, 3, 4, 5, 6] * 2)]
    script, ends = windows_of(lengths)
    plan = Plan(warm_up + ends[-1], flush_at=flush_at)
    # A warm-up is made of windows of one step; a flush moves no boundary.
    ends = [*range(1, warm_up + 1), *(warm_up + end for end in ends)]
    gradients = scripted(lambda t: script(t - warm_up) if t > warm_up else Weight(0.1), RATIO)
    settings = dataclasses.replace(AUTO, full_warm_up_rounds=warm_up)
    slow, stats = all_three(leaves, settings, plan, gradients)
    assert [turn.boundaries for turn in slow.turns] == [ends]
    if not flush_at:
        assert stats.window_lengths == dict(sorted(Counter(lengths).items()))


# Windows of two steps that end with the even ones, or with the odd ones for the leaf that is looked
# at if leaves take turns; the important channels are others from step 41 on.
SWITCH = 41


@pytest.mark.slow
@pytest.mark.parametrize(
    ("select", "rolling", "then"),
    [
        # The first selection is at step 2; the scores have 19 windows when the switch comes. The
        # new channels' exceed the old ones' after 19 more; by a ninth, with those counted that are
        # important before and after, after 24. That is acted on a window later.
        (AutoSelect(keep=0.9, max_windows=200), False, 92),
        # At the first boundary at or after each 15th step: in 31 to 46 the old ones have more.
        (EpochSelect(steps_per_epoch=15), True, 61),
    ],
    ids=str,
)
def test_the_selection_follows_a_switch_within_the_stated_time(select, rolling, then):
    settings = Settings(
        topk_ratio=RATIO, update_interval=2, select_interval=select, rolling=rolling
    )
    script = scripted(lambda t: Weight(0.1, first=2 if t >= SWITCH else 0), RATIO)
    plan = Plan(96)
    slow, _ = all_three(FEW, settings, plan, script)
    history, _ = comparisons.reference(FEW, settings, plan, gradients=script)
    new = [t for t, now in enumerate(history.selected, start=1) if now["columns"].min() == 2]
    assert new[0] == then
    assert new == list(range(then, plan.steps + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leaves", "changes"),
    [
        (FIRST, {"update_interval": AutoWindow(5, 0.4), "select_interval": AutoSelect(0.5, 3)}),
        (
            SECOND,
            {
                "update_interval": AutoWindow(4, 0.7),
                "select_interval": EpochSelect(7),
                "full_warm_up_rounds": 2,
            },
        ),
        (FEW, {"update_interval": AutoWindow(3, 0.3), "select_interval": 5, "staleness": 0}),
        (FEW, {"update_interval": 3, "select_interval": AutoSelect(0.6, 4)}),
    ],
    ids=["both", "epochs", "steps", "selection"],
)
def test_whatever_the_gradients_are(leaves, changes):
    all_three(leaves, dataclasses.replace(AUTO, **changes), Plan(30, bad=(7, 8, 9), flush_at=(15,)))
