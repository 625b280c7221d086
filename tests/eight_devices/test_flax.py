"""Flax's own ways to hold parameters and state, on a mesh: nnx modules and a linen `TrainState`."""

import jax
from flax import nnx
from jax.sharding import AxisType

from tests import meshes, runs
from tests.meshes import LEAVES, STALE
from tests.runs import Training
from zenflow_jax import HostEngine

STEPS = 13  # two windows are over, of which the first has reached the parameters in between


def started(kind: AxisType) -> Training:
    shardings = meshes.shardings(meshes.make_mesh("three", kind), "both")
    return Training(LEAVES, STALE, shardings=shardings, threads=1, host_kernel="numpy", donate=True)


def gradients(training: Training, t: int):
    return runs.place(runs.gradients(LEAVES, t), training.shardings)


def copied(training: Training):
    return runs.place(runs.initial_values(LEAVES), training.shardings)


def where(tree):
    return [x.sharding.devices_indices_map(x.shape) for x in jax.tree.leaves(tree)]


class Model(nnx.Module):
    def __init__(self, values):
        for name, value in values.items():
            setattr(self, name, nnx.Param(value))


def test_an_nnx_module_trains_as_the_functional_form_does():
    with started(AxisType.Explicit) as expected, jax.set_mesh(expected.shardings["rows"].mesh):
        model = Model(copied(expected))
        optimizer = nnx.Optimizer(model, expected.tx, wrt=nnx.Param)

        train_step = nnx.jit(runs.update_nnx)
        params = nnx.state(model, nnx.Param)
        before = where(params)
        with HostEngine(params, optimizer.opt_state, host_kernel="numpy") as engine:
            for t in range(1, STEPS + 1):
                expected.go(1)
                train_step(model, optimizer, gradients(expected, t))
                engine.exchange_nnx(model, optimizer)
                ours = nnx.to_pure_dict(nnx.state(model, nnx.Param))
                runs.assert_same_bits(ours, expected.params)
            expected.flush()
            engine.flush_nnx(model, optimizer)
            ours = nnx.to_pure_dict(nnx.state(model, nnx.Param))
            runs.assert_same_bits(ours, expected.params)
            assert where(nnx.state(model, nnx.Param)) == before
