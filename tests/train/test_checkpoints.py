"""The training script's checkpoints, with a few small arrays: kept and rejected checkpoints.

`test_stopping.py` has runs that resume from their checkpoints.
"""

import functools
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.scripts import flip_a_bit, largest_file
from train.checkpoints import checksums
from train.checkpoints.checkpoints import CheckpointError, Checkpoints
from train.checkpoints.compatibility import description
from train.cli.settings import Settings, SettingsError
from train.model.decoder import DecoderConfig, LinearRope

SMALL = 1000
LARGE = 4_000_000  # 16 MB: orbax takes longer to write it than any step takes here
CONFIG = DecoderConfig(*range(8), 1e-5, 1e4, None, False, False, False, None)


def opened(folder: Path, *, config=CONFIG, **changed) -> Checkpoints:
    settings = Settings(**({"optimizer": "adamw"} | changed))
    described = vars(settings) | {"full_warm_up_rounds": settings.warm_up_rounds}
    return Checkpoints(
        folder / "checkpoints",
        keep=settings.keep,
        keep_best=settings.keep_best,
        describe=description(described, 0, config),
    )


def initial(size: int = SMALL):
    """Returns parameters and optimizer state: noise, which compression does not shrink."""
    noise = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    params = {"w": noise, "empty": np.zeros((0, 3), np.float32)}
    return jax.device_put((params, (np.int32(0), {"mu": noise.copy()})), jax.devices()[0])


@functools.partial(jax.jit, donate_argnums=(0, 1))
def advance(params, opt_state):
    count, moments = opt_state
    w, mu = params["w"] + jnp.float32(1), moments["mu"] * jnp.float32(0.5)
    return params | {"w": w}, (count + 1, {"mu": mu})


def assert_same(restored, values):
    jax.tree.map(np.testing.assert_array_equal, (restored.params, restored.opt_state), values)


def saved_run(folder: Path, *steps: int, size: int = SMALL, **options):
    """Saves a new run's state after each of these steps; returns its values."""
    values, state = {}, initial(size)
    with opened(folder, **options) as checkpoints:
        for step in steps:
            state = advance(*state)
            values[step] = jax.tree.map(np.array, state)
            checkpoints.save(step, *state, None, {"losses": [0.1 * step]}, figure=None)
            state = advance(*state)  # donates the saved state
        checkpoints.wait()
    return values


@pytest.mark.slow
def test_a_checkpoint_has_its_steps_state_whatever_is_donated_during_the_write(tmp_path):
    values = saved_run(tmp_path, 3, 6, size=LARGE, keep=9)
    for step, value in values.items():
        with opened(tmp_path) as checkpoints:
            restored = checkpoints.restore(step, *initial(LARGE))
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
    params, opt_state = initial()
    with opened(tmp_path) as checkpoints:
        for read in (
            lambda step: checkpoints.restore(step, params, opt_state),
            lambda step: checkpoints.weights(step, params),
        ):
            with pytest.raises(CheckpointError, match="20 in .* is damaged: .*Remove its folder"):
                read(checkpoints.newest())
        shutil.rmtree(damaged)
        assert_same(checkpoints.restore(checkpoints.newest(), params, opt_state), values[10])


def test_a_checkpoint_from_another_run_is_rejected_and_kept(tmp_path):
    saved_run(tmp_path, 10, steps=40, full_warm_up_share=0.05)
    linear = CONFIG._replace(rope_scaling=LinearRope(2.0))
    for options, size, expected in (
        ({"width": 512}, SMALL, "`width`: is 512, but was 256 in the run .*settings.toml"),
        ({"config": linear}, SMALL, r"`rope_scaling` in the model.* is LinearRope\(factor=.*, but"),
        ({}, SMALL + 1, r"array `\S+` is float32 .1000,. in .*but float32 .1001,."),
        # A share for the warm-up must give the rounds that the run began with.
        ({"steps": 80}, SMALL, "`full_warm_up_rounds`: is 4, but was 2 "),
    ):
        options = {"steps": 40, "full_warm_up_share": 0.05} | options
        with opened(tmp_path, **options) as checkpoints:
            with pytest.raises(SettingsError, match=expected):
                checkpoints.restore(10, *initial(size))
    changed = {"steps": 80, "full_warm_up_rounds": 2, "learning_rate": 1.0, "keep": 5}
    with opened(tmp_path, **changed) as checkpoints:
        checkpoints.restore(checkpoints.newest(), *initial())


def test_a_path_that_orbax_would_read_as_a_pattern_is_rejected(tmp_path):
    for name in ("a[1]", "a\\b", "a*", "a?"):
        with pytest.raises(SettingsError, match=r"`output_dir`: checkpoints cannot be read"):
            opened(tmp_path / name)
