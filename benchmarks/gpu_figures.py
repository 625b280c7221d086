"""Measures memory, step times and layerwise training of decoders in bf16, for `on_gpu.py`."""

import resource
import sysconfig
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import machine, step_time
from benchmarks import step_time_peers as peers
from benchmarks.on_gpu import Part
from benchmarks.step_time_model import MODELS, Model, Preset, llama, make_model
from benchmarks.step_time_report import LIMIT, Comparison, figures
from tests.comparisons import assert_same_bits
from train.model import vocabulary
from train.run import models
from train.run.by_layer import LayeredModel
from zenflow_jax import layerwise, planning

Parts = dict[str, Callable[[Part], None]]

_TINY = {"width": 32, "heads": 2, "kv_heads": 1, "ffn": 64, "vocabulary": 256}
_REHEARSED = Preset(llama(32, layers=1, **_TINY), 1, 32)
#: The layers of Llama 2 7B, and the sizes of Qwen3-8B.
_7B = {"width": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008}
_8B = {"width": 4096, "layers": 36, "heads": 32, "kv_heads": 8, "ffn": 12288, "vocabulary": 151936}


def text(count: int, batch: int, length: int) -> np.ndarray:
    """Returns batches of text, int32 `(count, batch, length + 1)`; a token is a byte."""
    needed, data = count * batch * (length + 1), bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        data += path.read_bytes() if len(data) < needed else b""
    tokens = np.frombuffer(bytes(data[:needed]), np.uint8).astype(np.int32)
    return tokens.reshape(count, batch, length + 1)


def _stats() -> dict[str, int]:
    """Returns the statistics of jax's device memory; on a CPU, a limit for rehearsals."""
    return jax.devices()[0].memory_stats() or {"bytes_limit": 1_000_000}


def _peaks() -> dict[str, float | None]:
    """Returns this process's peaks, on the host including pinned memory."""
    peak = _stats().get("peak_bytes_in_use")
    host = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"device_gb": peak and peak / 1e9, "host_gb": host / 1e9}


def _planned(plan: planning.Plan) -> dict[str, float]:
    return {"plan_device_gb": plan.device_bytes / 1e9, "plan_host_gb": plan.host_bytes / 1e9}


def memory(_: bool) -> Parts:
    """Returns the speed of copies, and the largest model with AdamW and with zenflow."""
    names = ("adamw", "zenflow-s4-r0.05-streamed")
    return {"copies": _copies} | {x: partial(_grow, peer=peers.PEERS[x]) for x in names}


def _copies(part: Part) -> None:
    """Measures copies between the device and pinned memory."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    pinned, size = device.with_memory_kind("pinned_host"), 2**20 if part.rehearse else 2**30
    x = jnp.ones(size // 4, jnp.float32, device=device)
    y = jax.block_until_ready(jax.device_put(x, pinned))
    out, back = (x, pinned), (y, device)
    copies = {"to host": [out], "to device": [back], "both at once": [out, back]}
    for name, moves in copies.items():
        samples = []
        for _ in range(6):
            start = time.perf_counter()
            jax.block_until_ready([jax.device_put(x, where) for x, where in moves])
            samples.append(time.perf_counter() - start)
        part.note(name, gb_per_s=len(moves) * size / float(np.median(samples[1:])) / 1e9)


def _grow(part: Part, *, peer: peers.Peer) -> None:
    """Trains two small models, and from their needs one near the limit and one beyond it.

    Sizes ascend, because the allocator's peak cannot be reset.
    """
    few, more = (1, 2) if part.rehearse else (2, 4)
    first, second = (np.array(_train(part, peer, layers)) for layers in (few, more))
    of_layer = np.maximum((second - first) / (more - few), 1e-9)
    limits = np.array([_stats()["bytes_limit"], machine.host_bytes() - planning.HOST_RESERVE])
    on_device, on_host = few + (limits - first) / of_layer
    near = max(more + 1, int(0.95 * min(on_device, on_host)))
    scarce = "device" if on_device < on_host else "host"
    part.note("estimate", layers=min(on_device, on_host), outcome=f"limited by {scarce} memory")
    if part.rehearse:  # the same code with more layers
        return
    _train(part, peer, near)
    if scarce == "device":  # the system kills a process that exceeds the host's memory
        _train(part, peer, max(near, int(1.03 * on_device)) + 1)


def _train(part: Part, peer: peers.Peer, layers: int) -> tuple[float, float]:
    """Trains a model for three windows; returns its bytes on device and host."""
    batch, length = (1, 32) if part.rehearse else (4, 1024)
    config = llama(length, layers=layers, **(_TINY if part.rehearse else _7B))
    model = make_model(config, scan_layers=True, remat=True)
    note, plan = partial(part.note, f"{model.parameters:,}"), _plan(peer, model, batch, length)
    note(layers=layers, outcome="began", device_gb=None, host_gb=None, **_planned(plan))
    runner = peers.Runner(peer, model, text(peer.window, batch, length))
    try:
        runner.set_up()
        runner.advance(step_time.WARM_UP * peer.window)
        runner.settle()
        note(outcome=f"trained, loss {float(runner.loss):.3f}")
    except RuntimeError as error:
        # This is XLA's error, or an engine's error that XLA's has caused.
        if "RESOURCE_EXHAUSTED" not in f"{error} {error.__cause__}":
            raise
        note(outcome="out of device memory")
    finally:
        note(**_peaks())
        runner.take_down()
    return _stats().get("peak_bytes_in_use", plan.device_bytes), plan.host_bytes


def _plan(peer: peers.Peer, model: Model, batch: int, length: int) -> planning.Plan:
    """Plans a step's memory; compiles the step, which the runner then takes from jax's cache."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def put(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device)

    # None of these peers parks its state.
    step, arguments = peers.abstract_call(peer, model, batch, length, put, put)
    compiled, gpu = step.lower(*arguments).compile(), planning.gpu_here() or "h100"
    plan = planning.plan(step, *arguments, device=gpu)
    return plan.with_peak(planning.peak_bytes(compiled))


def step_times(rehearse: bool) -> Parts:
    """Returns comparisons of the peers in `step_time_peers.py`, which take turns."""
    written = ("adamw", "zenflow-s4-r0.05", "offload", "parked", "offload-x4")
    # With scanned layers, no work can hide gradients that leave after the scan.
    scanned = ("adamw", "zenflow-s4-r0.05-streamed", "zenflow-s4-r0.05-exchange", "offload")
    # Other tests check the peers' results.
    parts = {"layers scanned": partial(_compare, names=scanned[: 2 if rehearse else None])}
    return parts if rehearse else {"layers written out": partial(_compare, names=written)} | parts


def _compare(part: Part, *, names: tuple[str, ...]) -> None:
    size = "1b" if _stats()["bytes_limit"] > 20e9 else "125m"
    preset = _REHEARSED if part.rehearse else MODELS[size]

    def save(comparison: Comparison) -> None:
        of_peers = figures(comparison)
        limit = of_peers.get(LIMIT)
        for result in comparison.results:
            f = of_peers.get(result.peer, {})
            ratio = f["step_ms"] / limit["step_ms"] if f and limit else None
            outcome = f"{len(result.step_s)} turns" if result.fits else "does not fit"
            part.note(result.peer, outcome=outcome, ratio_to_adamw=ratio, **f)

    comparison = step_time.compare(
        make_model(preset.config, scan_layers="scanned" in part.name, remat=True),
        [peers.PEERS[name] for name in names],
        batch=preset.batch,
        length=preset.length,
        vocabulary=preset.config.vocabulary,
        rounds=1 if part.rehearse else 5,
        steps=4 if part.rehearse else 16,  # whole windows for every peer
        save=save,
        until=part.until - 2,
    )
    assert figures(comparison), "No peer completed a turn. Keep compiled programs, and run again."


_OPTIMIZERS = {
    "adamw": optax.adamw(peers.LEARNING_RATE, weight_decay=peers.WEIGHT_DECAY),
    "lion": optax.lion(peers.LEARNING_RATE, weight_decay=peers.WEIGHT_DECAY),
}
#: Without clipping, these have the same bits.
_VARIANTS: dict[str, dict[str, Any]] = {
    "after_backward": {},
    "during_backward": {"updates": "during_backward"},
    "inputs on the host": {"updates": "during_backward", "inputs": "host"},
}
#: Relative tolerances for losses and for a leaf's change, because bf16 products are computed in
#: another order. Assumed, not measured on a GPU; lost or doubled updates differ by more.
_OF_LOSS, _OF_CHANGE = 1e-2, 0.3


def layerwise_parts(rehearse: bool) -> Parts:
    """Returns comparisons with optax at 134 M parameters, and step times at two sizes."""
    sizes = {"1.1 B": MODELS["1b"], "8.2 B": Preset(llama(1024, **_8B), 8, 1024)}
    names = [*_OPTIMIZERS][: 1 if rehearse else None]
    losses: Parts = {f"losses with {name}": partial(_agree, name=name) for name in names}
    return losses | {
        f"{size}, {updates}": partial(_time, preset=preset, updates=updates)
        for size, preset in ({"tiny": _REHEARSED} if rehearse else sizes).items()
        for updates in ("during_backward", "after_backward")
    }


def _agree(part: Part, *, name: str) -> None:
    """Trains from the same weights with optax, layer by layer with clipping, and in variants."""
    preset, tx = _REHEARSED if part.rehearse else MODELS["125m"], _OPTIMIZERS[name]
    model = make_model(preset.config, scan_layers=False, remat=True)
    tokens = text(6, preset.batch, preset.length)
    whole = optax.chain(optax.clip_by_global_norm(peers.MAX_GRAD_NORM), tx)
    runner, losses = peers.Runner(peers.Peer(name, partial(peers.adamw, whole)), model, tokens), []
    runner.set_up()
    start = jax.device_get(jax.tree.leaves(runner.params))
    for _ in tokens:
        runner.advance(1)
        losses.append(float(runner.loss))
    ends = {"optax": (losses, jax.device_get(jax.tree.leaves(runner.params)))}
    runner.take_down()
    variants = {"clipped": {"max_grad_norm": peers.MAX_GRAD_NORM}} | _VARIANTS
    for variant, options in list(variants.items())[: 3 if part.rehearse else None]:
        ends[variant] = _train_layers(model, tokens, tx, **options)
        part.note(variant, losses=ends[variant][0])
    of_loss, of_change = differences(ends["clipped"], ends["optax"], start)
    part.note("optax", losses=losses, losses_apart=of_loss, changes_apart=of_change)
    assert of_loss <= _OF_LOSS, of_loss
    assert of_change <= _OF_CHANGE, of_change
    for variant in [x for x in ends if x in _VARIANTS]:
        assert_same_bits(ends[variant], ends["after_backward"])
        part.note(variant, same_bits=True)


def differences(end: Any, expected: Any, start: list[np.ndarray]) -> tuple[float, float]:
    """Returns the largest relative difference of losses, and of a leaf's change; NaN if any is."""

    def apart(x: np.ndarray, y: np.ndarray) -> float:
        return float(np.linalg.norm(np.float32(x) - np.float32(y)))

    leaves = zip(end[1], expected[1], start, strict=True)
    of_change = [apart(x, y) / apart(y, z) for x, y, z in leaves]
    return float(np.abs(np.divide(end[0], expected[0]) - 1).max()), float(np.max(of_change))


def _train_layers(
    model: Model, tokens: np.ndarray, tx: optax.GradientTransformation, **options: Any
) -> tuple[list[float], list[np.ndarray]]:
    """Returns the losses, and the weights at the end."""
    (layered, functions), params = _layered(model), model.draw()
    blocks = params.pop("blocks")
    weights = layered.divide(params, (blocks.pop(i) for i in range(layered.blocks)))
    with layerwise.Trainer(weights, **functions, optimizer=tx, **options) as trainer:
        losses = [float(trainer.step({"tokens": batch})) for batch in tokens]
        return losses, jax.device_get(list(layered.whole(trainer.params())[1]))


def _layered(model: Model) -> tuple[LayeredModel, dict[str, Any]]:
    """Returns a model for the trainer, and the trainer's arguments for its functions."""
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: where, model.shapes)
    layered = models.layered_shapes(model.graphdef, model.shapes, shardings)
    return layered, layered.functions


def _time(part: Part, *, preset: Preset, updates: str) -> None:
    """Times steps of layerwise AdamW, beside the plan's figures.

    By default, and with enough `in_flight_bytes` to hide a layer's state behind the backward pass.
    """
    parts = vocabulary.parts_of(preset.config.vocabulary)
    model = make_model(preset.config, scan_layers=False, remat=False, parts=parts)
    layered, functions = _layered(model)
    outer, layers = layered.shapes["outer"], layered.shapes["layers"]
    batch = {"tokens": text(1, preset.batch, preset.length)[0]}
    # The masters' other 16 bits, and two moments.
    state = 10 * max(sum(x.size for x in jax.tree.leaves(tree)) for tree in layers)
    cases = {"default": None, "a layer's state hidden": 5 * state // 2}
    for case, in_flight in list(cases.items())[: 2 if "during" in updates else 1]:
        options: dict[str, Any] = {"updates": updates, "in_flight_bytes": in_flight, **functions}
        options["optimizer"] = _OPTIMIZERS["adamw"]
        gpu = planning.gpu_here() or "h100"
        plan = planning.plan_layerwise(layered.shapes, batch, device=gpu, **options)
        plan = replace(plan, host_capacity_bytes=machine.host_bytes())
        note = partial(part.note, case, plan_step_s=plan.step_s, **_planned(plan))
        note(outcome=f"lacks memory: {', '.join(plan.short)}" if plan.short else "began")
        if plan.short:
            continue
        times, loss = [], 0.0
        weights = {"outer": _drawn(outer), "layers": map(_drawn, layers)}  # one at a time
        with layerwise.Trainer(weights, **options) as trainer:
            for _ in range(3 if part.rehearse else 6):
                begin = time.perf_counter()
                loss = float(trainer.step(batch))
                times.append(time.perf_counter() - begin)
        step_s = float(np.median(times[2:]))
        rate = preset.batch * preset.length / step_s
        note(outcome=f"loss {loss:.3f}", step_s=step_s, tokens_per_s=rate, times=times, **_peaks())


def _drawn(shapes: Any) -> Any:
    """Returns small random weights."""
    keys = {x: jax.device_put(jax.random.key(0), x.sharding) for x in jax.tree.leaves(shapes)}
    return jax.tree.map(lambda x: 0.02 * jax.random.normal(keys[x], x.shape, x.dtype), shapes)
