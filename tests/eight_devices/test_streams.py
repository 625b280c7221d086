"""Layers that stream on a mesh: the bits of a run whose layers do not."""

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.comparisons import assert_same_bits
from tests.device.test_streaming import run

PLACES = {
    "replicated over data": {"up": P(), "down": P()},
    "the other axis over fsdp": {"up": P(None, None, "fsdp"), "down": P(None, None, "fsdp")},
    "channels over fsdp": {"up": P(None, "fsdp"), "down": P(None, "fsdp")},
}


def shardings(name):
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), (jax.sharding.AxisType.Auto,) * 2)
    layers = PLACES[name] | {"scale": P()}
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), {"layers": layers, "head": P()})


@pytest.mark.parametrize("name", PLACES)
def test_layers_stream_on_a_mesh_with_the_same_bits(name):
    where = shardings(name)
    runs = [run("bfloat16", stream=x, shardings=where, max_grad_norm=None) for x in (True, False)]
    assert_same_bits(*runs)
