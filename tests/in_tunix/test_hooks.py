"""`ZenFlowHooks` in Tunix's own trainer: equality with AdamW, evaluations, and misuse."""

import importlib
import importlib.metadata
import itertools
import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from tests.comparisons import assert_same_bits
from tests.in_tunix.trainers import (
    AS_ADAMW,
    ENGINE,
    LATE,
    Conditional,
    Recorder,
    batches,
    make_model,
    make_trainer,
    mesh_of,
    weights,
    zenflow,
)
from zenflow_jax.integrations import tunix
from zenflow_jax.integrations.tunix import ZenFlowHooks, channel_axis

# Float32 operations in a different order; weights are near 1, updates near 1e-2.
ATOL = 1e-6
ADAMW = optax.adamw(1e-2, weight_decay=0.1)
DEVICES = pytest.mark.parametrize("devices", [0, 1, 4], ids=["one", "mesh of one", "mesh of four"])


def train(tx, steps, devices=0, evaluate=None, user_hooks=(), **settings):
    """Runs Tunix's trainer, with hooks if `evaluate`; returns the model, trainer and hooks."""
    with mesh_of(devices):
        trainer = make_trainer(tx, steps, devices=devices, **settings)
        hooks = None
        if evaluate is not None:
            options = {"evaluate": evaluate, "engine_options": ENGINE}
            hooks = ZenFlowHooks(trainer, hooks=list(user_hooks), **options)
        elif user_hooks:
            trainer.with_training_hooks(*user_hooks)
        trainer.train(batches(), list(itertools.islice(batches(1), 2)))
        return trainer.model, trainer, hooks


def assert_close(model, expected):
    for name, x in weights(expected).items():
        np.testing.assert_allclose(weights(model)[name], x, rtol=0, atol=ATOL, err_msg=name)


@DEVICES
@pytest.mark.parametrize("accumulate", [None, 2], ids=["each step", "sums of two"])
def test_windows_of_one_step_equal_adamw_in_the_trainer(devices, accumulate):
    recorder, expected = Recorder(), Recorder()
    settings = dict(devices=devices, gradient_accumulation_steps=accumulate)
    adamw, _, _ = train(ADAMW, 10, user_hooks=[expected], **settings)
    model, _, hooks = train(
        zenflow(**AS_ADAMW), 10, evaluate="as_is", user_hooks=[recorder], **settings
    )
    assert_close(model, adamw)
    assert recorder.calls == expected.calls
    np.testing.assert_allclose(recorder.losses, expected.losses, rtol=0, atol=ATOL)
    assert hooks.stats.steps == 10
    assert hooks.stats.skipped_steps == 0


@pytest.mark.parametrize("devices", [0, 4], ids=["one", "mesh of four"])
def test_sums_with_a_users_multi_steps_equal_the_trainers(devices):
    settings = {"evaluate": "as_is", "devices": devices}
    model, trainer, hooks = train(optax.MultiSteps(zenflow(**LATE), 2), 10, **settings)
    expected, _, _ = train(zenflow(**LATE), 5, gradient_accumulation_steps=2, **settings)
    assert trainer.train_steps == 10
    assert hooks.stats.steps == 5
    assert_same_bits(weights(model), weights(expected))


TWO = {"gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("sending", "devices", "settings"),
    [
        ("after_step", 4, {}),
        ("per_window", 4, TWO),
        ("during_step", 0, TWO | {"kind": Conditional}),
        ("per_window", 4, TWO | {"kind": Conditional}),
    ],
    ids=str,
)
def test_other_values_of_send_gradients_and_conditional_updates_equal_adamw(
    sending, devices, settings
):
    tx = zenflow(send_gradients=sending, **AS_ADAMW)
    model, _, hooks = train(tx, 5, evaluate="as_is", devices=devices, **settings)
    assert hooks.stats.steps == 5
    assert_close(model, train(ADAMW, 5, devices=devices, **settings)[0])


@DEVICES
def test_the_step_is_compiled_once(devices, caplog):
    with jax.log_compiles():
        train(zenflow(**LATE), 5, devices=devices, evaluate="as_is")
    compiled = [x for x in caplog.messages if x.startswith("Compiling ") and "train_step" in x]
    assert len(compiled) == 1, compiled


def test_evaluations_that_flush_see_weights_that_training_does_not_see():
    seen = {}
    for evaluate in ("as_is", "flush"):
        recorder = Recorder()
        options = zenflow(rolling=False, provisional_share=None, **LATE)
        train(options, 6, evaluate=evaluate, user_hooks=[recorder])
        seen[evaluate] = recorder.evaluated
        assert recorder.calls.count("evaluation end") == 3  # before training, at steps 3 and 6
    first, second = 2, 3  # the evaluation's steps at step 3
    assert_same_bits(seen["flush"][first], seen["flush"][second])
    assert np.any(seen["flush"][first]["head"] != seen["as_is"][first]["head"])


def test_a_trainer_that_is_called_repeatedly_continues():
    once = weights(train(zenflow(**LATE), 6, evaluate="as_is")[0])
    trainer, data = make_trainer(zenflow(**LATE), None), batches()
    trainer.is_managed_externally = True
    with ZenFlowHooks(trainer, engine_options=ENGINE) as hooks:
        for _ in range(3):
            trainer.train(list(itertools.islice(data, 2)))
        assert hooks.stats.window_lengths.get(1, 0) <= 1  # in the group that begins late
        hooks.flush()
    assert_same_bits(weights(trainer.model), once)


def test_a_trainer_without_its_hooks_or_after_its_end_is_rejected_at_its_first_step():
    trainer = make_trainer(zenflow(**LATE), 4)
    hooks = ZenFlowHooks(trainer)
    with pytest.raises(ValueError, match="already has `ZenFlowHooks`"):
        ZenFlowHooks(trainer)
    with pytest.raises(RuntimeError, match="The trainer has not started"):
        _ = hooks.engine
    trainer.with_training_hooks(Recorder())
    with pytest.raises(RuntimeError, match=r"other hooks have replaced these.*hooks=\.\.\."):
        trainer.train(batches())
    other = make_trainer(zenflow(**LATE), 4)
    other.with_training_hooks(hooks)
    with pytest.raises(ValueError, match="Make new hooks for each trainer"):
        other.train(batches())
    _, ended, _ = train(zenflow(**LATE), 2, evaluate="as_is")
    with pytest.raises(RuntimeError, match="`train` has closed the trainer.*is_managed_externally"):
        ended.train(batches())


def test_unsuitable_trainers_hooks_and_optimizers_are_rejected():
    trainer = make_trainer(zenflow(**LATE), 4)
    with pytest.raises(TypeError, match="`trainer` is a Model"):
        ZenFlowHooks(make_model(0))
    with pytest.raises(TypeError, match="`hooks` has a str"):
        ZenFlowHooks(trainer, hooks=["print"])
    with pytest.raises(ValueError, match="`evaluate` must be one of .* got 'always'"):
        ZenFlowHooks(trainer, evaluate="always")
    other = make_trainer(ADAMW, 4)
    with pytest.raises(ValueError, match="contains 0 ZenFlowStates"):
        ZenFlowHooks(other)
    assert other.training_hooks is None


def test_gradient_sums_on_the_device_are_rejected_before_the_first_step():
    tx = optax.MultiSteps(zenflow(send_gradients="after_step", **LATE), 2)
    with pytest.raises(ValueError, match="does not work with send_gradients"):
        train(tx, 4, evaluate="as_is")


def test_projections_in_tunix_models_have_their_inputs_as_channels():
    from tunix.models.qwen3 import model as qwen3

    sizes = dict(num_layers=1, vocab_size=32, embed_dim=16, hidden_dim=24)
    heads = dict(num_heads=4, head_dim=8, num_kv_heads=2, rope_theta=10_000, norm_eps=1e-6)
    settings = qwen3.ModelConfig(**sizes, **heads)
    model = nnx.eval_shape(lambda: qwen3.Qwen3(settings, rngs=nnx.Rngs(0)))
    state = jax.eval_shape(
        zenflow(channel_axis=channel_axis, topk_ratio=0.25).init, nnx.state(model, nnx.Param)
    )
    specs = {leaf.spec.name: leaf.spec for leaf in state.leaves}
    for name in ("q_proj", "k_proj", "v_proj"):
        (spec,) = (x for key, x in specs.items() if name in key)
        assert (spec.axis, spec.n, spec.stack) == (0, 16, ())
    (spec,) = (x for key, x in specs.items() if "o_proj" in key)
    assert (spec.n, spec.stack) == (8, (4,))


def test_the_installed_version_is_the_extras_version():
    root = Path(__file__).parents[2]
    extra = r'^tunix = \["google-tunix>=([\d.]+),<'
    (bound,) = re.findall(extra, (root / "pyproject.toml").read_text(), re.M)
    assert importlib.metadata.version("google-tunix") == bound == tunix.VERSION
    assert f"google-tunix {bound}" in (root / "docs/trainers.md").read_text()


def test_another_version_is_rejected_by_name(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.8")
    with pytest.raises(ImportError, match=r"google-tunix is 0\.1\.8, .* need 0\.1\.7"):
        importlib.reload(tunix)
