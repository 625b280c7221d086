"""Does `layerwise.Trainer` match AdamW, and how long does a step take?

A decoder is trained for the same steps with the peer `adamw`, which keeps float32 masters on the
device, and with each variant of the trainer. Variants without clipping must be bit-identical to
each other. Steps are then timed at 1.1 billion parameters, and at 8.2 billion if host memory
allows, and compared with the plan.
"""

import statistics
import time
from typing import Any

import jax
import numpy as np
import optax

from benchmarks import machine
from benchmarks.gpu_stages import sizes
from benchmarks.gpu_stages.device import host_peak_bytes, peak_bytes, require_gpu
from benchmarks.gpu_stages.headline import batches
from benchmarks.gpu_stages.notes import Stage, table
from benchmarks.gpu_stages.ways import End, compared, end_of
from benchmarks.step_time_model import MODELS, Model, Preset, llama, make_model
from benchmarks.step_time_peers import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    PEERS,
    WEIGHT_DECAY,
    Runner,
)
from train.model import vocabulary
from train.run import models
from train.run.by_layer import LayeredModel
from zenflow_jax import layerwise, planning

#: The sizes of Qwen3-8B.
_8B = {"width": 4096, "layers": 36, "heads": 32, "kv_heads": 8, "ffn": 12288, "vocabulary": 151936}
_TIMED = (MODELS["1b"], Preset(llama(1024, **_8B), 8, 1024))
_STEPS, _TIMED_STEPS = 6, 4
#: Assumed: host bytes per parameter, and total seconds per billion parameters.
_HOST = {"during_backward": 12.5, "after_backward": 14.5}
_MAKE_S = 10.0
_ADAMW = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
_HEADER = ["parameters", "updates", "steps, s", "planned", "tokens/s", "device, GB", "host, GB"]
#: The first variant is compared with AdamW; the others, which do not clip, with the second.
_CLIPPED = {"max_grad_norm": MAX_GRAD_NORM}
_VARIANTS: dict[str, dict[str, Any]] = {
    "after_backward, clipped": _CLIPPED,
    "after_backward": {},
    "during_backward": {"updates": "during_backward"},
    "during_backward, inputs on the host": {"updates": "during_backward", "inputs": "host"},
}


def run(stage: Stage) -> None:
    device = require_gpu(stage)
    preset = sizes.preset_of(True) if stage.rehearse else MODELS["125m"]
    failed = _compare(stage, preset)
    rows: list[tuple[str, ...]] = []
    for timed in (preset,) if stage.rehearse else _TIMED:
        for updates, per_parameter in _HOST.items():
            n = sizes.parameters(timed.config)
            has_room = per_parameter * n + sizes.HOST_RESERVE < machine.host_bytes()
            if stage.rehearse or (has_room and stage.left > _MAKE_S * n / 1e9):
                rows.append(_time(timed, updates, device))
            else:
                rows.append((f"{n:,}", updates, *["not run: too little memory or time"] * 5))
            stage.notes.put("Seconds per step, and peaks so far", table(_HEADER, rows))
            stage.notes.keep(times=rows)
    if failed:
        raise AssertionError(f"{len(failed)} failed; the first was {failed[0]}")


def _compare(stage: Stage, preset: Preset) -> list[str]:
    """Trains a model from the same weights with each variant, and returns the failures."""
    model = make_model(preset.config, scan_layers=False, remat=True)
    tokens = batches(_STEPS, preset.batch, preset.length) % preset.config.vocabulary
    runner = Runner(PEERS["adamw"], model, tokens)
    runner.set_up()
    start = end_of([], 0.0, runner.params).samples
    losses = []
    for _ in tokens:
        runner.advance(1)
        losses.append(float(runner.loss))
    ends = {"adamw": end_of(losses, 0.0, runner.params)}
    runner.take_down()
    rows: list[tuple[Any, ...]] = [("adamw", np.round(losses, 4), "")]
    for name, options in _VARIANTS.items():
        ends[name] = _train(model, tokens, options)
        exact = options is not _CLIPPED
        first = ends["after_backward" if exact else "adamw"]
        verdict = compared(ends[name], first, start, must_be_same=exact)
        verdict = "" if first is ends[name] else verdict
        rows.append((name, np.round(ends[name].losses, 4), verdict))
        header = ["variant", "losses", "compared with AdamW, or `after_backward`"]
        stage.notes.put(f"{model.parameters:,} parameters", table(header, rows))
        stage.notes.keep(ways=[(name, list(losses), verdict) for name, losses, verdict in rows])
    return [f"{name}: {verdict}" for name, _, verdict in rows if verdict.startswith("FAILED")]


def layered_of(model: Model) -> LayeredModel:
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: where, model.shapes)
    return models.layered_shapes(model.graphdef, model.shapes, shardings)


def new_trainer(layered: LayeredModel, weights: Any, **options: Any) -> layerwise.Trainer:
    functions = {"first": layered.first, "layer": layered.layers, "last": layered.last}
    return layerwise.Trainer(weights, **functions, optimizer=_ADAMW, **options)


def drawn(model: Model, layered: LayeredModel) -> dict[str, Any]:
    """Returns a model's initial weights for the trainer, which frees blocks one by one."""
    params = model.draw()
    blocks = params.pop("blocks")
    return layered.divide(params, (blocks.pop(i) for i in range(layered.blocks)))


def _train(model: Model, tokens: np.ndarray, options: Any) -> End:
    layered = layered_of(model)
    with new_trainer(layered, drawn(model, layered), **options) as trainer:
        losses = [float(trainer.step({"tokens": batch})) for batch in tokens]
        new = trainer.params()
    of_layer = {"outer": new["outer"], **dict(enumerate(new["layers"]))}
    return end_of(losses, 0.0, list(layered.leaves(of_layer.__getitem__)))


def _time(preset: Preset, updates: str, device: jax.Device) -> tuple[str, ...]:
    config = preset.config
    parts = vocabulary.parts_of(config.vocabulary)
    model = make_model(config, scan_layers=False, remat=False, parts=parts)
    layered = layered_of(model)
    batch = {"tokens": batches(1, preset.batch, preset.length)[0] % config.vocabulary}
    plan = planning.plan_layerwise(
        layered.shapes,
        batch,
        first=layered.first,
        layer=layered.layers,
        last=layered.last,
        optimizer=_ADAMW,
        updates=updates,
        device=planning.gpu_here() or "h100",
    )
    times, layers = [], map(_drawn, layered.shapes["layers"])  # one at a time on the device
    weights = {"outer": _drawn(layered.shapes["outer"]), "layers": layers}
    with new_trainer(layered, weights, updates=updates) as trainer:
        for _ in range(2 + _TIMED_STEPS):
            begin = time.perf_counter()
            float(trainer.step(batch))
            times.append(time.perf_counter() - begin)
    peak, step_s = peak_bytes(device), statistics.median(times[2:])
    return (
        f"{model.parameters:,}",
        updates,
        ", ".join(f"{x:.3f}" for x in times),
        f"{plan.step_s:.3f}",
        f"{preset.batch * preset.length / step_s:,.0f}",
        "-" if peak is None else f"{peak / 1e9:.2f}",
        f"{host_peak_bytes() / 1e9:.1f}",
    )


def _drawn(shapes: Any) -> Any:
    """Returns weights: small random matrices, vectors of ones."""

    def draw(x: Any) -> jax.Array:
        if x.ndim == 1:
            return jax.numpy.ones(x.shape, x.dtype, device=x.sharding)
        key = jax.device_put(jax.random.key(0), x.sharding)
        return 0.02 * jax.random.normal(key, x.shape, x.dtype)

    return jax.tree.map(draw, shapes)
