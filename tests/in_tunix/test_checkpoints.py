"""A trainer that resumes from its own checkpoint is bit-identical, even if the run was killed."""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from tunix.sft import checkpoint_manager

from tests.comparisons import assert_same_bits
from tests.in_tunix.trainers import (
    ENGINE,
    LATE,
    Recorder,
    batches,
    make_trainer,
    mesh_of,
    weights,
    zenflow,
)
from zenflow_jax.integrations._tunix_checkpoints import ITEM
from zenflow_jax.integrations.tunix import ZenFlowHooks

STEPS = 10
ATOL = 1e-6  # float32, sums in a different order


class Killed(Recorder):
    """Kills the process when a step begins; the last checkpoint may still be in progress."""

    def __init__(self, at: int):
        super().__init__()
        self._at = at

    def on_train_step_start(self, train_ctx):
        if train_ctx.train_steps == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def run(folder=None, devices=0, accumulate=None, steps=STEPS, hooks=(), **options):
    """Starts or resumes a run; returns the final weights, the run's first step, and the hooks."""
    tx, settings = zenflow(**(LATE | options)), {"gradient_accumulation_steps": accumulate}
    with mesh_of(devices):
        trainer = make_trainer(tx, steps, folder, devices=devices, **settings)
        began = trainer.train_steps
        zenflow_hooks = ZenFlowHooks(trainer, hooks=list(hooks), engine_options=ENGINE)
        trainer.train(batches())
    return weights(trainer.model), began, zenflow_hooks


@pytest.mark.parametrize(("devices", "accumulate"), [(0, 2), (4, None), (4, 2)], ids=str)
def test_a_killed_run_resumes_and_is_bit_identical(devices, accumulate, tmp_path):
    code = (
        "from tests.in_tunix import test_checkpoints as t; "
        f"t.run({str(tmp_path)!r}, {devices}, {accumulate}, hooks=[t.Killed(7)])"
    )
    root = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    resumed, began, hooks = run(tmp_path, devices, accumulate)
    # An incomplete checkpoint does not count.
    assert began in (4, 6)
    assert hooks.stats.steps == STEPS
    whole, began, _ = run(None, devices, accumulate)
    assert began == 0
    assert_same_bits(resumed, whole)


def stop_at(step, folder, devices=0, **options):
    """Takes a run's first steps; the last one is saved, and does not end a window."""
    with mesh_of(devices):
        trainer = make_trainer(zenflow(**(LATE | options)), None, folder, step, devices)
        ZenFlowHooks(trainer, engine_options=ENGINE)
        trainer.is_managed_externally = True  # the run stops early
        trainer.train(list(itertools.islice(batches(), step)))
        trainer.close()


@pytest.mark.parametrize("step", [1, 5])
def test_a_run_resumes_from_the_first_step_and_from_an_open_window(step, tmp_path):
    stop_at(step, tmp_path)
    resumed, began, _ = run(tmp_path)
    assert began == step
    assert_same_bits(resumed, run()[0])


def test_the_last_checkpoint_contains_all_updates_and_a_longer_run_resumes_from_it(tmp_path):
    trained, _, _ = run(tmp_path, steps=4, rolling=False)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 4
        assert ITEM in manager.metadata(4).item_metadata
        saved = manager.restore(4, args=ocp.args.Composite(model_params=ocp.args.StandardRestore()))
    params = {name: np.asarray(x["value"]) for name, x in saved["model_params"].items()}
    assert_same_bits(params, trained)
    _, began, hooks = run(tmp_path, steps=6, rolling=False)
    assert began == 4
    assert hooks.stats.steps == 6


def test_a_checkpoint_from_a_trainer_without_hooks_is_rejected(tmp_path):
    make_trainer(zenflow(**LATE), 2, tmp_path).train(batches())
    with pytest.raises(ValueError, match=f"checkpoint of step 2 in .* lacks `{ITEM}`"):
        ZenFlowHooks(make_trainer(zenflow(**LATE), 2, tmp_path))


def test_another_checkpoint_manager_is_rejected():
    class Other(checkpoint_manager.CheckpointManager):
        pass

    trainer = make_trainer(zenflow(**LATE), 2)
    trainer.checkpoint_manager = Other()
    with pytest.raises(ValueError, match="checkpoint manager, a Other"):
        ZenFlowHooks(trainer)
