"""BERT with a classification head, without dropout: https://arxiv.org/abs/1810.04805.

Shapes, dtypes and letters are as in `decoder.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from train.model.attention import attention
from train.model.blocks import Stacked, embedding, linear


class EncoderConfig(NamedTuple):
    vocabulary: int
    width: int  # of the residual stream
    layers: int
    heads: int  # a divisor of `width`
    ffn: int  # inner width of the feed-forward layer
    positions: int  # the longest sequence
    types: int  # kinds of segments
    norm_eps: float  # added to the variance


class BertClassifier(Stacked):
    """Computes the logits for a sequence or a pair of sequences, with `Decoder`'s arguments."""

    def __init__(
        self,
        config: EncoderConfig,
        *,
        labels: int,
        weight_dtype: DTypeLike,
        compute_dtype: DTypeLike,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        dtypes = {"param_dtype": weight_dtype, "dtype": compute_dtype}
        width = config.width
        self.embed = embedding(config.vocabulary, width, rngs=rngs, **dtypes)
        self.positions = embedding(config.positions, width, rngs=rngs, **dtypes)
        self.types = embedding(config.types, width, rngs=rngs, **dtypes)
        self.embed_norm = _norm(config, rngs)
        super().__init__(config, partial(EncoderBlock, config, **dtypes), rngs=rngs, **options)
        self.pooler = linear(width, width, bias=True, rngs=rngs, **dtypes)
        # float32 is cheap, because there is one row per sequence.
        self.classifier = linear(
            width, labels, bias=True, rngs=rngs, param_dtype=weight_dtype, dtype=jnp.float32
        )

    def __call__(self, tokens: jax.Array, types: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns float32 logits `(b, labels)` for integers `(b, t)`; `mask` is 0 for padding."""
        return self.logits_after(self.run_blocks(*self.block_inputs(tokens, types, mask)))

    def block_inputs(self, tokens: jax.Array, types: jax.Array, mask: jax.Array) -> Any:
        """Returns the stream `(b, t, width)` in `compute_dtype`, and the attention mask."""
        x = self.embed(tokens.astype(jnp.int32)) + self.types(types.astype(jnp.int32))
        x = x + self.positions(jnp.arange(tokens.shape[1]))[None]
        x = self.embed_norm(x).astype(x.dtype)
        return x, mask.astype(bool)[:, None, None, :]  # for every query and head

    def logits_after(self, x: jax.Array) -> jax.Array:
        """Returns the logits from the stream after all blocks."""
        return self.classifier(jnp.tanh(self.pooler(x[:, 0])))


class EncoderBlock(nnx.Module):
    """Applies attention, then a feed-forward layer; adds each to its input and normalizes."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs, **options):
        def square() -> nnx.Linear:
            return linear(config.width, config.width, bias=True, rngs=rngs, **options)

        self.heads = config.heads
        self.query, self.key, self.value = square(), square(), square()
        self.attention_out = square()
        self.attention_norm = _norm(config, rngs)
        self.up = linear(config.width, config.ffn, bias=True, rngs=rngs, **options)
        self.down = linear(config.ffn, config.width, bias=True, rngs=rngs, **options)
        self.ffn_norm = _norm(config, rngs)

    def __call__(self, x: jax.Array, attends: jax.Array) -> jax.Array:
        """Maps `(b, t, width)` to the same shape and dtype; `attends` is a mask `(b, 1, 1, t)`."""
        b, t, width = x.shape
        split = (b, t, self.heads, width // self.heads)
        q, k, v = (project(x).reshape(split) for project in (self.query, self.key, self.value))
        mixed = attention(q, k, v, mask=attends).reshape(b, t, width)
        x = self.attention_norm(x + self.attention_out(mixed)).astype(x.dtype)
        inner = jax.nn.gelu(self.up(x), approximate=False)
        return self.ffn_norm(x + self.down(inner)).astype(x.dtype)


def _norm(config: EncoderConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.width,
        epsilon=config.norm_eps,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        use_fast_variance=False,  # the other formula subtracts two nearly equal numbers
        rngs=rngs,
    )
