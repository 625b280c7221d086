"""The training script's checkpoints, with a few small arrays: kept and rejected checkpoints.

`test_stopping.py` has runs that resume from their checkpoints.
"""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kill_test import names_in
from tests.train.scripts import flip_a_bit, largest_file
from train.checkpoints import checksums
from train.checkpoints.checkpoints import CheckpointError, Checkpoints
from train.checkpoints.compatibility import description
from train.cli.settings import Settings, SettingsError
from train.model.decoder import DecoderConfig, LinearRope

SMALL = 1000
LARGE = 4_000_000  # 16 MB: orbax takes longer to write it than any step takes here
CONFIG = DecoderConfig(*range(8), 1e-5, 1e4, None, False, False, False, None)


class Job:
    """A state that a donating step changes, in place of a run."""

    def __init__(self, folder: Path, *, size: int = SMALL, config=CONFIG, **changed):
        # Noise, which compression does not shrink.
        noise = np.random.default_rng(0).standard_normal(size).astype(np.float32)
        device = jax.devices()[0]
        self.params = jax.device_put({"w": noise, "empty": np.zeros((0, 3), np.float32)}, device)
        self.opt_state = jax.device_put((np.int32(0), {"mu": noise.copy()}), device)
        settings = Settings(**({"optimizer": "adamw"} | changed))
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            keep=settings.keep,
            keep_best=settings.keep_best,
            describe=description(
                vars(settings) | {"full_warm_up_rounds": settings.warm_up_rounds}, 0, config
            ),
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
        """Restores the saved state, from which the job resumes."""
        restored = self.checkpoints.restore(step, self.params, self.opt_state)
        self.params, self.opt_state = restored.params, restored.opt_state
        return restored


def assert_same(restored, values):
    jax.tree.map(np.testing.assert_array_equal, (restored.params, restored.opt_state), values)


def saved_run(folder: Path, *steps: int, **options):
    """Makes checkpoints of a new job after 1, 2, ... steps; returns its values at each."""
    values = []
    with Job(folder, **options) as job:
        for step in steps:
            job.step()
            values.append(job.values())
            job.save(step)
        job.checkpoints.wait()
    return values


@pytest.mark.slow
def test_a_checkpoint_has_its_steps_state_whatever_is_donated_during_the_write(tmp_path):
    with Job(tmp_path, size=LARGE, keep=9) as job:
        values = {}
        for step in range(1, 7):
            job.step()
            if step % 3 == 0:
                values[step] = job.values()
                job.save(step)
        job.checkpoints.wait()
    for step, value in values.items():
        with Job(tmp_path, size=LARGE) as job:
            restored = job.restored(step)
            assert_same(restored, value)
            assert restored.progress == {"losses": [0.1 * step]}
            assert restored.params["w"].sharding == jax.device_put(0.0, jax.devices()[0]).sharding
            assert restored.params["w"].committed


def without_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


DAMAGES = {
    "a bit of the arrays": (lambda c: flip_a_bit(largest_file(c / "state")), "does not match"),
    "arrays cut off": (lambda c: without_end(largest_file(c / "state")), "does not match"),
    "no state": (lambda c: shutil.rmtree(c / "state"), "is missing"),
    "no checksums": (lambda c: (c / "checksums.json").unlink(), "checksums.json is missing"),
    "another file": (lambda c: (c / "run" / "x").touch(), "is not in checksums.json"),
}


def test_each_kind_of_damage_to_a_checkpoint_is_named(tmp_path):
    saved_run(tmp_path, 10)
    whole = tmp_path / "checkpoints" / "10"
    assert checksums.find_damage(whole) is None
    for name, (make, expected) in DAMAGES.items():
        copy = shutil.copytree(whole, tmp_path / name)
        make(copy)
        assert expected in checksums.find_damage(copy), name


def test_a_damaged_checkpoint_is_rejected_until_its_folder_is_removed(tmp_path):
    values = saved_run(tmp_path, 10, 20)
    damaged = tmp_path / "checkpoints" / "20"
    flip_a_bit(largest_file(damaged / "state"))
    with Job(tmp_path) as job:
        for read in (job.restored, lambda step: job.checkpoints.weights(step, job.params)):
            with pytest.raises(CheckpointError, match="20 in .* is damaged: .*Remove its folder"):
                read(job.checkpoints.newest())
        shutil.rmtree(damaged)
        assert_same(job.restored(job.checkpoints.newest()), values[0])


def test_a_checkpoint_from_another_run_is_rejected_and_kept(tmp_path):
    saved_run(tmp_path, 10, steps=40, full_warm_up_share=0.05)
    linear = CONFIG._replace(rope_scaling=LinearRope(2.0))
    for options, expected in (
        ({"width": 512}, "`width`: is 512, but was 256 in the run .*settings.toml"),
        (
            {"config": linear},
            r"`rope_scaling` in the model.* is LinearRope\(factor=.*, but was None",
        ),
        ({"size": SMALL + 1}, r"array `\S+` is float32 .1000,. in .*but float32 .1001,."),
        # A share for the warm-up must give the rounds that the run began with.
        (
            {"steps": 80},
            "`full_warm_up_rounds`: is 4, but was 2 ",
        ),
    ):
        options = {"steps": 40, "full_warm_up_share": 0.05} | options
        with Job(tmp_path, **options) as job, pytest.raises(SettingsError, match=expected):
            job.restored(10)
    with Job(tmp_path, steps=80, full_warm_up_rounds=2, learning_rate=1.0, keep=5) as job:
        job.restored(job.checkpoints.newest())


def test_a_path_that_orbax_would_read_as_a_pattern_is_rejected(tmp_path):
    for name in ("a[1]", "a\\b", "a*", "a?"):
        with pytest.raises(SettingsError, match=r"`output_dir`: checkpoints cannot be read"):
            Job(tmp_path / name)


# orbax's event loop does not report the writes that were in progress with the failed write again.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_ends_the_run_and_older_checkpoints_stay(small_disk):
    disk = small_disk("2m")
    values = saved_run(disk, 10)
    filler = disk / "filler"
    filler.write_bytes(b"x" * 1_900_000)
    with Job(disk, size=100 * SMALL) as job:
        job.save(20)
        with pytest.raises(
            CheckpointError, match=r"checkpoint 20 cannot .*(?i:space).*Free disk space"
        ):
            job.checkpoints.wait()
    filler.unlink()
    with Job(disk) as job:
        assert job.checkpoints.newest() == 10
        assert_same(job.restored(10), values[0])
        job.save(30)
        job.checkpoints.wait()
    assert names_in(disk / "checkpoints") == ["10", "30"]
