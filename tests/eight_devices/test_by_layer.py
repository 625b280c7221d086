"""A run with streamed weights on a mesh: it has the losses of one device, and resumes."""

import numpy as np
import pytest

from tests.comparisons import assert_same_bits
from tests.train.scripts import TINY_MESH, read
from train.model import cross_entropy
from train.run import setup

# Nats, float32: sums over devices have a different order.
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
