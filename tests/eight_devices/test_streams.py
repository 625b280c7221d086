"""Streamed layers on a mesh: bit-identical to a run without streaming."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zenflow_jax
from tests.comparisons import assert_same_bits
from tests.device.streamed_runs import batches, loss, model, run
from zenflow_jax import streaming


def shardings():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), (jax.sharding.AxisType.Auto,) * 2)
    # A layer's first axis is its channel axis. One of the two matrices is replicated.
    layers = {"up": P(), "down": P(None, "fsdp"), "scale": P()}
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), {"layers": layers, "head": P()})


def test_streamed_layers_on_a_mesh_are_bit_identical():
    options = {"steps": 9, "shardings": shardings(), "max_grad_norm": None}
    assert_same_bits(*(run("bfloat16", stream=x, **options) for x in (True, False)))


def test_layers_do_not_stream_inside_shard_map():
    params = jax.device_put(model("float32"), shardings())
    state, mesh = zenflow_jax.zenflow(1e-2).init(params), params["head"].sharding.mesh
    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P()}

    @jax.jit
    def loss_of(params, *batch):
        return jax.shard_map(loss, mesh=mesh, **specs)(streaming.stream(params, state), *batch)

    with pytest.raises(ValueError, match=r"`streaming.scan_layers` is called inside `jax"):
        loss_of(params, *next(batches(1, "float32")))


def test_layers_with_explicit_axes_or_divided_by_a_mesh_do_not_stream():
    kinds = jax.sharding.AxisType
    for kind, where, words in (
        (kinds.Auto, P("data"), "its layers divided over .*data"),
        (kinds.Explicit, P(), "Explicit mesh axes"),
    ):
        place = NamedSharding(jax.make_mesh((2, 4), ("data", "fsdp"), (kind,) * 2), where)
        params = {"w": jax.device_put(np.ones((2, 8, 8), np.float32), place)}
        state = zenflow_jax.zenflow(1e-2).init(params)
        with pytest.raises(ValueError, match=f"has {words}.* must be whole"):
            streaming.stream(params, state)
    # An axis of one device divides nothing.
    place = NamedSharding(jax.make_mesh((1, 8), ("data", "fsdp"), (kinds.Auto,) * 2), P("data"))
    params = jax.device_put(params, place)
    streaming.stream(params, zenflow_jax.zenflow(1e-2).init(params))
