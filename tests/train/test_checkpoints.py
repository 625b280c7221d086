"""Checkpoints of the training script: the same bits after a stop, and what goes wrong is said.

Runs are processes of their own, with compiled programs that they share; faults of the file system
are shown on a few small arrays.
"""

import contextlib
import dataclasses
import errno
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

from benchmarks import kill_test
from tests import runs as optimizer_runs
from tests.cut_short import cut_short
from tests.processes import environment
from tests.resuming import assert_saved
from tests.runs import Leaf, Training
from train import checksums, finetune
from train.checkpoints import Checkpoints
from train.decoder import DecoderConfig, LinearRope
from train.models import write_weights
from train.run_description import description, saved_rounds, with_saved_rounds
from train.run_folder import LOCK, run_lock
from train.saved_checkpoints import CheckpointError, SavedCheckpoints
from train.settings import Settings, SettingsError

# --- runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with an uninterrupted run, `whole`, and its config; and what three kills did.

    The first comes after a save, the second while one is written, the third at the start.
    """
    folder = tmp_path_factory.mktemp("runs")
    return folder, kill_test.kill_test(folder, kills=3, seed=41)


def start(config: Path, run: str, *options: str) -> subprocess.Popen:
    """As `kill_test.start`."""
    settings = environment(1)
    return subprocess.Popen(
        [sys.executable, "-m", "train.finetune", config, "--run", run, *options],
        cwd=kill_test.ROOT,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output(process: subprocess.Popen) -> tuple[int, str]:
    text, _ = process.communicate(timeout=300)
    return process.returncode, text


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def largest_file(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def changed_at(folder: Path) -> dict[Path, float]:
    """When what is in a run's folder was last written; the lock is, by every start."""
    return {p: p.stat().st_mtime for p in folder.rglob("*") if p.name != LOCK}


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(runs):
    _, result = runs
    assert result.kills == 3
    assert result.differences == []


@pytest.mark.slow
@pytest.mark.usefixtures("promotion_as_users_have_it", "no_picture")
@pytest.mark.parametrize(
    "words",
    [{"optimizer": "adamw"}, {"send_gradients": "per_window"}, {"send_gradients": "after_step"}],
    ids=str,
)
def test_other_ways_to_train_go_on_as_well(tmp_path, capsys, words):
    config = kill_test.write_config(tmp_path, steps=18, **words)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    for name in ("lock", "settings.toml"):  # as of a start that was killed before it saved
        (whole / name).touch()
    assert finetune.main([str(config), "--run", whole.name, "--keep", "9"]) == 0
    assert "no checkpoint to go on from" in capsys.readouterr().out
    cut_short(whole, cut, after=10)  # in the middle of a window, the third
    assert finetune.main([str(config), "--run", cut.name]) == 0
    assert "going on from checkpoint 10" in capsys.readouterr().out
    assert kill_test.differences(whole, cut) == []


@pytest.mark.slow
def test_a_signal_saves_the_run_and_says_how_to_go_on(runs):
    folder, _ = runs
    trace = folder / "trace.json"
    process = start(folder / "job.toml", "stopped", "--timeline", str(trace))
    for line in process.stdout:
        if line.startswith("step"):
            process.send_signal(signal.SIGTERM)
            break
    code, text = output(process)
    assert code == 128 + signal.SIGTERM, text
    said, command = text.splitlines()[-2:]
    stopped = folder / "stopped"
    step = max(kill_test.steps_of(stopped / "checkpoints"))
    assert said == f"stopped by SIGTERM after step {step}, which is saved. Go on with:"
    assert command == f"python -m train.finetune {stopped}/settings.toml --run stopped"
    assert f'"step": {step}' in trace.read_text(encoding="utf-8")

    code, text = output(start(stopped / "settings.toml", "stopped"))
    assert (code, f"going on from checkpoint {step}" in text) == (0, True), text
    assert kill_test.differences(folder / "whole", stopped) == []


@pytest.mark.slow
def test_a_damaged_checkpoint_is_said_and_the_run_goes_on_from_the_one_before(runs):
    folder, _ = runs
    damaged = folder / "damaged"
    shutil.copytree(folder / "whole", damaged)
    older, newest = sorted(kill_test.steps_of(damaged / "checkpoints"))
    flip_a_bit(largest_file(damaged / "checkpoints" / str(newest)))
    (damaged / "summary.json").unlink()
    (damaged / "model.safetensors").unlink()
    code, text = output(start(folder / "job.toml", "damaged"))
    assert code == 0, text
    assert f"checkpoint {newest} is damaged: " in text
    assert f"going on from checkpoint {older}" in text
    assert f"checkpoints/{newest} to damaged-{newest}" in text
    assert kill_test.differences(folder / "whole", damaged) == []


@pytest.mark.slow
def test_the_model_is_the_masters_by_key_path(runs):
    folder, _ = runs
    kernel = load_file(folder / "whole" / "model.safetensors")["blocks.0.gate.kernel"]
    assert (kernel.shape, kernel.dtype) == ((16, 24), np.float32)
    # Low-precision parameters are the masters rounded, and the run has ended.
    assert np.any(kernel != np.asarray(kernel, jnp.bfloat16).astype(np.float32))


@pytest.mark.slow
@pytest.mark.usefixtures("promotion_as_users_have_it", "no_picture")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--fresh"], "`--fresh`: expected .*whole to be new or empty, got a folder with"),
        (["--topk-ratio", "0.5"], "`topk_ratio`: expected 0.25, as in the run .*got 0.5. Pass"),
        (["--seed", "1"], "`seed`: expected 0, .*got 1"),
        (["--steps", "20"], "`steps`: expected at least 88, .*got 20"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_a_folder_of_another_run_is_refused_with_a_remedy(runs, capsys, options, expected):
    folder, _ = runs
    before = changed_at(folder / "whole")
    assert finetune.main([str(folder / "job.toml"), "--run", "whole", *options]) == 2
    assert re.search(f"error: .*{expected}", capsys.readouterr().err)
    assert changed_at(folder / "whole") == before


@pytest.mark.slow
@pytest.mark.usefixtures("promotion_as_users_have_it", "no_picture")
def test_an_export_says_which_updates_it_lacks(runs, tmp_path, capsys):
    folder, _ = runs
    command = [str(folder / "job.toml"), "--run", "whole", "--export"]
    oldest, *_, last = sorted(kill_test.steps_of(folder / "whole" / "checkpoints"))
    model = folder / "whole" / "model.safetensors"
    for step, also in ((last, f"; {model} has them"), (oldest, "")):
        assert finetune.main([*command, str(step), str(tmp_path / str(step))]) == 0
        said = capsys.readouterr().out
        assert said.endswith(f"without the updates that were on their way{also}\n")


@pytest.mark.slow
@pytest.mark.usefixtures("promotion_as_users_have_it", "no_picture")
def test_parameters_that_are_not_those_of_their_checkpoint_are_refused(runs, capsys, monkeypatch):
    folder, _ = runs
    before = changed_at(folder / "whole")

    def mixed(self, *args, restore=Checkpoints.restore):
        restored = restore(self, *args)
        return restored._replace(params=jax.tree.map(lambda x: x * 2, restored.params))

    monkeypatch.setattr(Checkpoints, "restore", mixed)
    assert finetune.main([str(folder / "job.toml"), "--run", "whole", "--steps", "99"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: expected `params` to be those of the step at which")
    assert changed_at(folder / "whole") == before


@pytest.mark.slow
@pytest.mark.usefixtures("promotion_as_users_have_it", "no_picture")
def test_a_run_that_has_ended_is_left_as_it_is(runs, capsys):
    folder, _ = runs
    before = changed_at(folder / "whole")
    assert finetune.main([str(folder / "job.toml"), "--run", "whole"]) == 0
    assert "has done all its 88 steps" in capsys.readouterr().out
    assert changed_at(folder / "whole") == before


# --- files ----------------------------------------------------------------------------------

SMALL = 1000
LARGE = 4_000_000  # 16 MB: orbax needs longer for it than for any step here


class Job:
    """What a run has, without one: a state that a donating step changes."""

    def __init__(self, folder: Path, *, size: int = SMALL, config=None, **changed):
        self.said: list[str] = []
        # Noise, which is not made smaller by compression.
        noise = np.random.default_rng(0).standard_normal(size).astype(np.float32)
        device = jax.devices()[0]
        self.params = jax.device_put({"w": noise, "empty": np.zeros((0, 3), np.float32)}, device)
        self.opt_state = jax.device_put((np.int32(0), {"mu": noise.copy()}), device)
        settings = Settings(**({"optimizer": "adamw"} | changed))
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            keep=settings.keep,
            keep_best=settings.keep_best,
            describe=description(settings, 0, config),
            say=self.said.append,
        )

        def advance(params, opt_state):
            count, moments = opt_state
            w, mu = params["w"] + jnp.float32(1), moments["mu"] * jnp.float32(0.5)
            return params | {"w": w}, (count + 1, {"mu": mu})

        self._advance = jax.jit(advance, donate_argnums=(0, 1))

    def __enter__(self):
        self.checkpoints.__enter__()
        return self

    def __exit__(self, *exception):
        self.checkpoints.__exit__(*exception)

    def step(self):
        self.params, self.opt_state = self._advance(self.params, self.opt_state)

    def values(self):
        return jax.tree.map(np.array, (self.params, self.opt_state))

    def save(self, step: int, *, loss: float | None = None):
        progress = {"losses": [0.1 * step]}
        self.checkpoints.save(step, self.params, self.opt_state, None, progress, figure=loss)

    def restored(self, step: int):
        """What was saved; the job goes on from there."""
        restored = self.checkpoints.restore(step, self.params, self.opt_state)
        self.params, self.opt_state = restored.params, restored.opt_state
        return restored


def assert_same(restored, values):
    jax.tree.map(np.testing.assert_array_equal, (restored.params, restored.opt_state), values)


def saved_run(folder: Path, *steps: int, **options):
    """Makes checkpoints of a new job after 1, 2, ... of its own steps; gives its values at each."""
    values = []
    with Job(folder, **options) as job:
        for step in steps:
            job.step()
            values.append(job.values())
            job.save(step)
        job.checkpoints.finish()
        assert job.said == []
    return values


@pytest.mark.slow
def test_a_checkpoint_is_the_state_of_its_step_whatever_is_donated_while_it_is_written(tmp_path):
    with Job(tmp_path, size=LARGE, keep=9) as job:
        values = {}
        for step in range(1, 16):
            job.step()
            if step % 3 == 0:
                values[step] = job.values()
                job.save(step)
        job.checkpoints.finish()
    for step, value in values.items():
        with Job(tmp_path, size=LARGE) as job:
            restored = job.restored(step)
            assert_same(restored, value)
            assert restored.progress == {"losses": [0.1 * step]}
            assert restored.params["w"].sharding == jax.device_put(0.0, jax.devices()[0]).sharding
            assert restored.params["w"].committed


def test_the_newest_are_kept_and_the_best(tmp_path):
    # Of the second and fourth nothing is known.
    losses = {1: np.nan, 2: None, 3: 1.0, 4: None, 5: 2.0, 6: 2.0, 7: 4.0}
    values = {}
    with Job(tmp_path, keep=2, keep_best=True) as job:
        for step, loss in losses.items():
            job.step()
            values[step] = job.values()
            job.save(step, loss=loss)
        job.checkpoints.finish()
        assert kill_test.steps_of(tmp_path / "checkpoints") == {3, 6, 7}
        assert job.checkpoints.best(or_step=7) == 3
    with Job(tmp_path, keep=2, keep_best=True) as job:
        job.restored(7)
        assert job.checkpoints.best(or_step=7) == 3
        weights = job.checkpoints.weights(3, job.params)
        jax.tree.map(np.testing.assert_array_equal, weights, values[3][0])
        job.checkpoints.rate(7, 0.5)
        assert job.checkpoints.best(or_step=9) == 7
        job.params = weights
        job.save(8)
        job.checkpoints.finish()
    assert kill_test.steps_of(tmp_path / "checkpoints") == {7, 8}


def test_the_best_checkpoint_is_not_taken_if_it_is_damaged(tmp_path):
    saved_run(tmp_path, 10)
    flip_a_bit(largest_file(tmp_path / "checkpoints" / "10" / "state"))
    with Job(tmp_path) as job, pytest.raises(CheckpointError, match="10 .*damaged.*no-keep-best"):
        job.checkpoints.weights(10, job.params)


def read_checksums(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "checksums.json").read_text(encoding="utf-8"))


def write_checksums(checkpoint: Path, listed) -> None:
    (checkpoint / "checksums.json").write_text(json.dumps(listed), encoding="utf-8")


def without_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


DAMAGES = {
    "a bit of the arrays": (lambda c: flip_a_bit(largest_file(c / "state")), "another checksum"),
    "arrays cut off": (lambda c: without_end(largest_file(c / "state")), "bytes in place of"),
    "no state": (lambda c: shutil.rmtree(c / "state"), "is missing"),
    "a bit of the step": (lambda c: flip_a_bit(c / "run" / "metadata"), "another checksum"),
    "a bit of the checksums": (lambda c: flip_a_bit(c / "checksums.json"), ""),
    "no checksums": (lambda c: (c / "checksums.json").unlink(), "checksums.json is missing"),
    "a list of checksums": (lambda c: write_checksums(c, [1, 2]), "is no list of files with"),
    "no checksum": (lambda c: write_checksums(c, {}), "checksums.json has no file of run/"),
    "checksums of some files": (
        lambda c: write_checksums(c, dict(list(read_checksums(c).items())[:-1])),
        "is not in checksums.json",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, damage):
    values = saved_run(tmp_path, 10, 20)
    make, expected = DAMAGES[damage]
    make(tmp_path / "checkpoints" / "20")
    with Job(tmp_path) as job:
        assert job.checkpoints.newest() == 10
        (line,) = job.said
        assert line.startswith("checkpoint 20 is damaged: ")
        assert expected in line
        assert_same(job.restored(10), values[0])
        # A start that ends here, for any reason, has left all as it was.
        assert kill_test.names_in(tmp_path / "checkpoints") == ["10", "20"]
        job.checkpoints.set_aside()
        job.save(20)
        job.checkpoints.finish()
        assert job.checkpoints.newest() == 20
    assert kill_test.names_in(tmp_path / "checkpoints") == ["10", "20", "damaged-20"]


def test_checkpoints_that_were_damaged_before_keep_their_names(tmp_path):
    saved_run(tmp_path, 10, 20)
    for _ in range(2):
        (tmp_path / "checkpoints" / "20" / "checksums.json").unlink()
        with Job(tmp_path) as job:
            job.restored(job.checkpoints.newest())
            job.checkpoints.set_aside()
            job.save(20)
    assert kill_test.names_in(tmp_path / "checkpoints") == [
        "10",
        "20",
        "damaged-20",
        "damaged-20-2",
    ]


def test_half_a_checkpoint_is_cleared_away_by_writers_and_a_copy_stays(tmp_path):
    values = saved_run(tmp_path, 10, 20)
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(checkpoints / "20", checkpoints / "20.copy")
    half = checkpoints / "20.orbax-checkpoint-tmp"
    (checkpoints / "20").rename(half)
    # Who only reads leaves a save that is under way alone.
    saved = SavedCheckpoints(
        checkpoints, describe=description(Settings(optimizer="adamw"), 0), say=print
    )
    weights = saved.weights(saved.find("10"), Job(tmp_path).params)
    jax.tree.map(np.testing.assert_array_equal, weights, values[0][0])
    assert checksums.damage(half) is None
    with Job(tmp_path) as job:
        assert job.checkpoints.newest() == 10
        job.restored(10)
        job.save(20)
        job.checkpoints.finish()
    assert sorted(p.name for p in checkpoints.iterdir()) == ["10", "20", "20.copy"]
    assert checksums.damage(checkpoints / "20.copy") is None


def test_damaged_checkpoints_alone_are_an_error_and_stay(tmp_path):
    saved_run(tmp_path, 10, 20)
    for step in (10, 20):
        flip_a_bit(largest_file(tmp_path / "checkpoints" / str(step)))
    with Job(tmp_path) as job, pytest.raises(SettingsError, match="damaged ones alone .20: .*10: "):
        job.checkpoints.newest()
    assert kill_test.steps_of(tmp_path / "checkpoints") == {10, 20}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"width": 512}, "`width`: expected 256, as in the run .*got 512. Pass --width 256"),
        ({"rolling": False}, "`rolling`: expected True, .*Pass --rolling, or"),
        # Of other samples no figure says which checkpoint is best.
        ({"eval_batches": 3}, "`eval_batches`: expected None, .*got 3. Pass --eval-batches None"),
        ({"size": SMALL + 1}, r"array `\S+` to be float32 .1000,., .*got float32 .1001,."),
    ],
    ids=["settings", "flag", "samples", "arrays"],
)
def test_a_checkpoint_of_another_model_is_refused_and_stays(tmp_path, options, expected):
    saved_run(tmp_path, 10)
    with Job(tmp_path, **options) as job, pytest.raises(SettingsError, match=expected):
        job.restored(10)
    with Job(tmp_path, steps=7, learning_rate=1.0, keep=5) as job:
        job.restored(job.checkpoints.newest())


def test_what_a_deepspeed_config_has_set_is_put_right_in_the_config(tmp_path):
    saved_run(tmp_path, 10, topk_ratio=0.2)
    copy = tmp_path / "deepspeed.json"

    def refusal(config: str) -> str:
        with Job(tmp_path, topk_ratio=0.1, deepspeed=config) as job:
            with pytest.raises(SettingsError, match="`topk_ratio`: expected 0.2, .*got 0.1") as it:
                job.restored(10)
        return str(it.value)

    assert "Leave --deepspeed out, as " in refusal("other.json")
    copy.write_text("{}", encoding="utf-8")
    assert f"Pass --deepspeed {copy}, which the run has gone by" in refusal("other.json")
    assert f"Change it in {copy}, or" in refusal(str(copy))


def test_a_model_of_the_same_shapes_but_with_another_config_is_refused(tmp_path):
    begun = DecoderConfig(*range(8), 1e-5, 1e4, None, False, False, False, None)
    with Job(tmp_path, config=begun) as job:
        job.save(10)
        job.checkpoints.finish()
    with Job(tmp_path, config=begun._replace(rope_scaling=LinearRope(2.0))) as job:
        expected = r"with the rope_scaling of .*10 is of, None, got LinearRope\(factor=2.0\)"
        with pytest.raises(SettingsError, match=expected):
            job.restored(10)
    with Job(tmp_path, config=begun) as job:
        job.restored(10)


@contextlib.contextmanager
def small_file_system(folder, room):
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system, which this user does not have")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def no_room() -> OSError:
    """As a write to an open file raises it, which does not know the file's name."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def small_disk(tmp_path):
    """A folder with room for 2 MB."""
    with small_file_system(tmp_path / "disk", "2m") as folder:
        yield folder


# Of the writes that were under way with the one that fails, orbax's event loop does not hear again.
unheard = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@unheard
def test_a_full_disk_is_said_the_older_stay_and_the_next_save_tries_again(small_disk):
    values = saved_run(small_disk, 10)
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 1_900_000)
    with Job(small_disk, size=100 * SMALL) as job:
        job.save(20)
        with pytest.raises(CheckpointError, match=r"write checkpoint 20 .*(?i:space).*Make room"):
            job.checkpoints.finish()
        assert len(job.said) == 1
        assert kill_test.names_in(small_disk / "checkpoints") == ["10"]
        filler.unlink()
        job.save(30)
        job.checkpoints.finish()
    with Job(small_disk) as job:
        assert job.checkpoints.newest() == 30
        assert_same(job.restored(10), values[0])


@unheard
def test_a_failed_save_of_many_writes_is_said_once(small_disk, monkeypatch, recwarn):
    async def write_fragment():
        pass

    write_fragment.__qualname__ = f"async_serialize_from_host.<locals>.{write_fragment.__name__}"

    def close(self, *, really=ocp.CheckpointManager.close):
        really(self)
        raise no_room()  # of orbax's other threads, one at a time

    with Job(small_disk, size=LARGE) as job, monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "close", close)
        job.save(10)
        with pytest.raises(CheckpointError, match="write checkpoint 10 .*Make room"):
            job.checkpoints.finish()
    write_fragment()  # what orbax may leave when its event loop is closed
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.slow
@pytest.mark.usefixtures("promotion_as_users_have_it", "no_picture")
def test_an_error_of_the_file_system_without_a_name_has_the_one_of_the_run(
    runs, capsys, monkeypatch
):
    folder, _ = runs

    def newest(self):
        raise no_room()

    monkeypatch.setattr(Checkpoints, "newest", newest)
    assert finetune.main([str(folder / "job.toml"), "--run", "whole"]) == 2
    whole = re.escape(str(folder / "whole"))
    assert re.match(rf"error: expected to write .*{whole}.*Make room", capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize(("room", "options"), [("40k", ["--log-every", "1"]), ("2m", [])])
def test_a_run_whose_disk_is_full_ends_with_one_message(runs, tmp_path, room, options):
    folder, _ = runs
    with small_file_system(tmp_path / "disk", room) as disk:
        # What is written to it is the metrics, for which TensorBoard's own thread would be waited
        # for without end; or checkpoints, of which orbax leaves a trace for each array.
        where = ["--output-dir", str(disk), "--keep", "99", *options]
        code, text = output(start(folder / "job.toml", "full", *where))
    assert code == 2, text
    assert "Traceback" not in text
    last = text.splitlines()[-1]
    assert re.match(rf"error: expected to write .*{disk}.*Make room", last), text


def test_a_model_for_which_there_is_no_room_is_an_error_and_leaves_no_half(small_disk):
    with pytest.raises(CheckpointError, match="write the model to .*model.safetensors.*Make room"):
        write_weights(small_disk / "model.safetensors", {"w": jnp.ones(LARGE)})
    assert kill_test.names_in(small_disk) == []


@pytest.mark.parametrize("disk", ["read-only", "without permission"])
def test_a_folder_that_cannot_be_written_is_said_and_the_older_stay(disk, request, tmp_path):
    if disk == "read-only":
        folder = request.getfixturevalue("small_disk")
    elif os.geteuid() == 0:
        pytest.skip("nothing is forbidden to root; the other case shows it")
    else:
        folder = tmp_path
    saved_run(folder, 10)
    if disk == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    else:
        (folder / "checkpoints").chmod(0o500)
    with Job(folder) as job:
        job.save(20)
        with pytest.raises(CheckpointError, match="write checkpoint 20 to .*permissions; older"):
            job.checkpoints.finish()
        assert len(job.said) == 1
    with Job(folder) as job:
        assert job.checkpoints.newest() == 10
        job.restored(10)
    if disk != "read-only":
        (folder / "checkpoints").chmod(0o700)


def test_the_rounds_of_a_warm_up_are_those_that_the_run_began_with(tmp_path):
    assert saved_rounds(tmp_path / "checkpoints") is None
    assert Job(tmp_path).checkpoints.newest() is None
    saved_run(tmp_path, 10, 20, steps=40, full_warm_up_share=0.05)
    (tmp_path / "checkpoints" / "10" / "run" / "metadata").write_text("{", encoding="utf-8")
    assert saved_rounds(tmp_path / "checkpoints") == 2
    folder = {"output_dir": str(tmp_path.parent), "run": tmp_path.name}
    for share, steps, told in (
        (0.05, 40, None),
        (
            0.05,
            80,
            "full_warm_up_share 0.05 would be 4 of 80 steps: .* has the 2 that the run began",
        ),
        (0.5, 40, "full_warm_up_share 0.5 would be 20 of 40 steps"),
    ):
        asked = Settings(steps=steps, full_warm_up_share=share, **folder)
        settings, said = with_saved_rounds(asked)
        assert (settings.full_warm_up_share, settings.full_warm_up_rounds) == (None, 2)
        assert re.match(told or "None", str(said))
    new = dataclasses.replace(asked, run="new")
    assert with_saved_rounds(new) == (new, None)


# --- with an engine -------------------------------------------------------------------------

WIDE = tuple(Leaf(name, (160, 128), -2, "bfloat16") for name in "abc")  # 1 MB of state


def engine_run(folder, said):
    """A training with an engine in mid-window, and its checkpoints."""
    settings = optimizer_runs.Settings(topk_ratio=0.3, update_interval=4, select_interval=4)
    training = Training(WIDE, settings, threads=1, host_kernel="numpy", donate=True)
    training.go(7)
    return training, Checkpoints(
        folder / "checkpoints",
        keep=2,
        keep_best=False,
        describe=description(Settings(), 0),
        say=said.append,
    )


def test_a_save_of_an_engine_is_its_state(tmp_path):
    training, checkpoints = engine_run(tmp_path, [])
    with training, checkpoints:
        state = jax.tree.map(np.array, training.engine.state())
        checkpoints.save(7, training.params, training.state, training.engine, {})
        params = jax.tree.map(np.array, training.params)
        training.go(3)
        checkpoints.finish()
        restored = checkpoints.restore(7, training.params, training.state)
        jax.tree.map(np.testing.assert_array_equal, restored.params, params)
        assert_saved(tmp_path / "checkpoints" / "7" / "engine", state)
        mu = restored.engine_state["leaves"][0]["mu"]
        optimizer_runs.assert_same_bits(np.asarray(mu), state["leaves"][0]["mu"])


def test_a_checkpoint_with_another_layout_is_refused(tmp_path):
    training, checkpoints = engine_run(tmp_path, [])
    with training, checkpoints:
        checkpoints.save(7, training.params, training.state, None, {})
        checkpoints.finish()
        run = tmp_path / "checkpoints" / "7" / "run" / "metadata"
        metadata = json.loads(run.read_text(encoding="utf-8"))
        name = next(x for x in metadata["arrays"] if ".layout" in x)
        metadata["arrays"][name + "_7"] = metadata["arrays"].pop(name)
        metadata["zenflow_jax"] = "0.9.4"
        run.write_text(json.dumps(metadata), encoding="utf-8")
        refused = f"array `{name}` to be absent, as in .*/7, .*zenflow_jax 0.9.4 wrote it"
        with pytest.raises(SettingsError, match=refused):
            checkpoints.restore(7, training.params, training.state)
        # The weights alone are the same in any layout.
        sums = run.parents[1] / checksums.CHECKSUMS
        sums.write_text(json.dumps(checksums.checksums(run.parents[1])), encoding="utf-8")
        params = jax.tree.map(np.array, training.params)
        weights = checkpoints.weights(7, training.params)
        jax.tree.map(np.testing.assert_array_equal, weights, params)


# --- the lock -------------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from train.run_folder import run_lock
with run_lock(Path(sys.argv[1]), print):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_second_start_of_a_run_is_refused_until_the_first_is_dead(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=kill_test.ROOT
    ) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(SettingsError, match=f"process {holder.pid} on .* another --run"):
            with run_lock(tmp_path, print):
                pass
        holder.kill()
    with run_lock(tmp_path, print):
        pass
    with run_lock(tmp_path, print):
        pass


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    said = []
    with run_lock(tmp_path, said.append):
        assert "start no second process" in said[0]
