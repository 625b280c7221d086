"""Plans of `layerwise.Trainer`, compared with a trainer's memory and transfers."""

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import zenflow_jax
from zenflow_jax import layerwise
from zenflow_jax import planning as library
from zenflow_jax.layerwise import _blocks, _dispatch, _transfers
from zenflow_jax.planning import GPUS, TEMPORARIES

pytestmark = pytest.mark.usefixtures("as_scripts_run")

WIDTH, ROWS, LAYERS = 256, 32, 5
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


def planned(batch=BATCH, **options):
    options = {"optimizer": optax.adamw(1e-3)} | options
    return library.plan_layerwise(params(), batch, **MODEL, **options)


OPTIMIZERS = {
    "adamw": (optax.adamw(1e-3), 12),
    "compact": (zenflow_jax.compact(optax.adamw(1e-3)), 6.19),
    "muon": (optax.contrib.muon(1e-3), 8),
    "sgd": (optax.sgd(1e-3), 4),
}


@pytest.mark.parametrize(
    ("name", "updates"),
    [*((name, "during_backward") for name in OPTIMIZERS), ("adamw", "after_backward")],
)
def test_state_and_bytes_on_the_bus_equal_a_trainers(monkeypatch, name, updates):
    optimizer, per_parameter = OPTIMIZERS[name]
    sent = Counter[str]()

    def counted(kind, arrays):
        new = _transfers.moved(kind, arrays)
        sent[kind] += sum(x.nbytes for x, y in zip(new, arrays, strict=True) if x is not y)
        return new

    for module in (_blocks, _dispatch):
        monkeypatch.setattr(module, "moved", counted)
    for inputs, in_flight_bytes in (("device", 5 * ONE), ("host", 12 * ONE)):
        options: Any = {"optimizer": optimizer, "updates": updates, "inputs": inputs}
        options["in_flight_bytes"] = in_flight_bytes
        with layerwise.Trainer(params(), **MODEL, **options) as trainer:
            sent.clear()
            trainer.step(BATCH)
            arrays = jax.tree.leaves(trainer.state()["leaves"])
        plan = planned(**options)
        at_rest = sum(x.nbytes for x in arrays)
        assert plan.host["weights and state, pinned"] == at_rest
        # A trainer does not move counts.
        assert sent["device"] == pytest.approx(plan.to_device, rel=1e-4)
        assert sent["pinned_host"] == pytest.approx(plan.to_host, rel=1e-4)
    assert at_rest == plan.checkpoint == pytest.approx(per_parameter * plan.parameters, rel=1e-3)
    sends = updates == "after_backward"
    inputs = LAYERS * BATCH.nbytes
    pinned = library.pinned_bytes(params(), optimizer, gradients=sends)
    assert pinned == at_rest + 2 * sends * plan.parameters
    assert plan.pinned - inputs == pinned


def test_the_device_holds_three_layers_two_gradients_and_inputs_that_are_not_on_the_host():
    options: Any = {"updates": "during_backward", "in_flight_bytes": 7 * ONE}
    plan, compiled = planned(**options), planned(**options, compiles=True)
    # This is in addition to the outer weights, whose gradient `last` does not make.
    assert plan.device["weights"] == 4 * ONE
    assert plan.device["gradients of weights"] == 2 * ONE
    assert plan.device["updates in flight"] == 7 * ONE
    assert compiled.device_bytes == plan.device_bytes + compiled.device[TEMPORARIES]
    on_host = planned(**options, inputs="host")
    x = BATCH.nbytes
    # Above the fullest moment, the last layer has been updated.
    assert plan.device["layers' inputs"] == (LAYERS - 1 + 1) * x
    assert on_host.device["layers' inputs"] == (3 + 1) * x
    assert on_host.to_host - plan.to_host == on_host.to_device - plan.to_device == LAYERS * x
    after = planned(in_flight_bytes=7 * ONE)
    assert after.host["gradients, pinned"] == (1 + LAYERS) * ONE
    assert after.device["updates in flight"] == 7 * ONE
    # A sum over micro-batches is float32.
    several = planned(**options, micro_batches=4)
    assert several.device["gradients of weights"] == 4 * ONE
    assert several.device["layers' inputs"] == 4 * plan.device["layers' inputs"]


def test_a_step_takes_as_long_as_its_bottleneck_and_the_copies_that_nothing_hides():
    slow = dataclasses.replace(GPUS["h100"], flops=1e9, bus=1e30)
    fast = planned(device=slow)
    assert fast.step_s == fast.seconds["compute"]
    assert dataclasses.replace(fast, efficiency=0.8).step_s == pytest.approx(fast.step_s / 2)
    device = dataclasses.replace(slow, bus=1e5)
    hidden = planned(device=device, updates="during_backward", in_flight_bytes=100 * ONE)
    assert (hidden.step_s, hidden.exposed) == (hidden.to_device / 1e5, 0)
    # The 10 bytes for each parameter arrive too late if they exceed two fifths of those in flight.
    exposed = []
    for in_flight in (26, 24):
        options = {"updates": "during_backward", "in_flight_bytes": in_flight * ONE // 2}
        exposed.append(planned(device=device, **options).exposed)
    assert exposed == [0, pytest.approx((1 + LAYERS) * 10 * ONE // 2, rel=1e-3)]
    # SGD's 2 bytes come early, but the last layer's 4 need the room; the outer weights' hide later.
    options |= {"optimizer": optax.sgd(1e-3), "in_flight_bytes": 5 * ONE // 2}
    assert planned(device=device, **options).exposed == LAYERS * 3 * ONE // 2
    # The second sweep fetches weights, gradients and state.
    swept = (1 + LAYERS) * 7 * ONE
    assert planned(device=device).exposed == pytest.approx(swept, rel=1e-3)


def test_micro_batches_share_one_fetch_and_updates_count_their_products():
    whole, parts = planned(), planned(micro_batches=4)
    assert (parts.to_device, parts.flops) == (whole.to_device, 4 * whole.flops)
    muon = planned(optimizer=optax.contrib.muon(1e-3))
    # Each of five steps needs three products of a matrix, in float32 at half of the rate.
    assert muon.flops - whole.flops == 2 * 2 * 5 * 3 * (1 + LAYERS) * WIDTH**3
