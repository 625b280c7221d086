"""Plans, compared with XLA, with engines, and with runs with the same settings."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import zenflow_jax
from tests.hf_models import FIXTURES
from tests.runs import FEW, Settings, Training
from train.cli import settings as train_settings
from train.plan.planning import folder_of_config, planned_step
from train.plan.report import verdict
from zenflow_jax import planning as library
from zenflow_jax.planning import GPUS, INSTALL, peak_bytes
from zenflow_jax.planning._host_work import needs_of
from zenflow_jax.planning._steps import products

pytestmark = pytest.mark.usefixtures("as_scripts_run")


@functools.cache
def step_of(optimizer="zenflow", **changes):
    run = {"task": "language", "model": str(FIXTURES / "llama3"), "data": "none", "batch_size": 2}
    settings = train_settings.Settings(**run, optimizer=optimizer, sequence_length=8, **changes)
    return planned_step(settings, folder_of_config(settings.model), None)


def products_of(f, *shapes, dtype=jnp.float32):
    arrays = [x if hasattr(x, "dtype") else jax.ShapeDtypeStruct(x, dtype) for x in shapes]
    return products(jax.jit(f).trace(*arrays).jaxpr.jaxpr)


def test_products_in_loops_count_for_every_iteration_and_convolutions_by_their_window():
    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

    def convolution(x, w):
        dimensions = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dimensions)

    flops = products_of(jax.value_and_grad(loss), (10, 512, 512), (2048, 512))
    # With the backward pass. TF32 has half of the rate of bfloat16.
    assert flops == 2 * 3 * 10 * 2 * 2048 * 512**2
    flops = products_of(convolution, (2, 8, 8, 3), (5, 5, 3, 16))
    assert flops == 2 * 2 * (2 * 8 * 8 * 16) * 5 * 5 * 3
    unused = products_of(lambda x: (x @ x, x)[1], (8, 8))
    assert unused == 0


def test_ragged_products_count_all_rows_for_each_group():
    def loss(x, w, sizes):
        return jnp.sum(jax.lax.ragged_dot(x, w, sizes).astype(jnp.float32))

    m, k, n, groups = 64, 32, 16, 4
    arguments = (m, k), (groups, k, n), jax.ShapeDtypeStruct((groups,), jnp.int32)
    # The gradients of rows and of weights need no products of the forward pass.
    for f, count in ((jax.grad(loss, (0, 1)), 2), (loss, 1)):
        flops = products_of(f, *arguments, dtype=jnp.bfloat16)
        assert flops == count * 2 * m * k * n * groups


def test_a_plan_matches_the_compiled_steps_arguments_and_xlas_peak():
    planned = step_of(scan_layers=True)
    compiled = planned.step.lower(*planned[1:]).compile()
    memory = compiled.memory_analysis()
    by_shapes = library.plan(*planned)
    batch = sum(x.size * 4 for x in jax.tree.leaves(planned.batch))
    state = by_shapes.device["weights"] + by_shapes.device["optimizer state"]
    # Both are the step's arguments, except counts that no step reads.
    assert state + batch == pytest.approx(memory.argument_size_in_bytes, rel=0.01)
    plan = by_shapes.with_peak(peak_bytes(compiled))
    engine = plan.device.get("uploads", 0) + plan.device.get("mail under way", 0)
    assert plan.device_bytes - engine == peak_bytes(compiled)
    assert f"which the plan includes after {INSTALL}" in verdict(by_shapes)
    assert "without" not in verdict(plan)


def test_a_plan_uses_the_engines_formulas_and_a_checkpoints_arrays():
    with Training(FEW, Settings(update_interval=3)) as training:
        training.go(2)
        saved = training.engine.state()["leaves"]
        state = training.state
        step = jax.jit(lambda params, opt_state: (params, opt_state))
        plan = library.plan(step, training.params, state, host_state="compact")
    assert plan.host == needs_of(state, host_state="compact")["host"]
    assert plan.device["uploads"] == needs_of(state)["device"]["uploads"]
    blank = jax.tree.leaves((state.mail, state.step_scalars))
    on_device = {id(x): x.nbytes for x in jax.tree.leaves((training.params, state))}
    arrays = sum(on_device.values()) - sum({id(x): x.nbytes for x in blank}.values())
    kept = sum(x.nbytes for leaf in saved for name, x in leaf.items() if name != "before")
    assert plan.checkpoint == pytest.approx(arrays + kept, rel=0.02)


def test_a_step_takes_as_long_as_its_slowest_resource():
    plan, offload = library.plan(*step_of()), library.plan(*step_of("offload"))
    fast, slow = (dataclasses.replace(plan, host_bandwidth=x) for x in (1e15, 1e3))
    # Transfers are large for a step this small.
    assert fast.step_s == max(fast.seconds["to device"], fast.seconds["to host"])
    assert slow.step_s == slow.seconds["host"] == slow.host_work / 1e3
    # A step waits for the host's work, whatever the batch.
    offload = dataclasses.replace(offload, host_bandwidth=1e6)
    assert offload.step_s == offload.seconds["compute"] + offload.seconds["host"]


@pytest.mark.parametrize(("rolling", "sums"), [(True, 0), (False, 16)])
def test_the_hosts_work_is_counted_in_bytes(rolling, sums):
    params = [jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)] * 8
    tx = zenflow_jax.zenflow(1e-3, topk_ratio=0.0, update_interval=4, rolling=rolling)
    work = needs_of(zenflow_jax.find_state(tx.init(params)))["host_work"]
    # An update takes 26 bytes, each step's mail 2 on arrival and 2 when read, and an upload 2.
    # Without scaling, the mean gradient's two sums take 16 more.
    assert work == 8 * 64**2 * ((24 + 2 + sums) / 4 + 2 + 2)


def test_gpus_are_recognized_by_driver_names_and_host_memory_grows_with_their_number(monkeypatch):
    assert GPUS["h100"].host_beside(8) == (4 * 100e9, 8 * 256 * 10**9)
    assert GPUS["rtx4090"].host_beside(8) == (50e9, 128 * 10**9)
    assert library.gpu_here() is None

    class Device:
        device_kind = ""

    monkeypatch.setattr(jax, "local_devices", lambda: [Device])
    names = {gpu.name: gpu for gpu in GPUS.values()}
    names |= {"NVIDIA A100-PCIE-80GB": GPUS["a100"], "NVIDIA GeForce RTX 3080": None}
    for Device.device_kind, gpu in names.items():
        assert library.gpu_here() is gpu
