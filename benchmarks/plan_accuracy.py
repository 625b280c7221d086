"""How far is a plan by formula from what the compiler says of the same step?

    python -m benchmarks.plan_accuracy
    python -m benchmarks.plan_accuracy --mesh data=8 --mesh fsdp=8
    python -m benchmarks.plan_accuracy --written

Compiles the script's training steps for a described NVIDIA H200, which need not be there: `pip
install "jax[cuda12]"` is enough. Prints for each the peak of one device without what an engine has
there, by XLA and by formula. Models have the sizes of those that their names say, some with fewer
layers. Answers: `benchmarks/LOG.md`.
"""

import argparse
import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import jax

import zenflow_jax
from train.decoder import DecoderConfig
from train.encoder import EncoderConfig
from train.planned_step import planned_step
from train.planning import mesh_of
from train.pretrained import Pretrained
from train.settings import Settings
from zenflow_jax._planner.compiled import peak_bytes

_LLAMA = DecoderConfig(
    vocabulary=32000,
    width=2048,
    layers=16,
    heads=16,
    kv_heads=16,
    head_width=128,
    ffn=5632,
    positions=4096,
    norm_eps=1e-5,
    rope_base=1e4,
    rope_scaling=None,
    qkv_bias=False,
    tied=False,
    window=None,
    qk_norm=False,
)
_GROUPED = {"kv_heads": 8, "head_width": 64}
MODELS = {
    "Llama, 0.95 B": _LLAMA,
    "Llama 3.2, 1.2 B": _LLAMA._replace(
        vocabulary=128256, heads=32, ffn=8192, tied=True, **_GROUPED
    ),
    "Qwen 2, 0.49 B": _LLAMA._replace(
        **{"vocabulary": 151936, "width": 896, "layers": 24, "heads": 14, "kv_heads": 2},
        **{"head_width": 64, "ffn": 4864, "tied": True, "qkv_bias": True},
    ),
    "Mistral, 8 layers, 2.0 B": _LLAMA._replace(
        width=4096, layers=8, heads=32, kv_heads=8, ffn=14336, window=512
    ),
    "BERT large, 0.34 B": EncoderConfig(30522, 1024, 24, 16, 4096, 512, 2, 1e-12),
}
BASE = Settings(
    task="language",
    model="x",
    data="x",
    steps=1000,
    dtype="bfloat16",
    max_grad_norm=1.0,
    topk_ratio=0.05,
    remat=True,
    scan_layers=True,
    batch_size=4,
    sequence_length=1024,
)


def cases(written: bool) -> list[tuple[str, Settings]]:
    """Models, each with the settings of a run."""
    base = dataclasses.replace(BASE, scan_layers=not written)
    found = [(name, base) for name in MODELS if "BERT" not in name]
    bert = dataclasses.replace(base, batch_size=32, sequence_length=128)
    found.append(("BERT large, 0.34 B", bert))
    llama = "Llama, 0.95 B"
    found += [(llama, dataclasses.replace(base, optimizer=x)) for x in ("adamw", "offload")]
    found += [(name, dataclasses.replace(x, remat=False)) for name, x in found[:6]]
    if not written:
        others = (
            {"batch_size": 1},
            {"batch_size": 16},
            {"batch_size": 2, "sequence_length": 4096},
            {"batch_size": 16, "micro_batches": 4},
            {"send_gradients": "after_step"},
            {"send_gradients": "per_window"},
        )
        found += [(llama, dataclasses.replace(base, **x)) for x in others]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", action="append", help="as the script takes it; may be repeated")
    parser.add_argument("--written", action="store_true", help="blocks written out, not scanned")
    parser.add_argument("--only", default="", help="cases whose line has this text")
    asked = parser.parse_args()
    print(f"jax {jax.__version__}, compiled for an H200; GB of one device, without the engine's")
    for mesh in asked.mesh or [None]:
        for name, settings in cases(asked.written):
            line = f"{name:24} {_described(settings)}{f', {mesh}' if mesh else ''}"
            if mesh and (not settings.remat or settings.batch_size not in (4, 32)):
                continue
            if asked.only not in line:
                continue
            one(line, name, dataclasses.replace(settings, mesh=mesh))


def one(line: str, name: str, settings: Settings) -> None:
    """Prints a row; with a mesh the batch is that of each device."""
    config = MODELS[name]
    kind = "encoder" if isinstance(config, EncoderConfig) else "decoder"
    origin = Pretrained(Path("x"), kind, config, {}, None, {})
    devices = math.prod(int(x.partition("=")[2]) for x in (settings.mesh or "data=1").split(","))
    settings = dataclasses.replace(settings, batch_size=settings.batch_size * devices)
    start = time.perf_counter()
    here = mesh_of(settings, "h200", described=False)
    plan = zenflow_jax.plan(*planned_step(settings, origin, here), device="h200")
    planning_s = time.perf_counter() - start
    there = mesh_of(settings, "h200", described=True)
    planned = planned_step(settings, origin, there, placed=True)
    step: Any = planned.step
    peak, _ = peak_bytes(step.lower(*planned[1:]).compile())
    of_engine = sum(plan.device.get(name, 0) for name in ("uploads", "mail under way"))
    formula = plan.device_bytes - of_engine
    took = f"{planning_s:5.1f} s, {time.perf_counter() - start - planning_s:5.1f} s"
    off = formula / peak - 1
    print(f"{line:76} {peak / 1e9:7.2f} {formula / 1e9:7.2f} {off:+7.1%}  {took}", flush=True)


def _described(settings: Settings) -> str:
    words = [settings.optimizer, f"{settings.batch_size}x{settings.sequence_length}"]
    words += [] if settings.remat else ["no remat"]
    words += [f"{settings.micro_batches} parts"] if settings.micro_batches > 1 else []
    words += [settings.send_gradients] if settings.send_gradients != "during_step" else []
    return ", ".join(words)


if __name__ == "__main__":
    # Shapes are put on so many devices; nothing is computed.
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
    main()
