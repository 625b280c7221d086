"""The slow NumPy reference equals results worked out by hand.

An engine equals both the reference and optax, so the reference equals optax.

With `b1 = b2 = 0`, `eps = 1` and no weight decay an AdamW step is `p -= lr g / (|g| + 1)`, so
gradients of 1, 3 and 7 move a parameter by 1/2, 3/4 and 7/8 of the learning rate, exactly.
"""

import numpy as np
import pytest

from tests.reference import Reference, Settings
from zenflow_jax import AutoWindow

BY_HAND = dict(b1=0.0, b2=0.0, eps=1.0, weight_decay=0.0, provisional_share=None)


def one_leaf(n, learning_rate=1.0, *, dtype=np.float32, **options):
    """Returns a reference for one `(n, 1)` leaf of zeros, with steps that are easy to work out."""
    settings = Settings(**{"rolling": False, "window_scaling": None, **BY_HAND, **options})
    return Reference([np.zeros((n, 1), dtype)], learning_rate, settings, channel_axes=[-2])


def step(reference, *gradient):
    """Takes a step with a gradient number for each channel; returns the parameter's channels."""
    (param,) = reference.step([np.array(gradient, np.float32)[:, None]])
    return param[:, 0].tolist()


DOUBLING = [2.0**t for t in range(9)]
HALF = {"topk_ratio": 0.5, "staleness": 0}
# Each case has rates, options and, for each step, the gradients and the resulting weights of all
# channels. None in place of gradients means a flush.
BY_STEP = {
    "a deferred channel takes one step, with its window's mean gradient and last rate": (
        DOUBLING,
        HALF | {"update_interval": 2},
        [((1, 1), (-0.5, 0)), ((1, 5), (-1.5, -1.5))],
    ),
    # Two steps of 4 / (5 + 3): gradients of 1 and 7 have a mean of 4, and mean squares of 25.
    "a window is as long as its steps, with the means of its gradients and of their squares": (
        1.0,
        HALF | {"update_interval": 2, "eps": 3.0, "window_scaling": True},
        [((9, 1), (-0.75, 0)), ((9, 7), (-1.5, -1)), ((9, 1), (-2.25, -1))]
        + [((9, np.nan), (-2.25, -1.25))],  # one step of 1 / (1 + 3)
    ),
    "an overlapped update is stale by exactly one window": (
        1.0,
        {"topk_ratio": 0.5, "update_interval": 3},
        [((1, 1), (-0.5 * t, 0)) for t in (1, 2, 3)]
        + [((1, 3), (-2, 0)), ((1, 3), (-2.5, 0)), ((1, 3), (-3, -0.5))]
        + [((1, 3), (-3.5, -0.5)), ((1, 3), (-4, -0.5)), ((1, 3), (-4.5, -1.25))],
    ),
    # From then on it is an ordinary selected channel; the other channel is still stale.
    "an entering channel receives the update of the closed window at once": (
        1.0,
        {"topk_ratio": 0.3, "update_interval": 2, "select_interval": 2},
        [
            ((0, 1, 3), (0, 0, 0)),
            ((0, 1, 3), (0, 0, -0.75)),
            ((0, 1, 3), (0, 0, -1.5)),
            ((0, 1, 3), (0, -0.5, -2.25)),
        ],
    ),
    # The third channel is then selected. Windows close at steps 5 and 7, so the first update
    # arrives at 7.
    "a warm-up updates everything and ends with the first selection": (
        1.0,
        {"topk_ratio": 0.3, "update_interval": 2, "full_warm_up_rounds": 3},
        [((1, 1, 3), (-0.5 * t, -0.5 * t, -0.75 * t)) for t in (1, 2, 3)]
        + [((1, 1, 3), (-1.5, -1.5, -0.75 * t)) for t in (4, 5, 6)]
        + [((1, 1, 3), (-2, -2, -5.25))],
    ),
    # The mean is 3, over the two steps before it; the rate is 4, from the next step that counts.
    "a skipped step counts for the window but neither for the rate nor for the mean": (
        DOUBLING,
        HALF | {"update_interval": 3},
        [((1, 1), (-0.5, 0)), ((1, 5), (-1.5, 0)), ((np.nan, 1), (-1.5, -3))]
        + [((1, 1), (-1.5, -5))],  # the other channel is selected then
    ),
    "a window of skipped steps makes no update, not even a late one": (
        1.0,
        {"topk_ratio": 0.5, "update_interval": 2, "weight_decay": 0.5},
        [((0, np.nan), (0, 0))] * 4,
    ),
    # With gradients of 1 and 3, this takes three steps, which is known a step later; the update
    # arrives at the next boundary.
    "an adaptive window closes when its deferred sum weighs as much as one step": (
        1.0,
        {"topk_ratio": 0.5, "update_interval": AutoWindow(6, 1.0)},
        [((3, 1), (-0.75 * t, 0)) for t in range(1, 8)] + [((3, 1), (-6, -0.5))],
    ),
    # First window: mean 3, rate 8. Second window: mean 3, rate 128.
    "a flush merges the update of a closed window and leaves the open window alone": (
        DOUBLING,
        {"topk_ratio": 0.5, "update_interval": 4},
        [((15, 1), (-0.9375, 0)), ((15, 5), (-2.8125, 0)), (None, (-2.8125, 0))]
        + [((15, 2), (-6.5625, 0)), ((15, 4), (-14.0625, 0)), ((15, 1), (-29.0625, 0))]
        + [(None, (-29.0625, -6))] * 2
        + [((15, 3), (-59.0625, -6)), ((15, 3), (-119.0625, -6)), ((15, 5), (-239.0625, -6))]
        + [(None, (-239.0625, -102))],
    ),
    "a flush merges no update if provisional steps of the open window would be lost": (
        1.0,
        {"topk_ratio": 0.5, "update_interval": 2, "provisional_share": 0.5},
        [((15, 1), (-0.9375, 0)), ((15, 5), (-1.875, -0.5)), ((15, 1), (-2.8125, -1))]
        + [(None, (-2.8125, -1)), ((15, 5), (-3.75, -0.75)), (None, (-3.75, -1.5))],
    ),
}


@pytest.mark.parametrize(("rate", "options", "steps"), BY_STEP.values(), ids=BY_STEP)
def test_a_run_equals_the_results_worked_out_by_hand(rate, options, steps):
    rate = rate if isinstance(rate, float) else rate.__getitem__
    reference = one_leaf(len(steps[0][1]), rate, **options)
    for gradients, expected in steps:
        if gradients is None:
            seen = reference.flush()[0][:, 0].tolist()
        else:
            seen = step(reference, *gradients)
        assert seen == list(expected)


def test_the_first_channels_are_selected_until_the_first_boundary_and_then_the_best():
    reference = one_leaf(4, topk_ratio=0.5, update_interval=2, select_interval=4)
    chosen = [reference.selected[0].tolist()]
    for t in range(1, 7):
        step(reference, *([1.0, 2.0, 3.0, 2.0] if t <= 2 else [4.0, 3.0, 2.0, 1.0]))
        chosen.append(reference.selected[0].tolist())
    # Selected at step 2, the first boundary, then at 4; earlier scores are reset by then.
    assert chosen == [[0, 1]] * 2 + [[1, 2]] * 2 + [[0, 1]] * 3
    assert reference.reselections == 2
