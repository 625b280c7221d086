"""Configs, files and arguments that `from_deepspeed` rejects; the error names the cause."""

import math
import re

import optax
import pytest

from tests.deepspeed.configs import (
    ADAM,
    OFFLOAD,
    REMOVE,
    RULES,
    changed,
    scheduled,
)
from zenflow_jax.deepspeed import from_deepspeed

WRONG = {
    RULES: [True],
    f"{RULES}.topk_ratio": [0, 1.0, "0.1", True],
    f"{RULES}.update_interval": [0, 2.5, "4", True],
    f"{RULES}.select_strategy": ["steps"],
    f"{RULES}.select_interval": [8, -4],
    f"{RULES}.full_warm_up_rounds": [-1],
    f"{RULES}.overlap_step": ["true", 1],
    f"{RULES}.auto_ratio": [1.5],
    f"{RULES}.topk_ration": [0.1],
    "zero_optimization.stage": [4, True],
    f"{OFFLOAD}.device": ["gpu"],
    "optimizer": [[]],
    "optimizer.type": ["Lamb", "auto"],
    f"{ADAM}.lr": ["auto", -1, [1e-3, 1e-4]],
    f"{ADAM}.betas": [[0.9], [0.9, 1.0]],
    f"{ADAM}.amsgrad": [True],
    f"{ADAM}.adam_w_mode": [False],
    f"{ADAM}.bias_correction": [False],
    f"{ADAM}.max_grad_norm": [1.0],
    f"{ADAM}.weightdecay": [0.1],
    "gradient_clipping": [-1, math.nan, math.inf],
    "scheduler": [
        {"type": "OneCycle"},
        {"type": "WarmupDecayLR"},
        {"type": "WarmupLR", "params": {"warmup_num_steps": 0}},
        {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        {"type": "WarmupLR", "params": {"warmup_type": "cosine"}},
        {"type": "WarmupLR", "params": {"last_batch_iteration": 9}},
    ],
}


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path in WRONG for value in WRONG[path]], ids=str
)
def test_a_key_with_an_invalid_value_is_named(path, value):
    with pytest.raises(ValueError, match=rf"^`{re.escape(path)}\b"):
        _ = from_deepspeed(changed({path: value})).optimizer


OF_SCHEDULE = scheduled("WarmupLR") | {f"{ADAM}.lr": "auto"}


def selected(strategy, interval):
    return {RULES: {"update_interval": 4, "select_strategy": strategy, "select_interval": interval}}


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        (selected("step", "auto"), {}, 'select_interval` is "auto".* a whole number '),
        (selected("epoch", 1), {}, "select_strategy`.* steps_per_epoch="),
        (OF_SCHEDULE, {"learning_rate": optax.constant_schedule(1.0)}, "needs a number"),
        (
            scheduled("WarmupLR") | {"optimizer": REMOVE},
            {},
            "`scheduler.params.warmup_max_lr` is missing",
        ),
    ],
)
def test_conflicting_values_are_rejected(changes, arguments, words):
    with pytest.raises(ValueError, match=words):
        _ = from_deepspeed(changed(changes), **arguments).arguments
