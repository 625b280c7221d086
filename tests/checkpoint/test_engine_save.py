"""A save contains the engine's state at the time of the call, although the run continues."""

import dataclasses
import errno
import functools
import os
import threading

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from orbax.checkpoint import future
from safetensors.numpy import load_file

import zenflow_jax
from tests import comparisons, runs
from tests.resuming import (
    PLAN,
    SETTINGS,
    assert_saved,
    end,
    go,
    read_engine_state,
    resume_by_orbax,
    resumed,
    run_of,
    save_by_orbax,
)
from tests.runs import FIRST, ONE, SCANNED, Training
from zenflow_jax import EngineCheckpointHandler
from zenflow_jax._checkpoint import agreement, saving
from zenflow_jax._checkpoint.saving import Snapshot

ALL = 10**9  # bytes


@pytest.fixture
def waits(monkeypatch):
    """Returns an event that is set when a leaf's writer asks for permission."""
    asked = threading.Event()
    before_write = Snapshot.before_write

    def asks(self, *args):
        asked.set()
        return before_write(self, *args)

    monkeypatch.setattr(Snapshot, "before_write", asks)
    return asked


def save(training, folder, **options):
    """Writes the engine's file before it returns."""
    args = zenflow_jax.EngineSave(training.engine, **options)
    EngineCheckpointHandler().save(folder, args=args)


def values(training):
    return jax.tree.map(np.array, training.engine.state())


@pytest.mark.slow
def test_each_saved_state_equals_the_state_at_its_step(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "_CHUNK", 7)  # elements per write
    # These settings cut stacks into ranges.
    settings = dataclasses.replace(SETTINGS, staleness=2)
    snapshots = []
    with Training(SCANNED, settings, donate=True) as training:
        for t in range(PLAN.steps + 1):
            go(training, PLAN, t)
            snapshot = training.engine.snapshot(ALL)
            snapshots.append((snapshot, values(training)))  # in this order: `values` sums mail
            if t >= 5:  # several saves are open at once; no save may contain later changes
                snapshot, expected = snapshots[t - 5]
                (tmp_path / str(t)).mkdir()
                snapshot.write(tmp_path / str(t))
                assert_saved(tmp_path / str(t), expected)
        for snapshot, _ in snapshots:
            snapshot.close()
        result = end(training)
    with Training(SCANNED, settings, donate=True) as training:
        go(training, PLAN, PLAN.steps)
        comparisons.assert_same_bits(end(training), result)


@pytest.mark.parametrize("copy_bytes", [0, 900])  # 900: room for one leaf
def test_without_room_for_copies_the_run_waits_for_unsaved_leaves(copy_bytes, tmp_path, waits):
    with Training(FIRST, SETTINGS, donate=True) as training:
        for t in range(0, PLAN.steps, 3):
            go(training, PLAN, t)
            expected, snapshot = values(training), training.engine.snapshot(copy_bytes)
            folder = tmp_path / str(t)
            folder.mkdir()
            waits.clear()
            writer = threading.Thread(
                target=lambda s=snapshot, f=folder: waits.wait() and s.write(f)
            )
            writer.start()
            go(training, PLAN, t + 1)
            training.settle()
            waits.set()  # in case the step has no update
            writer.join()
            assert_saved(folder, expected)
        assert training.engine.stats.seconds["wait for save"] > 0


def test_a_save_does_not_contain_weights_loaded_afterwards(tmp_path):
    with Training(ONE, SETTINGS) as training:
        snapshot, expected = training.engine.snapshot(ALL), values(training)
        training.params = runs.initial(ONE, seed=1)
        training.go(1)
        snapshot.write(tmp_path)
        assert_saved(tmp_path, expected)
        (live,) = training.engine.state()["leaves"]
        assert (np.asarray(live["master"]) != expected["leaves"][0]["master"]).any()


def test_a_run_resumes_from_a_checkpoint_manager(tmp_path):
    with Training(FIRST, SETTINGS) as whole, Training(FIRST, SETTINGS) as again:
        go(whole, PLAN, 9)
        folder = save_by_orbax(whole, tmp_path, until=PLAN.steps)
        engine_state = resume_by_orbax(again, tmp_path)
        go(again, PLAN, PLAN.steps)
        comparisons.assert_same_bits(end(again), end(whole))
    # Other programs can also read the file.
    (path,) = folder.glob("*.safetensors")
    np.testing.assert_array_equal(
        load_file(path)["leaves/1/mu@0,0"], engine_state["leaves"][1]["mu"]
    )


def test_an_engine_can_be_closed_while_it_waits_for_a_save(tmp_path, waits):
    def ends_closed():
        with pytest.raises(RuntimeError, match="closed"):
            training.exchange()

    with Training(ONE, SETTINGS) as training:
        snapshot = training.engine.snapshot(0)
        training.step()
        exchange = threading.Thread(target=ends_closed)
        exchange.start()
        waits.wait()
        training.engine.close()
        exchange.join()
        # The snapshot is still complete, and can be saved.
        snapshot.write(tmp_path)
        assert run_of(read_engine_state(tmp_path))["step"] == 0


def test_a_checkpoint_that_changes_before_its_engine_is_created_is_rejected(tmp_path, monkeypatch):
    with Training(ONE, SETTINGS) as training:
        save(training, tmp_path)
        restored = read_engine_state(tmp_path)
        (path,) = tmp_path.iterdir()
        path.unlink()
        told = []  # reports to processes that still see the file and would otherwise wait
        with monkeypatch.context() as patch:
            patch.setattr(agreement, "agree", lambda problem, *_: told.append(problem))
            with pytest.raises(FileNotFoundError, match="No such file.*safetensors"):
                resumed(training, (training.params, training.state, restored))
        assert "No such file" in told[0]
        training.go(1)  # the step is in the same window, so only the sum differs
        save(training, tmp_path)
        with pytest.raises(ValueError, match="was overwritten after"):
            np.asarray(restored["leaves"][0]["mu"])


@pytest.mark.parametrize("wrong", ["a full disk", "no folder"])
def test_a_failed_save_is_reported_and_does_not_block_the_run(wrong, tmp_path, monkeypatch):
    def pwrite(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    # The timeout is minutes by default, and nothing else ends the wait, because orbax keeps
    # unwritten items.
    waits = functools.partial(future.CommitFutureAwaitingContractedSignals, timeout_secs=0.1)
    monkeypatch.setattr(future, "CommitFutureAwaitingContractedSignals", waits)
    (tmp_path / "file").touch()
    folder = tmp_path / "9" if wrong == "a full disk" else tmp_path / "file" / "9"
    with (
        Training(ONE, SETTINGS) as training,
        ocp.AsyncCheckpointer(EngineCheckpointHandler()) as saver,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            saver.save(folder, args=zenflow_jax.EngineSave(training.engine, copy_bytes=0))
            training.go(5)
            with pytest.raises(OSError, match="No space left|Not a directory"):
                saver.wait_until_finished()
        assert not folder.exists()
        training.flush()


def test_a_save_outside_a_file_system_or_of_a_closed_engine_fails(tmp_path):
    words = "gs://bucket/9 is not on a file system. Save to a folder"
    with Training(ONE, SETTINGS) as training:
        for path in ("gs://bucket/9", epath.Path("gs://bucket/9")):
            with pytest.raises(ValueError, match=words):
                save(training, path)
        training.go(5)  # no snapshot is left to wait for
    with pytest.raises(RuntimeError, match="engine is closed"):
        save(training, tmp_path)


def test_incomplete_files_or_files_from_several_saves_are_rejected_by_name(tmp_path, monkeypatch):
    def refused(error, words):
        with pytest.raises(error, match=words):
            read_engine_state(tmp_path)

    def save_as(process):
        """Saves as one of two processes would."""
        snapshot = training.engine.snapshot()
        snapshot.processes = [0, 1]
        with monkeypatch.context() as patch:
            patch.setattr(jax, "process_index", lambda: process)
            snapshot.write(tmp_path)

    refused(FileNotFoundError, "lacks engine-00000-of-00001.*Use another")
    with Training(ONE, SETTINGS) as training:
        snapshot = training.engine.snapshot(ALL)
        next(snapshot.unsaved.leaves())
        snapshot.close()
        with pytest.raises(RuntimeError, match="closed before the whole"):
            snapshot.write(tmp_path)
        refused(ValueError, "is not a complete engine state file")
        (path,) = tmp_path.iterdir()
        path.unlink()
        save(training, tmp_path)
        whole = path.read_bytes()
        (leaf,) = read_engine_state(tmp_path)["leaves"]
        leaf["mu"].pieces.clear()
        with pytest.raises(ValueError, match="only 0 of 40 elements of leaves/0/mu"):
            np.asarray(leaf["mu"])
        for text, words in (
            (whole[:-1], "do not contain all of .* Use another"),
            (b"\xff" * 64, "is not a complete engine"),
            (whole.replace(b"zenflow_jax engine", b"zenflow_jax ENGINE"), "its format is"),
        ):
            path.write_bytes(text)
            refused(ValueError, words)
        path.write_bytes(whole)
        save_as(1)
        refused(ValueError, "several saves, such as engine-00001-of-00002")
        path.unlink()
        refused(FileNotFoundError, "lacks engine-00000-of-00002")
        training.go(1)
        save_as(0)
        refused(ValueError, "several saves, such as engine-00001-of-00002")
