"""`from_deepspeed`: a DeepSpeed config gives the same training here, or an error names the key.

Expected values are from DeepSpeed 0.19.8's documentation and source. `test_schedules.py` tests
schedules, and `test_refused_configs.py` tests rejected configs.
"""

import copy
import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenflow_jax
from tests.deepspeed.configs import (
    ADAM,
    OFFLOAD,
    RATE_TOLERANCE,
    REMOVE,
    RULES,
    TRAINING,
    TUTORIAL,
    changed,
)
from zenflow_jax import AutoSelect, AutoWindow
from zenflow_jax.deepspeed import from_deepspeed


def zenflow_section(**keys):
    """Returns a config whose `zenflow` section has only these keys."""
    return changed({RULES: keys})


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
    with pytest.raises(TypeError, match="`learning_rate` must be a number"):
        _ = options.optimizer


def test_a_complete_config_sets_the_optimizer():
    options = from_deepspeed(TRAINING, steps_per_epoch=1250)
    assert options.learning_rate == 2e-5
    adam = {"b1": 0.9, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": 0.5}
    assert options.arguments == RULES_OF_TUTORIAL | adam | {"select_interval": 1250}
    params = {"w": jnp.ones((40, 4)), "b": jnp.ones(4)}
    state = options.optimizer.init(params)
    expected = zenflow_jax.zenflow(2e-5, **options.arguments).init(params)
    assert jax.tree.structure(state) == jax.tree.structure(expected)  # including static metadata


def test_a_config_file_means_the_same_as_its_contents_and_is_not_changed(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(TRAINING), encoding="utf-8")
    config = copy.deepcopy(TRAINING)
    expected = from_deepspeed(config, total_steps=10)
    assert config == TRAINING
    for form in (path, str(path)):
        assert from_deepspeed(form, total_steps=10) == expected


@pytest.mark.parametrize("clipping", [0.5, 0])
def test_without_zero_the_optimizer_is_adamw_on_the_device(clipping):
    config = changed({"gradient_clipping": clipping, "zero_optimization": REMOVE})
    tx = from_deepspeed(config).optimizer
    adamw = optax.adamw(2e-5, 0.9, 0.95, 1e-6, weight_decay=0.01)
    expected = optax.chain(optax.clip_by_global_norm(0.5), adamw) if clipping else adamw
    params, gradients = {"w": jnp.full((3, 2), 2.0)}, {"w": jnp.arange(6.0).reshape(3, 2)}
    assert not tx.init(params).offloads
    with jax.numpy_dtype_promotion("standard"):  # optax promotes dtypes
        updates = (x.update(gradients, x.init(params), params)[0]["w"] for x in (tx, expected))
        np.testing.assert_allclose(*updates, rtol=1e-6)


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
        ({"scheduler": {"params": {}}}, {"learning_rate": 2e-5}, ["scheduler"]),
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


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"update_interval": AutoWindow(), "select_interval": AutoSelect()}),
        ({}, {"topk_ratio": 0.1, "staleness": 0, "full_warm_up_rounds": 0}),
        ({"topk_ratio": "auto", "overlap_step": "auto"}, {"topk_ratio": 0.1, "staleness": 0}),
        ({"update_interval": "auto", "auto_ratio": 0.5}, {"update_interval": AutoWindow(8, 0.5)}),
        ({"update_interval": "auto", "auto_ratio": 0}, {"update_interval": 2}),
        ({"update_interval": 4.0}, {"update_interval": 4}),
    ],
    ids=str,
)
def test_the_zenflow_section_has_deepspeeds_defaults_and_auto_values(keys, expected):
    arguments = from_deepspeed(zenflow_section(**keys)).arguments
    assert {key: arguments[key] for key in expected} == expected


NEVER = 2**31 - 1


@pytest.mark.parametrize(
    ("strategy", "interval", "extra", "steps_per_epoch", "expected"),
    [
        ("auto", "auto", {}, None, AutoSelect()),
        ("auto", "auto", {"steps_per_epoch": 50}, None, 50),
        ("auto", "auto", {"steps_per_epoch": 50}, 100, 100),
        ("epoch", 3, {}, 101, 303),
        ("epoch", 0, {}, 100, NEVER),
        ("step", 4, {}, None, 4),  # as long as a window
        ("step", 10, {}, None, 10),  # not a multiple of the window
        ("step", 10, {"update_interval": "auto", "full_warm_up_rounds": 3}, None, 10),
    ],
    ids=str,
)
def test_selection_follows_the_strategy_and_the_interval(
    strategy, interval, extra, steps_per_epoch, expected
):
    keys = {"update_interval": 4, "select_strategy": strategy, "select_interval": interval} | extra
    options = from_deepspeed(zenflow_section(**keys), steps_per_epoch=steps_per_epoch)
    assert options.arguments["select_interval"] == expected
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
    for rate in (1.0, optax.constant_schedule(1.0)):
        assert from_deepspeed(TRAINING, learning_rate=rate, **ARGUMENTS) == from_deepspeed(TRAINING)
