"""A run with streamed weights on a mesh has the losses of a one-device run, and resumes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.comparisons import assert_same_bits
from tests.train.scripts import TINY_MESH, read
from train.model import cross_entropy
from train.run import setup
from zenflow_jax import layerwise

# In nats, float32; the order of sums over devices differs.
ATOL = 1e-5


@pytest.mark.usefixtures("as_scripts_run")
def test_a_layerwise_run_on_a_mesh_has_the_losses_of_one_device_and_resumes(monkeypatch):
    monkeypatch.setattr(cross_entropy, "PART", 100)  # embedding and head are split
    options = TINY_MESH | {"dtype": "float32", "eps": 1e-3}
    options |= {"optimizer": "offload", "stream": "weights"}
    losses = []
    for mesh in (None, "data=2,fsdp=4"):
        job, _ = setup.prepare(read(**options, mesh=mesh), lambda: None)
        batches = [job.batches[i] for i in range(3)]
        with setup.make_trainer(job) as trainer:
            taken = [trainer.step(batches[0])]
            state = trainer.state()
            losses.append(np.array(taken + [trainer.step(batch) for batch in batches[1:]]))
            trained = trainer.params()
    assert job.layered
    assert job.layered.parts > 1
    np.testing.assert_allclose(losses[1], losses[0], atol=ATOL)
    with setup.make_trainer(job, state) as resumed:
        for batch in batches[1:]:
            resumed.step(batch)
        assert_same_bits(resumed.params(), trained)


def losses_of(mesh):
    """Returns the losses of a small model, whose weights a mesh divides."""
    whole, split, rows = (NamedSharding(mesh, x) for x in (P(), P(None, "fsdp"), P("data")))
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(8, 8)).astype(np.float32) / 4 for _ in range(3)]
    head, *layers = jax.device_put(weights, split)

    def times(x, w):
        explicit = AxisType.Explicit in mesh.axis_types
        return x @ (jax.sharding.reshard(w, whole) if explicit else w)

    trainer = layerwise.Trainer(
        {"outer": head, "layers": layers},
        first=lambda outer, x: (x, None),
        layer=lambda w, x, _: x + jnp.tanh(times(x, w)),
        last=lambda outer, x, _: jnp.mean(times(x, outer) ** 2),
        learning_rate=1e-2,
        host_kernel="numpy",
    )
    x = jax.device_put(rng.normal(size=(8, 8)).astype(np.float32), rows)
    with trainer:
        return [float(trainer.step(x)) for _ in range(3)]


def test_weights_on_explicit_axes_train_as_on_auto_axes():
    of_kinds = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(kind,) * 2)
        with jax.set_mesh(mesh):
            of_kinds.append(losses_of(mesh))
    np.testing.assert_allclose(*of_kinds, rtol=1e-5)  # sums in another order
    assert of_kinds[0][2] < of_kinds[0][0]
