"""`from_deepspeed`: a DeepSpeed config gives the same training here, or an error names the key.

Expected values are from DeepSpeed 0.19.8's documentation and source.
"""

import copy
import math
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zenflow_jax import AutoSelect, AutoWindow, zenflow
from zenflow_jax.deepspeed import from_deepspeed

# The config from DeepSpeed's ZenFlow tutorial.
TUTORIAL = {
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "zenflow": {
            "topk_ratio": 0.05,
            "select_strategy": "auto",
            "select_interval": "auto",
            "update_interval": 4,
            "full_warm_up_rounds": 0,
            "overlap_step": True,
        },
    }
}
TRAINING = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.01},
    },
    "gradient_clipping": 0.5,
    **TUTORIAL,
}
RULES = "zero_optimization.zenflow"
OFFLOAD = "zero_optimization.offload_optimizer"
ADAM = "optimizer.params"
REMOVE = Ellipsis  # prints the same in every test process

# float32 compared with Python's floats, as a share of the highest rate; 545,000 values of
# DeepSpeed's own classes differed by at most 1.9e-7.
RATE_TOLERANCE = 1e-6


def changed(values: dict[str, Any], config: Any = TRAINING) -> Any:
    """Returns the config with other values at paths such as "optimizer.params.lr"."""
    config = copy.deepcopy(config)
    for path, value in values.items():
        *sections, key = path.split(".")
        section = config
        for name in sections:
            section = section.setdefault(name, {})
        if value is REMOVE:
            del section[key]
        else:
            section[key] = value
    return config


def scheduled(name: str, **params: Any) -> dict:
    return {"scheduler": {"type": name, "params": params}}


def untranslated(config, **arguments):
    """Returns the options; checks that the only warning lists `not_translated`, if not empty."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = from_deepspeed(config, **arguments)
    listed = re.findall(r"`([^`]+)`", "".join(str(warning.message) for warning in caught))
    assert options.not_translated == tuple(listed)
    assert len(caught) == bool(listed)
    return options, listed


RULES_OF_TUTORIAL = {
    "topk_ratio": 0.05,
    "update_interval": 4,
    "full_warm_up_rounds": 0,
    "provisional_share": None,
}


def test_the_tutorials_sample_works_unchanged():
    options, names = untranslated(TUTORIAL)
    adam = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}
    assert options.arguments == RULES_OF_TUTORIAL | adam | {"select_interval": AutoSelect()}
    assert names == []
    assert options.learning_rate is None


def test_a_complete_config_sets_the_optimizer():
    options = from_deepspeed(TRAINING, steps_per_epoch=1250)
    assert options.learning_rate == 2e-5
    adam = {"b1": 0.9, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": 0.5}
    assert options.arguments == RULES_OF_TUTORIAL | adam | {"select_interval": 1250}
    params = {"w": jnp.ones((40, 4))}
    states = (tx.init(params) for tx in (options.optimizer, zenflow(2e-5, **options.arguments)))
    assert len({jax.tree.structure(state) for state in states}) == 1  # has all settings


OFFLOADED = {"topk_ratio": 0, "update_interval": 1, "staleness": 0}
NVME = {RULES: REMOVE, f"{OFFLOAD}.device": "nvme"}
NOT_FOLLOWED = [
    ("train_batch_size", 8),
    ("bf16", {"enabled": True}),
    ("gradient_cliping", 1.0),
    ("zero_optimization.stage", 3),
    ("zero_optimization.offload_param", {"device": "cpu"}),
    ("optimizer.params.torch_adam", True),
]


@pytest.mark.parametrize(
    ("changes", "expected", "listed"),
    [
        ({RULES: REMOVE}, {**OFFLOADED, "max_grad_norm": 0.5}, []),
        (NVME, OFFLOADED, [f"{OFFLOAD}.device"]),
        ({"zero_optimization": {"stage": 2}}, {"topk_ratio": 1}, ["zero_optimization.stage"]),
        ({f"{ADAM}.lr": REMOVE}, {"learning_rate": 1e-3}, []),
        ({"optimizer.type": "Adam"}, {"weight_decay": 0.01}, []),
        ({"gradient_clipping": REMOVE}, {"max_grad_norm": 1.0}, []),
        ({"gradient_clipping": 0.0}, {"max_grad_norm": None}, []),
        *(
            ({path: value}, from_deepspeed(TRAINING).arguments, [path])
            for path, value in NOT_FOLLOWED
        ),
    ],
    ids=str,
)
def test_keys_have_deepspeeds_meaning_or_are_listed_as_not_translated(changes, expected, listed):
    options, names = untranslated(changed(changes))
    assert names == listed
    values = vars(options) | options.arguments
    assert {name: values[name] for name in expected} == expected


NEVER = 2**31 - 1


def selecting(strategy, interval, **more):
    """Returns the keys of a `zenflow` section with windows of four steps."""
    return {"update_interval": 4, "select_strategy": strategy, "select_interval": interval} | more


@pytest.mark.parametrize(
    ("keys", "steps_per_epoch", "expected"),
    [
        ({}, None, {"update_interval": AutoWindow(), "select_interval": AutoSelect()}),
        ({}, None, {"topk_ratio": 0.1, "staleness": 0, "full_warm_up_rounds": 0}),
        ({"auto_ratio": 0.5}, None, {"update_interval": AutoWindow(8, 0.5)}),
        ({"auto_ratio": 0}, None, {"update_interval": 2}),
        (selecting("auto", "auto"), None, {"select_interval": AutoSelect()}),
        (selecting("auto", "auto", steps_per_epoch=50), None, {"select_interval": 50}),
        (selecting("auto", "auto", steps_per_epoch=50), 100, {"select_interval": 100}),
        (selecting("epoch", 3), 101, {"select_interval": 303}),
        (selecting("epoch", 0), 100, {"select_interval": NEVER}),
        (selecting("step", 4), None, {"select_interval": 4}),  # as long as a window
        (selecting("step", 10), None, {"select_interval": 10}),  # not a multiple of the window
    ],
    ids=str,
)
def test_the_zenflow_section_has_deepspeeds_meaning_and_defaults(keys, steps_per_epoch, expected):
    options = from_deepspeed(changed({RULES: keys}), steps_per_epoch=steps_per_epoch)
    assert {key: options.arguments[key] for key in expected} == expected
    _ = options.optimizer.init({"w": jnp.ones((4, 4))})  # zenflow accepts it


def automatic(*keys):
    return dict.fromkeys(keys, "auto")


RATES = automatic("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
HUGGING_FACE = {
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": automatic("lr", "betas", "eps", "weight_decay")},
    "scheduler": {"type": "WarmupDecayLR", "params": RATES},
    **TUTORIAL,
}
ARGUMENTS = {"b1": 0.8, "b2": 0.9, "eps": 1e-5, "weight_decay": 0.2, "max_grad_norm": 9.0}


def test_arguments_replace_values_that_are_auto_or_missing():
    options = from_deepspeed(
        HUGGING_FACE, learning_rate=3e-4, total_steps=100, warmup_steps=10, **ARGUMENTS
    )
    assert options.arguments.items() >= ARGUMENTS.items()
    rate = options.learning_rate
    expected = [3e-4, 3e-4 * (100 - 60) / (100 - 10)]
    np.testing.assert_allclose([rate(11), rate(61)], expected, rtol=RATE_TOLERANCE)
    options = from_deepspeed(TUTORIAL, learning_rate=3e-4, **ARGUMENTS)
    assert options.learning_rate == 3e-4
    assert options.arguments.items() >= ARGUMENTS.items()
    assert from_deepspeed(TUTORIAL, max_grad_norm=None).arguments["max_grad_norm"] is None
    # The config's values take precedence over arguments.
    assert from_deepspeed(TRAINING, learning_rate=1.0, **ARGUMENTS) == from_deepspeed(TRAINING)


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


WRONG = {
    RULES: [True],
    f"{RULES}.topk_ratio": [1.0, "0.1"],
    f"{RULES}.update_interval": [0],
    f"{RULES}.select_strategy": ["steps"],
    f"{RULES}.overlap_step": [1],
    f"{RULES}.topk_ration": [0.1],
    "zero_optimization.stage": [4, True],
    "optimizer.type": ["auto"],
    f"{ADAM}.lr": ["auto", -1, math.nan],
    f"{ADAM}.betas": [[0.9]],
    f"{ADAM}.amsgrad": [True],
    f"{ADAM}.adam_w_mode": [False],
    f"{ADAM}.bias_correction": [False],
    f"{ADAM}.max_grad_norm": [1.0],
    "scheduler": [
        {"type": "OneCycle"},
        {"type": "WarmupDecayLR"},
        {"type": "WarmupLR", "params": {"last_batch_iteration": 9}},
    ],
}


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path in WRONG for value in WRONG[path]], ids=str
)
def test_a_key_with_an_invalid_value_is_named(path, value):
    with pytest.raises(ValueError, match=rf"^`{re.escape(path)}\b"):
        _ = from_deepspeed(changed({path: value})).optimizer


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({RULES: selecting("step", "auto")}, 'select_interval` is "auto".* a whole number '),
        ({RULES: selecting("epoch", 1)}, "steps_per_epoch"),
        (scheduled("WarmupLR") | {"optimizer": REMOVE}, "`scheduler.params.warmup_max_lr` is mis"),
    ],
)
def test_conflicting_values_are_rejected(changes, words):
    with pytest.raises(ValueError, match=words):
        from_deepspeed(changed(changes))
