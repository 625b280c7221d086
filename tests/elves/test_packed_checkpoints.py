"""Checkpoints that are packed: the same bits when a run goes on, and kills leave nothing broken."""

import json
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import kill_test
from tests import runs as optimizer_runs
from tests.cut_short import cut_short
from tests.runs import Leaf, Training
from train import compress, finetune, packed_checkpoints, packer
from train.checkpoints import Checkpoints
from train.checksums import damage
from train.elves import ElvesError, whole
from train.elves.whole import remove_leftovers
from train.packed_checkpoints import (
    is_packed_checkpoint,
    pack_in_place,
    pack_to,
    restore_to,
)
from train.run_description import description
from train.saved_checkpoints import CheckpointError
from train.settings import Settings

WIDE = tuple(Leaf(name, (160, 128), -2, "bfloat16") for name in "abc")


def training_and_checkpoints(folder, said, **options):
    """A training with an engine in mid-window, and its checkpoints."""
    settings = optimizer_runs.Settings(topk_ratio=0.3, update_interval=4, select_interval=4)
    training = Training(WIDE, settings, threads=1, host_kernel="numpy", donate=True)
    training.go(7)
    options = {"keep": 2, "keep_best": False} | options
    described = description(Settings(), 0)
    path = folder / "checkpoints"
    return training, Checkpoints(path, describe=described, say=said.append, **options)


def content(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a checkpoint, and what was saved."""
    folder = tmp_path_factory.mktemp("saved")
    training, checkpoints = training_and_checkpoints(folder, [])
    with training, checkpoints:
        state = jax.tree.map(np.array, training.engine.state())
        params = jax.tree.map(np.array, training.params)
        checkpoints.save(7, training.params, training.state, training.engine, {})
        checkpoints.finish()
    return folder / "checkpoints", params, state


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "checkpoints")


def test_a_packed_checkpoint_is_smaller_and_restored_byte_for_byte(run, tmp_path):
    before = content(run / "7")
    found = pack_in_place(run / "7")
    assert {p.name for p in run.iterdir()} == {"7"}
    assert damage(run / "7") is None
    tensors = [t for r in found if r.header for t in r.header.tensors.values()]
    params = [t for t in tensors if t.name.startswith("params.")]
    assert len(params) == 3
    assert all(t.codec == "delta" and t.of.where == "folder" for t in params)
    assert sum(t.bytes for t in params) > 3 * sum(t.packed_bytes for t in params)
    restore_to(run / "7", tmp_path / "back")
    assert content(tmp_path / "back") == before


def test_a_run_goes_on_from_a_packed_checkpoint_with_the_same_bits(run, saved):
    _, params, state = saved
    pack_in_place(run / "7")
    said = []
    training, checkpoints = training_and_checkpoints(run.parent, said)
    with training, checkpoints:
        assert checkpoints.newest() == 7
        found = checkpoints.restore(7, training.params, training.state)
        jax.tree.map(np.testing.assert_array_equal, found.params, params)
        for name in ("master", "mu", "nu", "total"):
            stored = np.asarray(found.engine_state["leaves"][1][name])
            optimizer_runs.assert_same_bits(stored, state["leaves"][1][name])
        checkpoints.set_aside()  # the engine has been made
        assert {p.name for p in run.iterdir()} == {"7"}
        weights = checkpoints.weights(7, found.params)
        jax.tree.map(np.testing.assert_array_equal, weights, params)
    assert said == ["unpacking checkpoint 7"] * 2
    assert {p.name for p in run.iterdir()} == {"7"}


def test_a_damaged_packed_checkpoint_is_noticed_like_any_other(run):
    pack_in_place(run / "7")
    path = max((p for p in run.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert "has another checksum" in damage(run / "7")
    # And where the listing is as wrong as the file, by the blocks' own.
    listed = json.loads((run / "7" / "checksums.json").read_text())
    listed |= packed_checkpoints.checksums(run / "7")
    (run / "7" / "checksums.json").write_text(json.dumps(listed))
    training, checkpoints = training_and_checkpoints(run.parent, [])
    with training, checkpoints:
        with pytest.raises(CheckpointError, match=r"unpack checkpoint 7, got: .* block \d+: "):
            checkpoints.restore(7, training.params, training.state)
    assert {p.name for p in run.iterdir()} == {"7"}


def test_what_is_damaged_or_packed_is_not_packed(run):
    pack_in_place(run / "7")
    with pytest.raises(ElvesError, match="expected a checkpoint that is not packed"):
        pack_in_place(run / "7")
    restore_to(run / "7", run / "8")
    (run / "8" / "run" / "metadata").write_text("{}")
    before = content(run / "8")
    with pytest.raises(ElvesError, match="got one that is damaged: run/metadata has"):
        pack_in_place(run / "8")
    assert content(run / "8") == before


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_kill_at_any_moment_leaves_one_whole_checkpoint(run, monkeypatch, renames):
    before, done, rename = content(run / "7"), [], Path.rename

    def dies(path, target):
        if run in (path.parent, target.parent):
            if len(done) == renames:
                raise KeyboardInterrupt
            done.append(path)
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dies)
        patch.setattr(whole, "_put_back", lambda part: None)
        patch.setattr(whole, "_remove", lambda path: None)
        with pytest.raises(KeyboardInterrupt) if renames < 2 else nullcontext():
            pack_in_place(run / "7")
    remove_leftovers(run)
    assert {p.name for p in run.iterdir()} == {"7"}
    assert damage(run / "7") is None
    assert is_packed_checkpoint(run / "7") == (renames == 2)
    if renames < 2:
        assert content(run / "7") == before


@pytest.mark.usefixtures("promotion_as_users_have_it")
def test_folders_of_the_user_beside_checkpoints_stay(run):
    for name in ("packing-7", "replaced-7", "replaced-notes", "unpacked-7", "unpacked-notes"):
        shutil.copytree(run / "7", run / name)
    names = {p.name for p in run.iterdir()}
    pack_in_place(run / "7")
    training, checkpoints = training_and_checkpoints(run.parent, [])
    with training, checkpoints:
        checkpoints.restore(7, training.params, training.state)
        checkpoints.set_aside()
    assert {p.name for p in run.iterdir()} == names


def test_the_command_packs_a_checkpoint_and_refuses_a_bound(run, tmp_path, capsys):
    out = str(tmp_path / "out")
    for option in (["--bound", "2^-24"], ["--base", str(run)]):
        assert compress.main([str(run / "7"), out, *option]) == 2
        assert f"`{option[0]}`: expected none for a checkpoint" in capsys.readouterr().err
    assert compress.main([str(run / "7"), out]) == 0
    assert compress.main(["--check", out]) == 0
    assert compress.main(["--restore", out, str(tmp_path / "back")]) == 0
    assert content(tmp_path / "back") == content(run / "7")


class InThisProcess:
    """A packing process that does its work when it is asked whether it has ended."""

    def __init__(self, command, **_):
        self.folder, self.returncode = Path(command[-1]), None

    def poll(self):
        return self.returncode

    def wait(self):
        pack_in_place(self.folder)
        self.returncode = 0

    def kill(self):
        self.returncode = -signal.SIGKILL

    def communicate(self):
        return b"", b""


def test_all_but_the_newest_are_packed_and_those_that_go_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr(packer.subprocess, "Popen", InThisProcess)
    said = []
    training, checkpoints = training_and_checkpoints(tmp_path, said, compress=True)
    with training, checkpoints:

        def save(step):
            checkpoints.save(step, training.params, training.state, training.engine, {})
            checkpoints.finish()
            checkpoints.poll()

        save(1)
        assert checkpoints._packer.step is None
        save(2)
        assert checkpoints._packer.step == 1
        checkpoints._packer._process.wait()
        save(3)  # 1 is gone; the packing of 2 begins
        assert checkpoints._packer.step == 2
        save(4)  # 2 goes as well, before it was packed
        assert checkpoints._packer.step == 3
    folder = tmp_path / "checkpoints"
    assert {p.name for p in folder.iterdir()} == {"3", "4"}
    assert is_packed_checkpoint(folder / "3")
    assert not is_packed_checkpoint(folder / "4")
    assert said == []


def test_a_checkpoint_that_cannot_be_packed_is_said_once(tmp_path, run):
    (run / "7" / "run" / "metadata").write_text("{}")
    said = []
    one = packer.Packer(run, said.append)
    one.finish([7])
    one.finish([7])
    assert len(said) == 1
    assert said[0].startswith("checkpoint 7 stays as large as it is: expected to pack it, got: ")
    assert "run/metadata" in said[0]


def test_the_process_that_packs_ends_with_the_run(run):
    command = [sys.executable, "-m", "train.pack_checkpoint", str(run / "7")]
    root = Path(packer.__file__).parents[1]
    # Its standard input is at its end already.
    found = subprocess.run(command, cwd=root, stdin=subprocess.DEVNULL, check=False)
    assert found.returncode in (0, 3)  # it may have been done first
    remove_leftovers(run)
    assert {p.name for p in run.iterdir()} == {"7"}
    assert damage(run / "7") is None


@pytest.mark.slow
@pytest.mark.usefixtures("promotion_as_users_have_it", "no_picture")
def test_a_run_of_the_script_packs_and_goes_on_from_what_is_packed(tmp_path, capsys):
    config = kill_test.write_config(tmp_path, steps=10)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = [str(config), "--keep", "9", "--save-every", "5", "--host-kernel", "numpy"]
    assert finetune.main([*options, "--run", whole.name]) == 0
    cut_short(whole, cut, after=5)
    pack_in_place(cut / "checkpoints" / "5")
    assert finetune.main([*options, "--run", cut.name, "--compress-kept"]) == 0
    out = capsys.readouterr().out
    assert "unpacking checkpoint 5" in out
    assert "going on from checkpoint 5" in out
    *older, newest = sorted(kill_test.steps_of(cut / "checkpoints"))
    assert all(is_packed_checkpoint(cut / "checkpoints" / str(step)) for step in older)
    assert not is_packed_checkpoint(cut / "checkpoints" / str(newest))
    for step in older:
        back = tmp_path / str(step)
        restore_to(cut / "checkpoints" / str(step), back)
        assert damage(back) is None
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_packing_to_a_place_leaves_the_original(run, tmp_path):
    before = content(run / "7")
    pack_to(run / "7", tmp_path / "out", threads=2)
    assert content(run / "7") == before
    assert damage(tmp_path / "out") is None
