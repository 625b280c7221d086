"""What `zenflow_jax.integrations.tunix` leans on in Tunix, which nobody has promised."""

import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import optax
import pytest
from tunix.sft import checkpoint_manager as tunix_checkpoints

from tests.in_tunix.trainers import Recorder, batches, make_trainer
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


@pytest.mark.parametrize("accumulate", [None, 2])
def test_saving_follows_each_update_and_precedes_the_next_step_and_the_evaluation(accumulate):
    recorder = Recorder()

    class Noted(tunix_checkpoints.CheckpointManager):
        def save(self, step, *args, **kwargs):
            recorder.calls.append(f"save {step}")
            return super().save(step, *args, **kwargs)

        def close(self):
            recorder.calls.append("close")

    trainer = make_trainer(optax.adamw(1e-2), 3, gradient_accumulation_steps=accumulate)
    trainer.checkpoint_manager = Noted()
    trainer.with_training_hooks(recorder)
    evaluation = [next(batches(1))]
    trainer.train(batches(), evaluation)
    steps = ["step start"] * (accumulate or 1)
    evaluate = ["evaluation step", "evaluation end"]
    assert recorder.calls == [
        *evaluate,
        *("train start", *steps, "save 1"),
        *(*steps, "step end", "save 2"),  # the end of the first
        *(*steps, "step end", "save 3"),
        *evaluate,
        *("train end", "step end", "save 3", "close"),  # tried again, as nothing is saved here
    ]
