"""Windows and selections that adapt: engine and reference do the same."""

import numpy as np
import pytest

from tests import comparisons
from tests.runs import FEW, FIRST, Plan, Settings, Training
from zenflow_jax import AutoSelect, AutoWindow

PLAN = Plan(30, bad=(7, 8, 9), flush_at=(15,))
NOTHING_COUNTED = Plan(7, bad=tuple(range(1, 8)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leaves", "changes", "plan"),
    [
        (
            FIRST,
            {"update_interval": AutoWindow(5, 0.4), "select_interval": AutoSelect(0.5, 3)},
            PLAN,
        ),
        (FEW, {"update_interval": AutoWindow(3, 0.3), "select_interval": 5, "staleness": 0}, PLAN),
        (FEW, {"update_interval": 3, "select_interval": AutoSelect(0.6, 4)}, PLAN),
        (FEW, {"update_interval": 3, "select_interval": AutoSelect(0.6, 4)}, NOTHING_COUNTED),
    ],
    ids=["both", "five steps", "selection", "all skipped"],
)
def test_windows_and_selections_that_adapt_are_those_of_the_reference(leaves, changes, plan):
    settings = Settings(
        topk_ratio=0.3, weight_decay=0.1, max_grad_norm=5.0, full_warm_up_rounds=2, **changes
    )
    expected, slow = comparisons.reference(leaves, settings, plan)
    ends = slow.turns[0].boundaries
    if isinstance(settings.update_interval, AutoWindow):
        assert len(set(np.diff(ends[2:]))) > 1
    with Training(leaves, settings, donate=True) as training:
        comparisons.assert_agree(training.history(plan), expected)
        stats = training.engine.stats
        assert (stats.windows, stats.reselections) == (slow.windows, slow.reselections)
