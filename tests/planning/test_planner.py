"""Plans, compared with XLA, with engines, and with runs with the same settings."""

import dataclasses
import functools
import re

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
from zenflow_jax.planning import GPUS, INSTALL, TEMPORARIES, gpu_of_kind, peak_bytes
from zenflow_jax.planning._host_work import needs_of
from zenflow_jax.planning._steps import products

pytestmark = pytest.mark.usefixtures("as_scripts_run")


def settings_of(model, **changes):
    task = "classification" if model == "bert" else "language"
    return train_settings.Settings(
        **{"task": task, "model": str(FIXTURES / model), "data": "none", "batch_size": 2} | changes
    )


def test_products_in_loops_count_for_every_iteration_and_convolutions_by_their_window():
    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

    def convolution(x, w):
        dimensions = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dimensions)

    def products_of(f, *shapes):
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return products(jax.jit(f).trace(*arrays).jaxpr.jaxpr)

    flops, moved_bytes = products_of(jax.value_and_grad(loss), (10, 512, 512), (2048, 512))
    # With the backward pass. TF32 has half of the rate of bfloat16.
    assert flops == 2 * 3 * 10 * 2 * 2048 * 512**2
    assert moved_bytes == 3 * 10 * 4 * (2 * 2048 * 512 + 512**2)
    flops, _ = products_of(convolution, (2, 8, 8, 3), (5, 5, 3, 16))
    assert flops == 2 * 2 * (2 * 8 * 8 * 16) * 5 * 5 * 3
    unused, _ = products_of(lambda x: (x @ x, x)[1], (8, 8))
    assert unused == 0


def test_ragged_products_count_all_rows_for_each_group():
    def loss(x, w, sizes):
        return jnp.sum(jax.lax.ragged_dot(x, w, sizes).astype(jnp.float32))

    m, k, n, groups = 64, 32, 16, 4
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((m, k), (groups, k, n)))
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    traced = jax.jit(jax.grad(loss, (0, 1))).trace(x, w, sizes)
    # The gradients of rows and of weights, which need no products of the forward pass.
    assert products(traced.jaxpr.jaxpr)[0] == 2 * 2 * m * k * n * groups
    traced = jax.jit(loss).trace(x, w, sizes)
    assert products(traced.jaxpr.jaxpr)[0] == 2 * m * k * n * groups


def test_a_plan_matches_the_compiled_steps_arguments_and_xlas_peak():
    settings = settings_of("llama3", scan_layers=True, sequence_length=8)
    planned = planned_step(settings, folder_of_config(settings.model), None)
    compiled = planned.step.lower(*planned[1:]).compile()
    memory = compiled.memory_analysis()
    by_shapes = library.plan(*planned)
    batch = sum(x.size * 4 for x in jax.tree.leaves(planned.batch))
    state = by_shapes.device["weights"] + by_shapes.device["optimizer state"]
    # Both are the step's arguments, except counts that no step reads.
    assert state + batch == pytest.approx(memory.argument_size_in_bytes, rel=0.01)
    plan = library.plan(*planned, compiled=compiled)
    engine = plan.device.get("uploads", 0) + plan.device.get("mail under way", 0)
    assert plan.device_bytes - engine == peak_bytes(compiled)
    assert (by_shapes.by, plan.by) == ("shapes", "compiler")
    assert TEMPORARIES not in by_shapes.device
    assert f"which the plan includes after {INSTALL}" in verdict(by_shapes)
    assert "without" not in verdict(plan)


def test_a_plan_uses_the_engines_formulas_and_a_checkpoints_arrays():
    host_state = "compact"
    with Training(FEW, Settings(update_interval=3)) as training:
        training.go(2)
        saved = training.engine.state()["leaves"]
        state = training.state

        def step(params, opt_state):
            return params, opt_state

        plan = library.plan(jax.jit(step), training.params, state, host_state=host_state)
    need = needs_of(state, host_state=host_state)
    parts = (need.state, need.sums, need.mail, need.hand_over, need.hand_over)
    assert list(plan.host.values()) == [*parts, need.saving]
    assert plan.host_bytes == sum(parts) + need.saving
    assert plan.device["uploads"] == needs_of(state).uploads
    blank = jax.tree.leaves((state.mail, state.step_scalars))
    on_device = {id(x): x.nbytes for x in jax.tree.leaves((training.params, state))}
    arrays = sum(on_device.values()) - sum({id(x): x.nbytes for x in blank}.values())
    kept = sum(x.nbytes for leaf in saved for name, x in leaf.items() if name != "before")
    assert plan.checkpoint == pytest.approx(arrays + kept, rel=0.02)


def test_the_peak_excludes_late_uploads_and_loops_wait_for_them():
    plan, late = (library.plan(*step_of("zenflow"), prefetch_bytes=x) for x in (None, 0))
    assert (late.device["uploads"], late.late, plan.late) == (0, plan.device["uploads"], 0)
    assert late.exposed_s == pytest.approx(late.to_device / late.gpu.bus, rel=1e-3)
    assert plan.exposed_s == 0
    assert late.busiest_s == plan.busiest_s
    # A boundary needs weights, state and uploads; a step may need more or less.
    assert late.device_bytes == plan.device_bytes
    step = plan.device_bytes - plan.device["uploads"]
    assert late.with_peak(step + 8).device_bytes == late.device_bytes
    assert late.with_peak(step + late.late + 8).device_bytes == step + late.late + 8


def test_the_hosts_work_matches_the_log_and_its_available_time_matches_the_staleness():
    def work(window=4, leaves=8, **options):
        params = [jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)] * leaves
        if "staleness" in options:
            options["staleness"] = min(options["staleness"], window)
        tx = zenflow_jax.zenflow(1e-3, topk_ratio=0.0, update_interval=window, **options)
        return needs_of(zenflow_jax.find_state(tx.init(params)))

    # An update takes 26 bytes, each step's mail of four 2 on arrival and 2 when read, the upload 2.
    in_turn, together = work(), work(rolling=False)
    assert in_turn.mean == in_turn.busiest == 8 * 64**2 * ((24 + 2) / 4 + 2 + 2)
    assert work(16).mean < in_turn.mean
    assert together.busiest == 4 * together.mean
    for options, steps in (
        ({}, [1, 1, 1]),
        ({"leaves": 1}, [1, 1, 1]),
        ({"rolling": False}, [1, 4, 16]),
        ({"staleness": 3}, [1, 3, 3]),
        ({"rolling": False, "staleness": 3}, [1, 3, 3]),
        ({"rolling": False, "staleness": 0}, [1, 1, 1]),
    ):
        assert [work(window, **options).steps for window in (1, 4, 16)] == steps, options


@functools.cache
def step_of(optimizer):
    settings = settings_of("llama3", sequence_length=16, optimizer=optimizer)
    return planned_step(settings, folder_of_config(settings.model), None)


def planned(bandwidth, optimizer="zenflow"):
    return library.plan(*step_of(optimizer), bandwidth=bandwidth)


@pytest.mark.slow
def test_the_load_on_the_host_follows_its_bandwidth():
    fast, slow = (library.plan(*step_of("zenflow"), bandwidth=x) for x in (1e15, 1e3))
    assert fast.busiest_s < 1e-3 * fast.step_s
    # Transfers do not depend on the host bandwidth, and are large for a step this small.
    assert fast.step_s == max(fast.seconds["to device"], fast.seconds["to host"])
    assert slow.hidden < 0.01
    assert slow.step_s == slow.host_s
    # A batch that is larger by this factor hides the host's work.
    assert slow.busiest_s == pytest.approx(slow.compute_from * slow.seconds["compute"])
    offload = library.plan(*step_of("offload"), bandwidth=1e6)
    assert offload.exposed_s == offload.host_s
    assert offload.step_s == offload.seconds["compute"] + offload.host_s
    # The host's work is never hidden, whatever the batch.
    assert "s are never hidden" in verdict(offload)


def test_a_plan_names_every_shortage_and_nothing_else():
    small = dataclasses.replace(GPUS["h100"], memory=1000)
    plan = library.plan(*step_of("zenflow"), device=small, host_memory_bytes=1000)
    both = (
        r"Does not fit: the device is [^()]* short \(needs [^ ]* GB{}, [^()]*\) and the host is "
        r"[^()]* short \([^()]*\)\."
    )
    assert re.fullmatch(both.format(" without gradients and activations"), verdict(plan))
    assert re.fullmatch(both.format(""), verdict(plan.with_peak(2000)))


def test_gpus_are_recognized_by_driver_names_and_host_memory_grows_with_their_number(monkeypatch):
    assert GPUS["h100"].host_beside(8) == (4 * 100e9, 8 * 256 * 10**9)
    assert GPUS["rtx4090"].host_beside(8) == (50e9, 128 * 10**9)
    assert all(gpu_of_kind(gpu.name) is gpu for gpu in GPUS.values())
    assert gpu_of_kind("NVIDIA A100-PCIE-80GB") is GPUS["a100"]
    assert gpu_of_kind("NVIDIA GeForce RTX 3080") is None
    assert library.gpu_here() is None

    def no_backend():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "local_devices", no_backend)
    assert library.gpu_here() is None


def test_an_unknown_device_or_host_state_and_a_step_without_jit_are_rejected():
    params = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    opt_state = zenflow_jax.zenflow(1e-3).init(params)
    step = jax.jit(lambda p, s: (p, s))
    for options, match in (
        ({"host_state": "Compact"}, "must be one of 'float32', 'compact', got 'Compact'"),
        ({"prefetch_bytes": -1}, "`prefetch_bytes` must be .*got -1"),
        ({"device": "v100"}, "must be one of h100, .*got 'v100'"),
    ):
        with pytest.raises(ValueError, match=match):
            library.plan(step, params, opt_state, **options)
    with pytest.raises(TypeError, match="`step` is a function"):
        library.plan(lambda p, s: (p, s), params, opt_state)
