"""Do a few layers say what a step with many takes of a device, as a plan takes it that they do?

    python -m benchmarks.plan_accuracy
    python -m benchmarks.plan_accuracy --scanned --only zenflow --layers 32

Compiles the script's training steps for an NVIDIA H200 that need not be there: `pip install
"jax[cuda12]"` is enough. Prints the peaks of one device with few layers and with all, and how far
from the last the lines through two of the others are. Models have the sizes of those that their
names say. Answers: `benchmarks/LOG.md`.
"""

import argparse
import dataclasses
import time
from pathlib import Path

import jax

from train.decoder import DecoderConfig
from train.planning import compiled_peak, mesh_of, with_layers
from train.pretrained import Pretrained
from train.settings import Settings

_LLAMA = DecoderConfig(
    vocabulary=32000,
    width=4096,
    layers=32,
    heads=32,
    kv_heads=32,
    head_width=128,
    ffn=11008,
    positions=4096,
    norm_eps=1e-5,
    rope_base=1e4,
    rope_scaling=None,
    qkv_bias=False,
    tied=False,
    window=None,
    qk_norm=False,
)
MODELS = {
    "Llama 2 7B": _LLAMA,
    "Llama 3 8B": _LLAMA._replace(vocabulary=128256, kv_heads=8, ffn=14336),
    "Qwen 2 0.5B": _LLAMA._replace(
        **{"vocabulary": 151936, "width": 896, "heads": 14, "kv_heads": 2, "head_width": 64},
        **{"ffn": 4864, "tied": True, "qkv_bias": True},
    ),
}
FEW, LINES = (2, 4, 8), ((2, 4), (4, 8))
BASE = Settings(
    task="language",
    model="x",
    data="x",
    steps=1000,
    dtype="bfloat16",
    max_grad_norm=1.0,
    topk_ratio=0.05,
    batch_size=16,
    sequence_length=512,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16, help="of the models that are predicted")
    parser.add_argument("--scanned", action="store_true", help="layers scanned, not written out")
    parser.add_argument("--only", default="", help="cases whose line has this text")
    asked = parser.parse_args()
    print(
        f"jax {jax.__version__}, compiled for an H200; GB of one device with {FEW} layers and with"
    )
    print(f"{asked.layers}; how far off the lines through {LINES} are; seconds to compile")
    for name, config in MODELS.items():
        for optimizer in ("zenflow", "adamw"):
            for remat in (True, False):
                line = f"{name}, {optimizer}{', remat' if remat else ''}"
                if asked.only in line:
                    options = {"optimizer": optimizer, "remat": remat}
                    settings = dataclasses.replace(BASE, scan_layers=asked.scanned, **options)
                    one(line, settings, config, asked.layers)


def one(line: str, settings: Settings, config: DecoderConfig, layers: int) -> None:
    """Prints a row."""
    mesh = mesh_of(settings.mesh, "h200", described=True)
    origin = Pretrained(Path("x"), "decoder", config, {}, None, {})
    peaks, seconds = {}, []
    for depth in (*FEW, layers):
        start = time.perf_counter()
        peaks[depth] = compiled_peak(*with_layers(settings, origin, depth), mesh)
        seconds.append(f"{time.perf_counter() - start:.0f}")
    off = []
    for few, many in LINES:
        found = peaks[many] + (layers - many) * (peaks[many] - peaks[few]) / (many - few)
        off.append(f"{found / peaks[layers] - 1:+7.1%}")
    sizes = (f"{x / 1e9:6.2f}" for x in peaks.values())
    print(f"{line:28} {' '.join(sizes)} {' '.join(off)}  {', '.join(seconds)} s", flush=True)


if __name__ == "__main__":
    main()
