"""Runs that must equal `optax.adamw`, or be bit-identical to each other.

Steps are compiled in the same way as for users. `test_agreement.py` uses the slow reference.
"""

import pytest

from tests import comparisons, runs
from tests.comparisons import MAX_NORM, SEEDS, WARM, seeded
from tests.runs import FEW, SECOND, Plan, Settings, Training


@pytest.fixture(autouse=True)
def optimized_compilation(monkeypatch):
    monkeypatch.setattr(runs, "optimized", True)


STEP_BY_STEP = {"update_interval": 1, "staleness": 0}
SELECTING = {"topk_ratio": 0.25, "select_interval": 1, "max_grad_norm": MAX_NORM, **STEP_BY_STEP}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leaves", "options", "steps", "seed"),
    [
        (SECOND, {"topk_ratio": 0.0, "select_interval": 1000, **STEP_BY_STEP}, 12, SEEDS[0]),
        (FEW, SELECTING, 12, SEEDS[0]),
        (SECOND, {"topk_ratio": 1.0, "update_interval": 4}, 12, SEEDS[1]),
        # Without resident leaves, which have no warm-up.
        (FEW[1:], WARM, WARM["full_warm_up_rounds"], SEEDS[1]),
    ],
    ids=["nothing selected", "selecting at every step, clipped", "all selected", "warm-up"],
)
def test_without_staleness_a_run_equals_optax_adamw(leaves, options, steps, seed):
    options = Settings(weight_decay=0.1, provisional_share=0.5, **options)
    expected = comparisons.adamw(leaves, options.max_grad_norm, options.weight_decay, steps, seed)
    with seeded(leaves, options, seed) as training:
        comparisons.assert_close([p for _, p in training.follow(Plan(steps))], expected)


@pytest.mark.slow
def test_runs_are_bit_identical_whenever_gradients_leave_and_whether_steps_donate():
    windows = {"update_interval": 2, "select_interval": 4}
    options, histories = Settings(topk_ratio=0.3, provisional_share=0.5, **windows), []
    for more in ({}, {"donate": True}, {"donate": True, "send_gradients": "after_step"}):
        with Training(FEW[:2], options, host_kernel="numpy", **more) as training:
            histories.append(training.history(Plan(9, bad=(3,), flush_at=(5,))))
    for history in histories[1:]:
        comparisons.assert_same_bits(history, histories[0])
