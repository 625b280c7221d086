"""Resumes checkpoints that orbax writes inside a window, on the same or on other devices."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import zenflow_jax
from tests import comparisons, meshes, runs
from tests.meshes import IN_RANGES, LEAVES, MORE_LEAVES, STALE
from tests.resuming import assert_saved, go, put_by_name, resume_by_orbax, save_by_orbax
from tests.runs import KERNEL, Plan, Settings, Training
from zenflow_jax._device.checksums import checksum

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit

PLAN = Plan(17, bad=(12,))
SAVED_AT = 9  # with one leaf's update in flight, and a step in the other leaf's open window
HERE = functools.partial(Training, LEAVES, STALE, donate=True)


def test_parameters_have_the_same_checksum_on_any_devices():
    values, mesh = runs.initial_values(MORE_LEAVES), meshes.make_mesh("three", EXPLICIT)
    sums = set()
    for placement in (None, *meshes.PLACEMENTS):
        where = placement and meshes.shardings(mesh, placement, MORE_LEAVES)
        params = runs.place(values, where)
        sums.add(checksum([params[x.name] for x in MORE_LEAVES]))
    assert len(sums) == 1


def test_a_checkpoint_resumes_on_a_mesh(tmp_path):
    where = meshes.shardings(meshes.make_mesh("two", EXPLICIT), "channels")
    with HERE(shardings=where) as training:
        go(training, PLAN, SAVED_AT)
        assert training.on_their_way
        written = save_by_orbax(training, tmp_path)
        *saved, in_numpy = jax.device_get(
            (training.params, training.state, training.engine.state())
        )
    with HERE(shardings=where) as training:
        by_name = put_by_name(saved, [training.params, training.state])
        engine = zenflow_jax.HostEngine(*by_name, engine_state=in_numpy, **KERNEL)
        from_numpy = engine.state()
        engine.close()
        engine_state = resume_by_orbax(training, tmp_path)
        assert_saved(written, from_numpy)
        for name, x in training.params.items():
            place = tuple(n - 1 for n in x.shape)
            other = training.params | {name: runs.with_a_bit(x, place, 0)}
            with pytest.raises(ValueError, match="`params` differ from those"):
                zenflow_jax.HostEngine(other, training.state, engine_state=engine_state)
        go(training, PLAN, PLAN.steps)
        training.settle()
        expected, _ = comparisons.reference(training, PLAN, meshes.pieces(LEAVES, where))
        comparisons.assert_close([training.values()], expected.params[-1:])
        np.testing.assert_equal(training.selected(), expected.selected[-1])
        training.flush()
        masters = zenflow_jax.master_params(training.params, training.state, training.engine)
        for name, master in masters.items():
            assert master.sharding.is_equivalent_to(training.params[name].sharding, master.ndim)
            cast = np.asarray(master).astype(training.params[name].dtype)
            np.testing.assert_array_equal(cast, np.asarray(training.params[name]))


def test_a_selection_over_fewer_devices_is_rejected():
    # One device and eight pieces of 32 or 16 channels select the same number of channels.
    settings = Settings(topk_ratio=0.25, update_interval=2, select_interval=2)
    leaves = MORE_LEAVES[1:3]
    channels = meshes.shardings(meshes.make_mesh("fsdp"), "channels", leaves)
    with Training(leaves, settings) as training:
        training.go(6)
        saved = jax.tree.map(np.asarray, (training.params, training.state))
        engine_state = jax.tree.map(np.asarray, training.engine.state())
    with Training(leaves, settings, shardings=channels) as training:
        params, state = put_by_name(saved, (training.params, training.state))
        with pytest.raises(ValueError, match="at most as many devices along this axis"):
            zenflow_jax.HostEngine(params, state, engine_state=engine_state)


def test_a_checkpoint_with_ranges_resumes_on_a_mesh_unless_the_mesh_divides_layers():
    with Training(IN_RANGES, STALE, donate=True) as training:
        training.go(7)
        saved = jax.tree.map(np.asarray, (training.params, training.state, training.engine.state()))
        training.go(12)
        training.flush()
        expected = training.values()
    for placement in "replicated", "stacks":
        where = meshes.shardings(meshes.make_mesh("three"), placement, IN_RANGES)
        with Training(IN_RANGES, STALE, shardings=where, donate=True) as training:
            both = put_by_name(saved[:2], (training.params, training.state))
            if placement == "stacks":
                with pytest.raises(ValueError, match="divides channels and layers alike"):
                    zenflow_jax.HostEngine(*both, engine_state=saved[2])
                continue
            training.params, training.state = both
            training.renew(engine_state=saved[2])
            training.go(12)
            training.flush()
            comparisons.assert_close([training.values()], [expected])
