"""Runs that end early, on signals, and resume bit-identically."""

import os
import random
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks import kill_test
from benchmarks.kill_test import differences
from tests.processes import output, start
from tests.train import scripts
from train import finetune
from train.checkpoints.checkpoints import CheckpointError, Checkpoints
from train.cli.settings import SettingsError
from train.distributed.stopping import StopRequest
from train.run.folder import LOCK, run_lock

STEPS = 63

pytestmark = pytest.mark.usefixtures("as_scripts_run", "no_picture")


def stopped_after(last: int) -> Callable[[StopRequest, int], int | None]:
    """Returns `StopRequest.after` for a process that gets SIGTERM during a step."""

    def after(stop: StopRequest, step: int, after=StopRequest.after) -> int | None:
        if step == last:
            signal.raise_signal(signal.SIGTERM)
        return after(stop, step)

    return after


def changed_at(folder: Path) -> dict[Path, float]:
    """Returns a folder's last modification time; every start writes the lock."""
    return {p: p.stat().st_mtime for p in folder.rglob("*") if p.name != LOCK}


# One test, so that no second worker makes the same runs.
@pytest.mark.slow
def test_a_stopped_and_killed_run_is_bit_identical_and_a_finished_run_is_not_changed(
    tmp_path, capsys, monkeypatch
):
    config = kill_test.write_config(tmp_path, steps=STEPS)
    whole, interrupted = tmp_path / "whole", tmp_path / "interrupted"
    seldom = "--save-every", "40"  # saves take most of a run's time
    whole.mkdir()
    for name in (LOCK, "settings.toml"):  # like a start that was killed before its first save
        (whole / name).touch()
    assert finetune.main([str(config), "--run", whole.name, *seldom]) == 0
    assert "no checkpoint to resume from" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "after", stopped_after(7))
        assert finetune.main([str(config), "--run", interrupted.name]) == 128 + signal.SIGTERM
    message, command = capsys.readouterr().err.splitlines()[-2:]
    assert re.fullmatch("stopped by SIGTERM after step 7; checkpoint saved.*", message)
    assert command == f"python -m train.finetune {interrupted}/settings.toml --run interrupted"

    killed = start("-m", "train.finetune", config, "--run", interrupted.name)
    checkpoints = interrupted / "checkpoints"
    kill_test.kill_at("writing", killed, checkpoints, random.Random(0), 0.0)
    assert output(killed)[0] == -signal.SIGKILL
    assert finetune.main([command.split()[3], "--run", interrupted.name, *seldom]) == 0
    assert re.search(r"resuming from checkpoint \d+ in ", capsys.readouterr().out)
    assert differences(whole, interrupted) == []
    assert_masters(whole)
    assert_not_changed(config, whole, capsys)


def assert_masters(run: Path) -> None:
    """Checks that the model contains the masters by key path."""
    kernel = load_file(run / "model.safetensors")["blocks.0.gate.kernel"]
    assert (kernel.shape, kernel.dtype) == ((16, 24), np.float32)
    # Low-precision parameters are the rounded masters, and the run is finished.
    assert np.any(kernel != np.asarray(kernel, jnp.bfloat16).astype(np.float32))


def assert_not_changed(config: Path, run: Path, capsys) -> None:
    """Checks that a finished run, or a run with other settings, stays as it is."""
    before = changed_at(run)
    for options, code, expected in (
        ([], 0, f"has completed all {STEPS} steps"),
        (["--topk-ratio", "0.5"], 2, "error: `topk_ratio`: is 0.5, but was 0.25 .*Pass"),
    ):
        assert finetune.main([str(config), "--run", run.name, *options]) == code
        assert re.search(expected, "".join(capsys.readouterr()))
    assert changed_at(run) == before


def test_a_second_start_of_a_run_is_rejected_until_the_first_ends(tmp_path):
    with run_lock(tmp_path, print):
        with pytest.raises(SettingsError, match=f"process {os.getpid()} on .* another --run"):
            with run_lock(tmp_path, print):
                pass
    with run_lock(tmp_path, print):
        pass


SIGNALS = """
import signal, sys
from train.distributed.stopping import StopRequest
with StopRequest() as stop:
    if "step" in sys.argv:
        stop.begin()
        signal.raise_signal(signal.SIGUSR1)
        print(stop.after(1), flush=True)
    signal.raise_signal(signal.SIGUSR1)
    print("still here")
"""
CONFIRMED = "SIGUSR1: stopping after this step and saving; send another signal to abort\n15\n"


@pytest.mark.parametrize(("phase", "shown"), [("nothing to save", ""), ("step", CONFIRMED)])
def test_a_signal_ends_a_process_at_once_if_nothing_needs_saving_or_if_it_is_the_second(
    phase, shown
):
    assert output(start("-c", SIGNALS, phase)) == (-signal.SIGTERM, shown)


@pytest.mark.parametrize(("code", "requeued"), [(0, 0), (128 + signal.SIGTERM, 1), (1, 0)])
def test_the_batch_script_requeues_only_a_job_that_a_signal_stopped(tmp_path, code, requeued):
    for name in ("srun", "scontrol"):
        ends = f"exit {code}" if name == "srun" else ""
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n{ends}\n')
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1", "PYTHON": "python"}
    done = subprocess.run(
        ["bash", "examples/finetune.sbatch", "job.toml", "--mesh", "data=2"],
        cwd=kill_test.ROOT,
        env=os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    job = "srun --kill-on-bad-exit=0 python -m train.finetune job.toml --run job-7 --mesh data=2"
    assert done.stdout.splitlines() == [job] + ["scontrol requeue 7"] * requeued


def test_a_run_whose_last_save_fails_ends_with_its_error_after_writing_the_model(
    tmp_path, monkeypatch, capsys
):
    def fail(*_, **__):
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(Checkpoints, "save", fail)
    config = scripts.write_config(tmp_path, **scripts.TINY, steps=1, optimizer="adamw")
    assert finetune.main([config, "--run", "a"]) == 2
    assert capsys.readouterr().err == "error: the disk is full\n"
    assert (tmp_path / "runs" / "a" / "model.safetensors").is_file()
    assert not (tmp_path / "runs" / "a" / "summary.json").exists()
