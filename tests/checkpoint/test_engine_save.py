"""An engine's state that is written while the run goes on is that of the moment of the save."""

import dataclasses
import errno
import functools
import os
import threading

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import future
from safetensors.numpy import load_file

import zenflow_jax
from tests import runs
from tests.resuming import KERNEL, PLAN, SETTINGS, assert_saved, end, go, resumed
from tests.runs import FIRST, ONE, SCANNED, SECOND, Settings, Training
from zenflow_jax import AutoWindow
from zenflow_jax._checkpoint import resume
from zenflow_jax._checkpoint.handler import EngineCheckpointHandler
from zenflow_jax._checkpoint.stored import read_engine_state
from zenflow_jax._exchange import snapshot
from zenflow_jax._exchange.snapshot import Snapshot
from zenflow_jax._host.leaf import HostLeaf

ALL = 10**9  # bytes


@pytest.fixture
def waits(monkeypatch):
    """An event that is set when somebody asks whether a leaf may be written."""
    asked = threading.Event()
    before_write = Snapshot.before_write

    def asks(self, *args):
        asked.set()
        return before_write(self, *args)

    monkeypatch.setattr(Snapshot, "before_write", asks)
    return asked


@pytest.mark.parametrize(
    ("leaves", "changes", "kernel"),
    [
        (FIRST, {}, "numba"),
        pytest.param(
            SECOND,
            {"send_gradients": "per_window", "staleness": 0},
            "numpy",
            marks=pytest.mark.slow,
        ),
        pytest.param(SCANNED, {"staleness": 2}, "numpy", marks=pytest.mark.slow),
    ],
    ids=["in turn", "added up on the device", "stacks in ranges"],
)
def test_what_is_saved_after_every_step_is_of_that_step(leaves, changes, kernel, tmp_path):
    settings = Settings(**{**vars(SETTINGS), **changes})
    streams = []
    with Training(leaves, settings, donate=True, threads=1, host_kernel=kernel) as training:
        for t in range(PLAN.steps + 1):
            go(training, PLAN, t)
            stream = training.engine.stream(ALL)
            # After it, as this adds up mail.
            streams.append((stream, jax.tree.map(np.array, training.engine.state())))
            if t >= 5:  # several are open at once; what the run wrote since is in none
                stream, expected = streams[t - 5]
                (tmp_path / str(t)).mkdir()
                stream.write(tmp_path / str(t))
                assert_saved(tmp_path / str(t), expected)
        for stream, _ in streams:
            stream.close()
        result = end(training)
    with Training(leaves, settings, donate=True, threads=1, host_kernel=kernel) as untouched:
        go(untouched, PLAN, PLAN.steps)
        runs.assert_same_bits(end(untouched), result)


@pytest.mark.parametrize(
    ("leaves", "changes", "kernel"),
    [
        (FIRST, {}, "numpy"),
        (SECOND, {"rolling": False}, "numpy"),
        (FIRST, {"update_interval": AutoWindow(5, 0.4)}, "numpy"),
    ],
    ids=["in turn", "together", "adaptive"],
)
def test_without_room_for_copies_the_run_waits_for_what_is_not_saved(
    leaves, changes, kernel, tmp_path, waits
):
    settings = Settings(**{**vars(SETTINGS), **changes})
    with Training(leaves, settings, donate=True, threads=1, host_kernel=kernel) as training:
        for t in range(0, PLAN.steps, 3):
            go(training, PLAN, t)
            expected = jax.tree.map(np.array, training.engine.state())
            stream = training.engine.stream(0)
            folder = tmp_path / str(t)
            folder.mkdir()
            waits.clear()

            def write(stream=stream, folder=folder):
                waits.wait()
                stream.write(folder)

            writer = threading.Thread(target=write)
            writer.start()
            go(training, PLAN, t + 1)
            training.settle()
            waits.set()  # for a step without an update
            writer.join()
            assert_saved(folder, expected)
        assert training.engine.stats.save_wait_s > 0


def test_what_is_written_first_is_saved_first():
    with Training(FIRST, SETTINGS, **KERNEL) as training:
        go(training, PLAN, 9)
        stream = training.engine.stream(0)
        parts = stream.content.offloaded.parts
        # In the order in which their windows close, at steps 10, 12 and 13.
        assert [parts[i].spec.group for i, _ in stream.snapshot.leaves()] == [0, 2, 1]
        mine = training.engine._worker.leaves()
        leaves = dict(enumerate([*mine, *mine[:2]]))
        snapshot = Snapshot(leaves, max(leaf.nbytes for leaf in leaves.values()))
        saver = snapshot.leaves()
        assert next(saver)[0] == 0
        assert snapshot.before_write(1, stuck), "there is room for a copy"
        leaves[1].mu.values[...] += 1
        assert not snapshot.before_write(3, lambda: True), "and for one alone"
        assert next(saver)[0] == 3, "as somebody waits for it"
        name, copy = next(saver)
        assert name == 1
        runs.assert_same_bits(copy.mu.values + 1, leaves[1].mu.values)
        assert next(saver)[0] == 2
        assert snapshot.before_write(4, stuck), "the copy has given its room back"
        assert not snapshot.done
        assert next(saver)[0] == 4
        assert next(saver, None) is None
        assert snapshot.done
        stream.close()


def stuck():
    raise AssertionError("expected no wait")


def test_weights_that_are_loaded_after_a_save_are_not_in_it(tmp_path):
    with Training(ONE, SETTINGS, **KERNEL) as training:
        stream = training.engine.stream(ALL)
        expected = jax.tree.map(np.array, training.engine.state())
        training.params = runs.initial(ONE, seed=1)
        training.go(1)
        stream.write(tmp_path)
        assert_saved(tmp_path, expected)
        (now,) = training.engine.state()["leaves"]
        assert (np.asarray(now["master"]) != expected["leaves"][0]["master"]).any()


def composite(training, **more):
    """What a user would save of a run."""
    return ocp.args.Composite(
        params=ocp.args.StandardSave(training.params),
        opt_state=ocp.args.StandardSave(training.state),
        engine=zenflow_jax.EngineSave(training.engine, **more),
    )


def test_a_run_goes_on_from_what_a_manager_saved_beside_it(tmp_path):
    options = {"threads": 1, "host_kernel": "numpy"}
    with Training(FIRST, SETTINGS, **options) as whole, ocp.CheckpointManager(tmp_path) as manager:
        go(whole, PLAN, 9)
        manager.save(9, args=composite(whole))
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, (whole.params, whole.state))
        go(whole, PLAN, PLAN.steps)
        expected = end(whole)
        manager.wait_until_finished()
        found = manager.restore(
            9,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(template[0]),
                opt_state=ocp.args.StandardRestore(template[1]),
                engine=zenflow_jax.EngineRestore(),
            ),
        )
        with resumed(whole, (found.params, found.opt_state, found.engine), **KERNEL) as again:
            again.t = 9
            go(again, PLAN, PLAN.steps)
            runs.assert_same_bits(end(again), expected)
    # Other programs read the file, too.
    (path,) = (tmp_path / "9" / "engine").glob("*.safetensors")
    values = load_file(path)
    np.testing.assert_array_equal(values["leaves/1/mu@0,0"], found.engine["leaves"][1]["mu"])


def test_a_save_that_fails_says_so_and_holds_nobody_up(tmp_path, monkeypatch):
    calls = iter(range(100))

    def pwrite(*args, really=os.pwrite):
        if next(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(*args)

    with (
        Training(FIRST, SETTINGS, **KERNEL) as training,
        ocp.AsyncCheckpointer(EngineCheckpointHandler()) as saver,
    ):
        go(training, PLAN, 9)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            saver.save(tmp_path / "9", args=zenflow_jax.EngineSave(training.engine, copy_bytes=0))
            go(training, PLAN, PLAN.steps)
            with pytest.raises(OSError, match="No space left"):
                saver.wait_until_finished()
        assert not (tmp_path / "9").exists()
        result = end(training)
    with Training(FIRST, SETTINGS, **KERNEL) as untouched:
        go(untouched, PLAN, PLAN.steps)
        runs.assert_same_bits(end(untouched), result)


def test_a_save_whose_folder_cannot_be_made_holds_nobody_up(tmp_path, monkeypatch):
    # Minutes by default. orbax keeps what it has not begun to write, so nothing else ends the wait.
    waits = functools.partial(future.CommitFutureAwaitingContractedSignals, timeout_secs=0.1)
    monkeypatch.setattr(future, "CommitFutureAwaitingContractedSignals", waits)
    (tmp_path / "file").touch()
    with Training(ONE, SETTINGS, **KERNEL) as training:
        saver = ocp.AsyncCheckpointer(EngineCheckpointHandler())
        args = zenflow_jax.EngineSave(training.engine, copy_bytes=0)
        saver.save(tmp_path / "file" / "0", args=args)
        training.go(5)
        training.settle()
        with pytest.raises(NotADirectoryError):
            saver.wait_until_finished()
        saver.close()


def test_a_run_that_waits_long_for_a_save_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "_LATE_S", 0.0)
    monkeypatch.setattr(HostLeaf, "copy", no_memory)  # so it waits, though it was given room
    told = threading.Event()
    monkeypatch.setattr(snapshot._logger, "warning", lambda *args: told.set() or said.append(args))
    said = []
    with Training(ONE, SETTINGS, **KERNEL) as training:
        stream = training.engine.stream(ALL)
        writer = threading.Thread(target=lambda: told.wait() and stream.write(tmp_path))
        writer.start()
        training.go(5)
        writer.join()
    ((text, *values),) = said
    assert text % tuple(values) == (
        "the run has waited 0 s for a checkpoint to have written leaf ['columns']. It goes on "
        "when that is done or has failed. If the disk is slow, give `EngineSave(engine, "
        "copy_bytes=...)` more memory; if it is stuck, see to it."
    )


def no_memory(_):
    raise MemoryError


def test_an_engine_can_be_closed_while_it_waits_for_a_save(tmp_path, waits):
    with Training(ONE, SETTINGS, **KERNEL) as training:
        stream = training.engine.stream(0)
        training.step()
        exchange = threading.Thread(target=ends_closed, args=(training,))
        exchange.start()
        waits.wait()
        training.engine.close()
        exchange.join()
        assert not training.engine._worker.reason
        # What it holds is whole, and can still be saved.
        stream.write(tmp_path)
        assert read_engine_state(tmp_path)["counts"]["step"] == 0


def ends_closed(training):
    with pytest.raises(RuntimeError, match="closed"):
        training.exchange()


def test_what_cannot_be_saved_is_refused(tmp_path):
    with Training(ONE, SETTINGS, **KERNEL) as training:
        with pytest.raises(TypeError, match="expected a `HostEngine`, got dict"):
            zenflow_jax.EngineSave(training.engine.state())
        with pytest.raises(ValueError, match="`copy_bytes` must not be negative, got -1"):
            zenflow_jax.EngineSave(training.engine, copy_bytes=-1)
        with pytest.raises(ValueError, match="a folder of a file system, got gs://"):
            EngineCheckpointHandler().save(
                "gs://bucket/9", args=zenflow_jax.EngineSave(training.engine)
            )
    with pytest.raises(RuntimeError, match="expected an open engine"):
        EngineCheckpointHandler().save(tmp_path, args=zenflow_jax.EngineSave(training.engine))


def test_files_that_are_not_whole_are_refused_by_name(tmp_path):
    with Training(ONE, SETTINGS, **KERNEL) as training:
        EngineCheckpointHandler().save(tmp_path, args=zenflow_jax.EngineSave(training.engine))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    (leaf,) = read_engine_state(tmp_path)["leaves"]
    assert not np.asarray(leaf["total"]).any(), "no step is in it"
    leaf["mu"].pieces.clear()
    with pytest.raises(ValueError, match="expected all of leaves/0/mu .* got 0 of 40 elem"):
        np.asarray(leaf["mu"])
    for text, words in (
        (whole[:-1], "in which .* is not whole. Take another"),
        (whole[:100], "expected a whole file of an engine's state, got .*engine-00000-of-00001"),
        (b"", "expected a whole file"),
        (b"\xff" * 64, "expected a whole file .*a header of"),
    ):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=words):
            read_engine_state(tmp_path)
    path.write_bytes(whole.replace(b'"processes":"1"', b'"processes":"2"'))
    with pytest.raises(FileNotFoundError, match="of 2 processes in .*, got none of engine-00000"):
        read_engine_state(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="`EngineSave` wrote in .*, got none. Take another"):
        read_engine_state(tmp_path)


def save_as(training, process, folder, monkeypatch):
    """Saves as one of two processes would."""
    stream = dataclasses.replace(training.engine.stream(), processes=[0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_index", lambda: process)
        stream.write(folder)


def test_files_of_several_saves_are_refused(tmp_path, monkeypatch):
    save = EngineCheckpointHandler().save
    with Training(ONE, SETTINGS, **KERNEL) as training:
        # The other processes of jax's run are in other engines.
        with monkeypatch.context() as patch:
            patch.setattr(jax, "process_count", lambda: 2)
            save(tmp_path, args=zenflow_jax.EngineSave(training.engine))
        assert [path.name for path in tmp_path.iterdir()] == ["engine-00000-of-00001.safetensors"]
        assert read_engine_state(tmp_path)["counts"]["step"] == 0
        save_as(training, 1, tmp_path, monkeypatch)
        with pytest.raises(ValueError, match="of 1 processes in .*, got engine-00001-of-00002"):
            read_engine_state(tmp_path)
        (tmp_path / "engine-00000-of-00001.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match="of 2 processes .* none of engine-00000-of"):
            read_engine_state(tmp_path)
        training.go(1)
        save_as(training, 0, tmp_path, monkeypatch)
        with pytest.raises(ValueError, match="files of one save in .*, got some of steps 0 and 1"):
            read_engine_state(tmp_path)


def test_what_is_cut_short_cannot_be_read_though_its_end_is_there(tmp_path):
    with Training(ONE, SETTINGS, **KERNEL) as training:
        stream = training.engine.stream(ALL)
        saver = stream.snapshot.leaves()
        next(saver)
        stream.close()
        with pytest.raises(RuntimeError, match="expected to write 1 parts .* got all but 1"):
            stream.write(tmp_path)
    (path,) = tmp_path.iterdir()
    with open(path, "r+b") as file:
        file.truncate(100_000)
    with pytest.raises(ValueError, match="expected a whole file of an engine's state, got"):
        read_engine_state(tmp_path)


def test_a_checkpoint_that_changes_before_its_engine_is_made_is_refused(tmp_path, monkeypatch):
    save = EngineCheckpointHandler().save
    with Training(ONE, SETTINGS, **KERNEL) as training:
        save(tmp_path, args=zenflow_jax.EngineSave(training.engine))
        found = read_engine_state(tmp_path)
        (path,) = tmp_path.iterdir()
        path.unlink()
        told = []  # to the processes that still see the file: without a word they would wait
        with monkeypatch.context() as patch:
            patch.setattr(resume, "agree", lambda refusal, *_: told.append(refusal))
            with pytest.raises(FileNotFoundError, match="expected .* to stay until it is read"):
                resumed(training, (training.params, training.state, found), **KERNEL)
        assert "to stay until it is read" in told[0]
        training.go(1)  # in the same window: only the sum is another one
        save(tmp_path, args=zenflow_jax.EngineSave(training.engine))
        with pytest.raises(ValueError, match="expected .* as it was when .* written since"):
            np.asarray(found["leaves"][0]["mu"])
