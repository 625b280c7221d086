"""The quickstart job: text, model, optimizers, and the command itself at a tiny size."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from benchmarks import kill_test
from tests.train import scripts
from tests.train.scripts import rows, small_model, summary, write
from train import finetune
from train.cli.command_line import load_settings
from train.cli.settings import Settings
from train.run import setup
from train.run.folder import WRITTEN
from train.run.optimizers import decayed, make_optimizer
from train.tasks import standard_library
from zenflow_jax import find_state

TINY = scripts.TINY | {"steps": 13, "warmup_steps": 2, "log_every": 4, "update_interval": 2}

pytestmark = pytest.mark.usefixtures("as_scripts_run")


def tiny_command(folder: Path, **changed) -> list[str]:
    return [scripts.write_config(folder, **TINY | changed)]


def test_the_split_follows_the_seed_and_no_file_is_on_both_sides(tmp_path):
    for i in range(9):
        write(tmp_path / "a" / f"{i}.py", "x" * 10)
    write(tmp_path / "site-packages" / "b.py", "x")
    files = standard_library.source_files(tmp_path)
    assert len(files) == 9

    def split(seed):
        options = {"max_bytes": 75, "validation_share": 0.2}
        return standard_library.split_files(tmp_path, files, seed=seed, **options)

    train, validation = split(0)
    assert split(0) == (train, validation) != split(4)
    assert (len(train), len(validation)) == (6, 2)
    assert set(train).isdisjoint(validation)


def test_weight_decay_excludes_norms_and_offload_selects_no_channel():
    params = nnx.as_pure(nnx.state(small_model(), nnx.Param))
    assert jax.tree.leaves(decayed(params)) == [x.ndim == 2 for x in jax.tree.leaves(params)]
    for optimizer, selected in (("offload", 0), ("zenflow", 1)):
        tx = make_optimizer(Settings(optimizer=optimizer, topk_ratio=0.25, steps=9))
        (leaf,) = find_state(tx.init({"kernel": jnp.ones((4, 4))})).leaves
        assert leaf.mu.shape == (selected, 4)


@pytest.mark.slow
def test_zenflow_trains_and_writes_its_record(tmp_path, capsys):
    command = tiny_command(tmp_path, optimizer="adamw", learning_rate=1e-2)
    assert finetune.main([*command, "--optimizer", "zenflow"]) == 0
    shown = capsys.readouterr().out
    run = tmp_path / "runs" / "001-zenflow"
    assert load_settings(run / "settings.toml").optimizer == "zenflow"
    for picture in ("loss.png", "timeline.png"):
        assert (run / picture).read_bytes().startswith(b"\x89PNG")
    figures, metrics = summary(run), rows(run / "metrics.csv")
    assert figures["steps"] == TINY["steps"]
    assert figures["validation_after"]["loss"] < figures["validation_before"]["loss"]
    assert 0 <= figures["wait_share"] <= 1
    # Two groups have rolling windows. One group's first window has one step; the other group's
    # seventh window, with step 13, stays open.
    assert [int(row["step"]) for row in metrics] == [1, 4, 8, 12, 13]
    engine = figures["engine"]
    assert engine["window_lengths"] == {"1": 1, "2": 12}
    assert [engine[name] for name in ("reselections", "kept_share")] == [2, None]
    # At least the bfloat16 gradient of most channels.
    moved = engine["bytes_to_host"] + engine["bytes_to_device"]
    assert 1 < moved / figures["parameters"] / figures["steps"] < 4
    assert re.search(r"step  4/13 .* \d:\d\d:\d\d left\n", shown)


@pytest.mark.slow
@pytest.mark.usefixtures("no_picture")
def test_keep_best_writes_the_best_steps_model_and_overwrites_no_other_file(
    tmp_path, capsys, monkeypatch
):
    losses = {0: 5.0, 3: 4.0, 6: 1.0, 9: 2.0, 12: 3.0, 13: 2.0}
    figures = ({"loss": loss} for loss in losses.values())
    monkeypatch.setattr(setup, "make_validate", lambda *_: lambda _: next(figures))
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    precious = [folder / f"{name}.part" for name in WRITTEN] + [folder / "model.old"]
    precious += [tmp_path / "best.part"]
    for path in precious:
        path.write_text("precious")
    command = tiny_command(tmp_path, optimizer="adamw", save_every=3, keep_best=True, keep=2)
    command += ["--run", "a"]
    assert finetune.main(command) == 0
    output = capsys.readouterr().out
    written = {int(x["step"]): float(x["value"]) for x in rows(folder / "validation.csv")}
    assert written == losses
    figures = summary(folder)
    assert figures["best_step"] == 6
    assert figures["engine"] is None  # of adamw
    assert "model.safetensors contains the weights of step 6, the best" in output
    assert_weights_of_checkpoint(folder, 6, folder)

    assert {path.read_text() for path in precious} == {"precious"}
    assert not list(tmp_path.rglob(".*"))


def assert_weights_of_checkpoint(run, step, where):
    arrays = kill_test.final_arrays(run / "checkpoints" / str(step))
    for name, x in load_file(where / "model.safetensors").items():
        np.testing.assert_array_equal(x, arrays[f"params.{name}"])


def test_a_folder_with_files_that_are_not_runs_is_not_written_to(tmp_path, capsys):
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "loss.png").write_text("precious")
    assert finetune.main([*tiny_command(tmp_path), "--run", "a"]) == 2
    expected = f"`run`: {folder} contains loss.png, but no checkpoints to resume from"
    assert expected in capsys.readouterr().err
    assert [(p.name, p.read_text()) for p in folder.iterdir()] == [("loss.png", "precious")]
