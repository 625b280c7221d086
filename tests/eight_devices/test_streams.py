"""Layers that stream on a mesh: the bits of a run whose layers do not."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zenflow_jax
from tests.comparisons import assert_same_bits
from tests.device.streamed_runs import EACH_STEP, Run, batches, loss, model, run
from tests.resuming import copied
from zenflow_jax import streaming

# The axis of channels is the first of a layer.
PLACES = {
    "replicated over data": {"up": P(), "down": P()},
    "either axis over fsdp": {"up": P(None, None, "fsdp"), "down": P(None, "fsdp")},
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


def test_layers_do_not_stream_inside_shard_map():
    params = jax.device_put(model("float32"), shardings("replicated over data"))
    state, mesh = zenflow_jax.zenflow(1e-2).init(params), params["head"].sharding.mesh
    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P()}

    @jax.jit
    def loss_of(params, *batch):
        return jax.shard_map(loss, mesh=mesh, **specs)(streaming.stream(params, state), *batch)

    with pytest.raises(ValueError, match=r"`streaming.scan_layers` is called inside `jax"):
        loss_of(params, *next(batches(1, "float32")))


def test_layers_that_a_mesh_divides_or_with_explicit_axes_do_not_stream():
    kinds = jax.sharding.AxisType
    for kind, where, words in (
        (kinds.Auto, P("data"), "its layers divided over .*data.*"),
        (kinds.Explicit, P(), "Explicit mesh axes"),
    ):
        place = NamedSharding(jax.make_mesh((2, 4), ("data", "fsdp"), (kind,) * 2), where)
        params = {"w": jax.device_put(np.ones((2, 8, 8), np.float32), place)}
        state = zenflow_jax.zenflow(1e-2).init(params)
        with pytest.raises(ValueError, match=f"whole along their first axis, .* got {words} at"):
            streaming.stream(params, state)


def test_layers_in_host_memory_train_and_go_on_as_those_on_the_devices():
    def ended(run, engine):
        params, masters, leaves, losses = run.end(engine)
        # XLA adds up the squares of a channel in another order.
        return params, masters, [leaf._replace(scores=None) for leaf in leaves], losses

    where, ends = shardings("either axis over fsdp"), []
    for hosts in (False, True):
        run = Run("bfloat16", hosts=hosts, shardings=where, **EACH_STEP)
        with zenflow_jax.HostEngine(run.params, run.state) as engine:
            run.go(engine, 0, 8)
            saved = copied((run.params, run.state, engine.state()))
            run.go(engine, 8, 11)
            ends.append(ended(run, engine))
        assert run.program._cache_size() == 1
    run.params, run.state, engine_state = saved
    run.losses = run.losses[:8]
    with zenflow_jax.HostEngine(run.params, run.state, engine_state=engine_state) as engine:
        run.go(engine, 8, 11)
        ends.append(ended(run, engine))
    assert run.params["layers"]["up"].sharding.memory_kind == "pinned_host"
    on_devices, *in_host_memory = (jax.tree.map(np.asarray, x) for x in ends)
    for one in in_host_memory:
        assert_same_bits(one, on_devices)
