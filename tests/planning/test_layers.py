"""Plans of `layerwise.Trainer`, compared with a trainer's memory and transfers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zenflow_jax import layerwise
from zenflow_jax import planning as library
from zenflow_jax.planning import GPUS, TEMPORARIES

pytestmark = pytest.mark.usefixtures("as_scripts_run")

WIDTH, ROWS, LAYERS = 64, 32, 5
ONE = WIDTH**2 * 2  # bytes of a layer's weights
MODEL = {
    "first": lambda outer, batch: (batch @ outer, None),
    "layer": lambda w, x, _: x + jnp.tanh(x @ w),
    "last": lambda outer, x, batch: jnp.mean(x.astype(jnp.float32) ** 2),
}
BATCH = jnp.ones((ROWS, WIDTH), jnp.bfloat16)


def params():
    weights = np.random.default_rng(0).normal(size=(1 + LAYERS, WIDTH, WIDTH)) / WIDTH
    outer, *layers = jax.device_put(list(weights.astype(jnp.bfloat16)), jax.devices()[0])
    return {"outer": outer, "layers": layers}


def planned(**options):
    return library.plan_layerwise(params(), BATCH, **MODEL, **options)


@pytest.mark.parametrize("host_state", ["float32", "compact"])
def test_state_and_bytes_on_the_bus_equal_a_trainers(host_state):
    options = {"learning_rate": 1e-3, "host_state": host_state, "host_kernel": "numpy"}
    with layerwise.Trainer(params(), **MODEL, **options) as trainer:
        trainer.step(BATCH)
        trainer.wait()
        stats = trainer.stats
    plan = planned(host_state=host_state)
    assert plan.host["masters, moments"] == stats.host_bytes
    assert (plan.to_device, plan.to_host) == (stats.bytes_to_device, stats.bytes_to_host)
    assert plan.checkpoint == 12 * plan.parameters == 12 * (1 + LAYERS) * WIDTH**2


def test_the_device_holds_two_layers_two_gradients_and_inputs_that_are_not_on_the_host():
    plan, compiled = planned(), planned(compiles=True)
    # This is in addition to the outer weights and their gradient.
    assert plan.device["weights"] == plan.device["gradients of weights"] == 3 * ONE
    assert compiled.by == "compiler"
    assert compiled.device_bytes == plan.device_bytes + compiled.device[TEMPORARIES]
    on_host = planned(inputs="host", updates="during_backward")
    x = ROWS * WIDTH * 2
    assert on_host.device["layers' inputs"] == plan.device["layers' inputs"] - 2 * x
    assert on_host.to_host - plan.to_host == on_host.to_device - plan.to_device == LAYERS * x
    # "after_backward" keeps the gradients of all blocks in host memory.
    saved = plan.host_bytes - on_host.host_bytes
    assert saved == (1 + LAYERS - 2) * ONE - LAYERS * x


def test_a_step_takes_as_long_as_its_bottleneck():
    ample = dataclasses.replace(GPUS["h100"], flops=1e9, bus=1e30)
    fast = planned(device=ample, bandwidth=1e30)
    assert fast.bottleneck == "compute"
    assert fast.step_s == pytest.approx(fast.seconds["compute"])
    assert fast.hidden == pytest.approx(1)
    steps = {}
    for updates in ("after_backward", "during_backward"):
        slow = planned(device=ample, bandwidth=1e7, updates=updates)
        steps[updates] = slow.step_s
        assert slow.bottleneck == "host"
        assert slow.host_s <= slow.step_s <= slow.host_s + slow.seconds["compute"]
        # A batch that is larger by this factor hides the bottleneck.
        larger = planned(device=ample, bandwidth=1e7 * slow.compute_from, updates=updates)
        assert larger.hidden == pytest.approx(0.95, abs=0.05)
    assert steps["during_backward"] < steps["after_backward"]
    bus = planned(bandwidth=1e30, device=dataclasses.replace(ample, bus=1e5))
    assert bus.bottleneck == "to device"
    assert bus.seconds["to device"] <= bus.step_s
    assert "its bottleneck is to device (compute" in bus.advice
    # A larger batch hides the transfer of weights, but not of inputs, which grow with it.
    device = dataclasses.replace(ample, bus=1e6)
    assert planned(bandwidth=1e30, device=device).compute_from is not None
    assert planned(bandwidth=1e30, device=device, inputs="host").compute_from is None


def test_micro_batches_share_one_fetch():
    whole, parts = planned(), planned(micro_batches=4)
    assert parts.to_device == whole.to_device
    assert parts.seconds["compute"] == pytest.approx(4 * whole.seconds["compute"])
    assert parts.device["layers' inputs"] >= 4 * whole.device["layers' inputs"]
