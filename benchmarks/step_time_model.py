"""The model that `step_time.py` trains: a Llama-like decoder, in several sizes."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from train.distributed.sharding import committed
from train.model.decoder import Decoder, DecoderConfig
from train.run import models


class Preset(NamedTuple):
    """A model and its default batch."""

    config: DecoderConfig
    batch: int
    length: int


def llama(length: int, **sizes: int) -> DecoderConfig:
    """Returns a decoder's config with these sizes; by default, with 32,000 tokens."""
    return DecoderConfig(
        **({"vocabulary": 32000} | sizes),
        head_width=sizes["width"] // sizes["heads"],
        positions=length,
    )


def _preset(batch: int, length: int, **sizes: int) -> Preset:
    return Preset(llama(length, **sizes), batch, length)


#: 0.16 M, 222 M, 134 M and 1.10 B parameters. "cpu" has a small vocabulary, so that most parameters
#: are in layers. "1b" has the sizes of TinyLlama.
MODELS = {
    "tiny": _preset(2, 32, width=64, layers=2, heads=4, kv_heads=2, ffn=192, vocabulary=512),
    "cpu": _preset(1, 64, width=1024, layers=16, heads=16, kv_heads=16, ffn=2816, vocabulary=8192),
    "125m": _preset(8, 512, width=768, layers=12, heads=12, kv_heads=12, ffn=2048),
    "1b": _preset(4, 1024, width=2048, layers=22, heads=32, kv_heads=4, ffn=5632),
}


class Model(NamedTuple):
    graphdef: nnx.GraphDef
    shapes: Any  # of the parameters
    draw: Callable[[], Any]  # the same initial weights in every call

    @property
    def parameters(self) -> int:
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.shapes))


def make_model(config: DecoderConfig, *, scan_layers: bool, remat: bool, parts: int = 1) -> Model:
    """Makes a decoder with bf16 matrices and products, and float32 norms."""

    options = {"weight_dtype": jnp.bfloat16, "compute_dtype": jnp.bfloat16, "remat": remat}
    options |= {"parts": parts}

    def split() -> tuple[nnx.GraphDef, Any]:
        return models.split(Decoder(config, scan_layers=scan_layers, rngs=nnx.Rngs(0), **options))

    graphdef, shapes = jax.eval_shape(split)
    # Runs without jit, so that at most one leaf exists in float32 at a time.
    return Model(graphdef, shapes, lambda: committed(split()[1]))
