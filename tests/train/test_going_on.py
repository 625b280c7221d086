"""Runs that are killed, stopped or damaged resume and are bit-identical; others are rejected."""

import gc
import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks import kill_test
from benchmarks.kill_test import differences, steps_of
from tests.processes import output, start
from train import finetune
from train.cli.settings import SettingsError
from train.distributed.stopping import StopRequest
from train.run.folder import LOCK, run_lock

STEPS = 63

pytestmark = pytest.mark.usefixtures("promotion_as_users_have_it", "no_picture")


def stopped_after(last: int) -> Callable[[StopRequest, int], int | None]:
    """Returns `StopRequest.after` for a process that gets SIGTERM in a step."""

    def after(stop: StopRequest, step: int, after=StopRequest.after) -> int | None:
        if step == last:
            os.kill(os.getpid(), signal.SIGTERM)
            while after(stop, step) is None:
                pass  # another thread handles the signal
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
    seldom = "--save-every", "40"  # saves are most of a run's time
    whole.mkdir()
    for name in (LOCK, "settings.toml"):  # like a start that was killed before its first save
        (whole / name).touch()
    assert finetune.main([str(config), "--run", whole.name, *seldom]) == 0
    assert "no checkpoint to resume from" in capsys.readouterr().out
    trace = tmp_path / "trace.json"
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "after", stopped_after(7))
        command = [str(config), "--run", interrupted.name, "--timeline", str(trace)]
        assert finetune.main(command) == 128 + signal.SIGTERM
    message, command = capsys.readouterr().err.splitlines()[-2:]
    assert re.fullmatch("stopped by SIGTERM after step 7, which is saved.*", message)
    assert command == f"python -m train.finetune {interrupted}/settings.toml --run interrupted"
    assert '"step": 7' in trace.read_text(encoding="utf-8")

    killed = start("-m", "train.finetune", config, "--run", interrupted.name)
    checkpoints = interrupted / "checkpoints"
    kill_test.kill_at("writing", killed, checkpoints, random.Random(0), 0.0)
    assert output(killed)[0] == -signal.SIGKILL
    assert finetune.main([command.split()[3], "--run", interrupted.name, *seldom]) == 0
    assert re.search(r"resuming from checkpoint \d+ in ", capsys.readouterr().out)
    assert differences(whole, interrupted) == []
    assert_masters(whole)
    assert_exports(config, whole, tmp_path, capsys)
    assert_not_changed(config, whole, capsys)


def assert_masters(run: Path) -> None:
    """Checks that the model contains the masters by key path."""
    kernel = load_file(run / "model.safetensors")["blocks.0.gate.kernel"]
    assert (kernel.shape, kernel.dtype) == ((16, 24), np.float32)
    # Low-precision parameters are the rounded masters, and the run is finished.
    assert np.any(kernel != np.asarray(kernel, jnp.bfloat16).astype(np.float32))


def assert_exports(config: Path, run: Path, folder: Path, capsys) -> None:
    """Checks that an export names pending updates."""
    step = str(min(steps_of(run / "checkpoints")))
    target = str(folder / "exported")
    assert finetune.main([str(config), "--run", run.name, "--export", step, target]) == 0
    assert capsys.readouterr().out.endswith("without pending updates\n")


def assert_not_changed(config: Path, run: Path, capsys) -> None:
    """Checks that a finished run, or a run with other settings, stays as it is."""
    before = changed_at(run)
    for options, code, expected in (
        ([], 0, f"has completed all {STEPS} steps"),
        (["--topk-ratio", "0.5"], 2, "error: `topk_ratio`: is 0.5, but was 0.25 .*Pass"),
        (["--steps", "20"], 2, f"error: `steps`: must be at least {STEPS}, .*but is 20"),
    ):
        assert finetune.main([str(config), "--run", run.name, *options]) == code
        assert re.search(expected, "".join(capsys.readouterr()))
    assert changed_at(run) == before


@pytest.mark.slow
def test_a_run_on_a_full_disk_ends_with_one_message(tmp_path, small_disk, capfd):
    config = kill_test.write_config(tmp_path, steps=STEPS, optimizer="adamw")
    disk = small_disk("2m")
    options = ["--output-dir", str(disk), "--keep", "99", "--log-every", "1"]
    assert finetune.main([str(config), "--run", "full", *options]) == 2
    gc.collect()  # orbax prints a traceback for each array
    error = capfd.readouterr().err
    assert "Traceback" not in error
    # The first file without room is either the model or the last checkpoint.
    no_model, no_checkpoint = (
        rf".* cannot be written to {disk}.*Free disk space",
        rf"the last checkpoint is missing: see above. {disk}/.*contains the weights",
    )
    assert re.match(f"error: ({no_model}|{no_checkpoint})", error.splitlines()[-1])


def test_a_second_start_of_a_run_is_rejected_until_the_first_ends(tmp_path):
    with run_lock(tmp_path, print):
        with pytest.raises(SettingsError, match=f"process {os.getpid()} on .* another --run"):
            with run_lock(tmp_path, print):
                pass
    with run_lock(tmp_path, print):
        pass
