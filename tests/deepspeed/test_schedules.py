"""Learning-rate schedules, compared with DeepSpeed's formulas in Python floats."""

import math

import jax
import numpy as np
import pytest

from tests.deepspeed.configs import RATE_TOLERANCE, changed, scheduled
from zenflow_jax.deepspeed import from_deepspeed


def deepspeed_rate(i, name, *, lowest, highest, first, last, warmup, shape, total):
    """Returns the rate at iteration `i`; `first` and `last` are shares of `highest`."""
    warmup = max(2, warmup)
    cosine = name == "WarmupCosineLR"
    if i < 0:
        return 0.0 if cosine else lowest
    risen = math.log(i + 1) / math.log(warmup) if shape == "log" else i / warmup
    if cosine and i < warmup:
        return highest * (first + (1 - first) * risen)
    if cosine:
        progress = min(1.0, (i - warmup + 1) / max(1, total - warmup))
        return highest * (last + (1 - last) * (1 + math.cos(math.pi * progress)) / 2)
    fallen = max(0, (total - i) / max(1, total - warmup)) if name == "WarmupDecayLR" else 1.0
    return lowest + (highest - lowest) * (risen if i < warmup else fallen)


# DeepSpeed's defaults; "WarmupDecayLR" ignores the optimizer's rate.
DEFAULTS = {"lowest": 0.0, "highest": 2e-5, "first": 0.0, "last": 1e-4}
COSINE = {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.2}
SCHEDULES = [
    ("WarmupLR", {}, {}),
    ("WarmupLR", {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3}, {"lowest": 1e-5, "highest": 1e-3}),
    ("WarmupDecayLR", {}, {"highest": 1e-3}),
    ("WarmupDecayLR", {"warmup_max_lr": 3e-4}, {"highest": 3e-4}),
    ("WarmupCosineLR", {}, {}),
    ("WarmupCosineLR", COSINE, {"first": 0.1, "last": 0.2}),
]
STEPS = 120


@pytest.mark.parametrize(("name", "params", "numbers"), SCHEDULES, ids=str)
@pytest.mark.parametrize(
    ("warmup", "shape", "total"), [(1, "log", 100), (7, "linear", 5), (50, "log", 100)]
)
def test_schedules_match_deepspeed(name, params, numbers, warmup, shape, total):
    params = params | {"warmup_num_steps": warmup, "warmup_type": shape}
    params |= {} if name == "WarmupLR" else {"total_num_steps": total}
    schedule = from_deepspeed(changed(scheduled(name, **params))).learning_rate
    rates = np.asarray(jax.jit(jax.vmap(schedule))(np.arange(STEPS, dtype=np.int32)))
    numbers = DEFAULTS | numbers | {"warmup": warmup, "shape": shape, "total": total}
    expected = [deepspeed_rate(count - 1, name, **numbers) for count in range(STEPS)]
    assert rates.dtype == np.float32
    np.testing.assert_allclose(rates, expected, rtol=0, atol=RATE_TOLERANCE * max(expected))
    plain = [schedule(0), schedule(3)]  # without jit, with Python ints
    np.testing.assert_allclose(rates[[0, 3]], plain, rtol=RATE_TOLERANCE)


def test_a_schedule_without_parameters_warms_up_logarithmically_for_1000_steps():
    rate = from_deepspeed(changed(scheduled("WarmupLR"))).learning_rate
    np.testing.assert_allclose(rate(501), 2e-5 * math.log(501) / math.log(1000), rtol=1e-6)
