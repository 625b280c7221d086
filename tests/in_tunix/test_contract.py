"""What `zenflow_jax.integrations.tunix` leans on in Tunix, which nobody has promised."""

import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
from pathlib import Path

import jax
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from tunix.sft import checkpoint_manager as tunix_checkpoints
from tunix.sft import hooks as tunix_hooks
from tunix.sft import peft_trainer

from tests.in_tunix.trainers import Recorder, batches, config, make_model
from zenflow_jax.integrations import tunix

ROOT = Path(__file__).parents[2]


def test_the_installed_version_is_the_one_of_the_extra():
    (bound,) = re.findall(
        r'^tunix = \["google-tunix>=([\d.]+),<', (ROOT / "pyproject.toml").read_text(), re.M
    )
    assert importlib.metadata.version("google-tunix") == bound
    assert bound == tunix.VERSION
    assert f"google-tunix {bound}" in (ROOT / "docs/trainers.md").read_text()


def test_another_version_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.8")
    with pytest.raises(ImportError, match=r"expected google-tunix 0\.1\.7, got 0\.1\.8"):
        importlib.reload(tunix)


def test_zenflow_imports_nothing_of_tunix_unasked():
    code = "import sys, zenflow_jax; print([x for x in sys.modules if 'tunix' in x])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stdout + found.stderr


def test_hooks_have_the_six_events_that_are_passed_on():
    events = {"train_start", "train_end", "train_step_start", "train_step_end"}
    events |= {"eval_step_start", "eval_step_end"}
    assert tunix_hooks.TrainingHooks.__abstractmethods__ == {f"on_{x}" for x in events}
    own = {name for name in vars(tunix_hooks.TrainingHooks) if name.startswith("on_")}
    assert own == tunix_hooks.TrainingHooks.__abstractmethods__


def test_a_checkpoint_has_three_items_by_a_manager_of_orbax(tmp_path):
    manager = tunix_checkpoints.CheckpointManager(str(tmp_path))
    assert type(manager._checkpoint_manager) is ocp.CheckpointManager
    manager.close()
    assert tunix_checkpoints.CheckpointManager(None)._checkpoint_manager is None
    assert isinstance(
        tunix_checkpoints._DEFAULT_CHECKPOINTING_OPTIONS, ocp.CheckpointManagerOptions
    )
    source = inspect.getsource(tunix_checkpoints)
    items = set(re.findall(r"'(\w+)': ocp\.\w+CheckpointHandler\(", source))
    items |= set(re.findall(r"item_handlers\['(\w+)'\]", source))
    assert items == {"model_params", "optimizer_state", "custom_metadata"}
    uses = set(re.findall(r"self\._checkpoint_manager\.(\w+)", source))
    assert uses == {"latest_step", "should_save", "save", "metadata", "restore", "close"}


@pytest.mark.parametrize("accumulate", [None, 2])
def test_saving_follows_each_update_and_precedes_the_next_step_and_the_evaluation(accumulate):
    recorder = Recorder()

    class Noted(tunix_checkpoints.CheckpointManager):
        def save(self, step, *args, **kwargs):
            recorder.calls.append(f"save {step}")
            return super().save(step, *args, **kwargs)

        def close(self):
            recorder.calls.append("close")

    settings = config(3, gradient_accumulation_steps=accumulate)
    trainer = peft_trainer.PeftTrainer(make_model(0), optax.adamw(1e-2), settings)
    trainer.checkpoint_manager = Noted()
    trainer.with_training_hooks(recorder)
    evaluation = [next(batches(1))]
    trainer.train(batches(), evaluation)
    steps = ["step start"] * (accumulate or 1)
    evaluate = ["evaluation step", "evaluation end"]
    assert recorder.calls == [
        *evaluate,
        "train start",
        *steps,
        "save 1",
        *steps,
        "step end",  # of the first
        "save 2",
        *steps,
        "step end",
        "save 3",
        *evaluate,
        "train end",
        "step end",
        "save 3",  # tried again, as nothing is saved here
        "close",
    ]


def test_the_optimizer_is_flax_own_and_donated():
    trainer = peft_trainer.PeftTrainer(make_model(0), optax.adamw(1e-2), config(1))
    assert type(trainer.optimizer) is nnx.Optimizer
    assert trainer.optimizer.wrt is nnx.Param
    before = jax.tree.leaves(nnx.state(trainer.optimizer))
    kept = jax.tree.leaves(nnx.state(trainer.model))
    trainer.train(batches())
    assert all(x.is_deleted() for x in before if x.ndim)
    assert not any(x.is_deleted() for x in kept)
