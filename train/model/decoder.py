"""Implements Llama 2 and 3, Qwen 2, 2.5 and 3, and Mistral as one decoder with options.

It has RMSNorm before each half of a block, rotary positions, attention in which several query heads
share a key head, and SwiGLU. Matrices are `(in, out)`, stored in `weight_dtype` and multiplied in
`compute_dtype`; norms, rotations, the attention softmax and the logits are always float32.

Letters: `b` sequences in a batch, `t` positions, `s` positions in a cache, `h` heads, `d` width of
a head.

References:
    Llama 2: https://arxiv.org/abs/2307.09288. Mistral 7B: https://arxiv.org/abs/2310.06825.
    Qwen2: https://arxiv.org/abs/2407.10671. Qwen3: https://arxiv.org/abs/2505.09388.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from train.model import cross_entropy, vocabulary
from train.model.attention import attention
from train.model.blocks import Stacked, embedding, linear, placed


class LinearRope(NamedTuple):
    """Slows all rotations down by `factor`, so that longer texts are rotated as far as before."""

    factor: float


class Llama3Rope(NamedTuple):
    """Slows rotations below `low` turns over `positions` by `factor`, with a ramp up to `high`."""

    factor: float
    low: float
    high: float
    positions: int  # in the original training


class DecoderConfig(NamedTuple):
    vocabulary: int
    width: int  # of the residual stream
    layers: int
    heads: int
    kv_heads: int  # a divisor of `heads`
    head_width: int  # even; `heads * head_width` may differ from `width`
    ffn: int  # inner width of the SwiGLU layer
    positions: int  # the longest supported sequence; longer sequences give bad results
    norm_eps: float = 1e-5  # added to the mean square
    rope_base: float = 1e4  # the slowest rotation turns once in about 6 times this many positions
    rope_scaling: LinearRope | Llama3Rope | None = None
    qkv_bias: bool = False  # whether queries, keys and values have a bias (Qwen 2)
    qk_norm: bool = False  # whether the query and the key of each head are normalized (Qwen 3)
    tied: bool = False  # whether the embedding is also the head
    window: int | None = None  # how many tokens a token attends to, including itself; None for all


class Cache(NamedTuple):
    """Keys and values for earlier positions, of one block or stacked for all blocks."""

    keys: jax.Array  # ([blocks,] b, s, kv_heads, d), rotated
    values: jax.Array  # the same shape


class Decoder(Stacked):
    """Computes the next token's logits; matrices are kept in `weight_dtype`, norms in float32."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        weight_dtype: DTypeLike,
        compute_dtype: DTypeLike,
        rngs: nnx.Rngs,
        parts: int = 1,
        **options: Any,
    ):
        self.parts = parts
        dtypes = {"param_dtype": weight_dtype, "dtype": compute_dtype}
        table = partial(embedding, width=config.width, **dtypes)
        self.embed = vocabulary.make_parts(table, config.vocabulary, parts, rngs)
        super().__init__(config, partial(DecoderBlock, config, **dtypes), rngs=rngs, **options)
        self.norm = _norm(config.width, config, rngs)
        if not config.tied:
            dtypes |= {"preferred_element_type": jnp.float32}
            head = partial(linear, config.width, bias=False, **dtypes)
            self.head = vocabulary.make_parts(head, config.vocabulary, parts, rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Returns the logits after each of `tokens` `(b, t)`: float32 `(b, t, vocabulary)`.

        If the tokens' `positions` `(b, t)` in their texts are passed, a sequence's texts do not
        attend to each other.
        """
        return self._logits(self._last_layer(tokens, positions))

    def losses(
        self, tokens: jax.Array, targets: jax.Array, positions: jax.Array | None = None
    ) -> jax.Array:
        """Returns the cross-entropy of each of `targets` `(b, t)` in nats: float32 `(b, t)`.

        A large vocabulary's logits are never all in memory at once.
        """
        return self.losses_after(self._last_layer(tokens, positions), targets)

    def losses_after(self, x: jax.Array, targets: jax.Array) -> jax.Array:
        """Returns the same losses from the stream `x` `(b, t, width)` after all blocks."""
        if self.parts > 1:
            head = self.head.kernel.get_value()
            return vocabulary.token_losses(self.norm(x), head, targets, self.embed.dtype)
        axes = () if self.stream_sharding is None else self.stream_sharding.mesh.axis_names
        # The mesh axis `tensor` divides the logits.
        if "tensor" in axes or self.config.vocabulary <= cross_entropy.PART:
            logits = self._logits(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        x = self.norm(x).astype(self.embed.dtype)
        if not self.config.tied:
            return cross_entropy.token_losses(x, self.head.kernel[...], targets, axis=1)
        table = self.embed.embedding[...]
        if "fsdp" in axes:
            # Otherwise the whole table is gathered for each part of its rows.
            table = placed(table, NamedSharding(self.stream_sharding.mesh, P(None, "fsdp")))
        return cross_entropy.token_losses(x, table, targets, axis=0)

    def _last_layer(self, tokens: jax.Array, positions: jax.Array | None) -> jax.Array:
        """Returns the stream `(b, t, width)` after all blocks."""
        tokens = tokens.astype(jnp.int32)
        if self.parts == 1:
            x = self.embed(tokens)
        else:
            x = vocabulary.embedded(self.embed.embedding.get_value(), tokens, self.embed.dtype)
        return self.run_blocks(x, *self.block_inputs(tokens, positions))

    def block_inputs(self, tokens: jax.Array, positions: jax.Array | None) -> tuple[Any, ...]:
        """Returns all blocks' inputs: rotations, and the index of each token's text in the row."""
        text = None
        if positions is None:
            positions = jnp.arange(tokens.shape[1])[None]
        else:
            text = jnp.cumsum(positions == 0, axis=1)
        return *rotations(self.config, positions), text

    def empty_cache(self, b: int, s: int) -> Cache:
        config = self.config
        shape = (config.layers, b, s, config.kv_heads, config.head_width)
        dtype = self.embed.dtype
        return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def extend(
        self, tokens: jax.Array, cache: Cache, start: jax.Array | int
    ) -> tuple[jax.Array, Cache]:
        """Returns the float32 logits `(b, vocabulary)` after `tokens` `(b, t)`, and the cache.

        The cache contains the `start` tokens before them; `start + t` is at most `s`. Requires
        stacked blocks.
        """
        x = self.embed(tokens.astype(jnp.int32))
        cos, sin = rotations(self.config, (start + jnp.arange(tokens.shape[1]))[None])
        graphdef, stacks = nnx.split(self.blocks)

        def body(x, block_and_cache):
            params, cache = block_and_cache
            block = nnx.merge(graphdef, params)
            return DecoderBlock.extend(block, x, cos, sin, cache, start)

        x, cache = jax.lax.scan(body, x, (stacks, cache))
        return self._logits(x[:, -1:])[:, 0], cache

    def _logits(self, x: jax.Array) -> jax.Array:
        x = self.norm(x)
        if not self.config.tied:
            return self.head(x)
        table = self.embed.embedding[...].astype(self.embed.dtype)
        return jnp.einsum(
            "btw,vw->btv", x.astype(table.dtype), table, preferred_element_type=jnp.float32
        )


class DecoderBlock(nnx.Module):
    """Applies causal attention, then SwiGLU; each is added to the residual stream that it read."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, **options):
        def matrix(n_in: int, n_out: int, *, bias: bool = False) -> nnx.Linear:
            return linear(n_in, n_out, bias=bias, rngs=rngs, **options)

        self.config = config
        width, d = config.width, config.head_width
        self.attention_norm = _norm(config.width, config, rngs)
        self.query = matrix(width, config.heads * d, bias=config.qkv_bias)
        self.key = matrix(width, config.kv_heads * d, bias=config.qkv_bias)
        self.value = matrix(width, config.kv_heads * d, bias=config.qkv_bias)
        self.attention_out = matrix(config.heads * d, width)
        if config.qk_norm:
            # One scale for all heads.
            self.query_norm = _norm(d, config, rngs)
            self.key_norm = _norm(d, config, rngs)
        self.ffn_norm = _norm(config.width, config, rngs)
        self.gate = matrix(width, config.ffn)
        self.up = matrix(width, config.ffn)
        self.down = matrix(config.ffn, width)

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, text: jax.Array | None
    ) -> jax.Array:
        """Maps the stream `(b, t, width)`; a token attends only to its own `text`."""
        q, k, v = self._heads(self.attention_norm(x), cos, sin)
        # The mask is recomputed in each block, because keeping it for the backward pass would take
        # a (t, t) array.
        mask = None if text is None else (text[:, :, None] == text[:, None, :])[:, None]
        mixed = attention(q, k, v, mask=mask, causal=True, window=self.config.window)
        return self._mixed_in(x, mixed)

    def extend(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, cache: Cache, start: jax.Array | int
    ) -> tuple[jax.Array, Cache]:
        """Maps the stream for positions from `start`; the cache contains earlier positions."""
        q, k, v = self._heads(self.attention_norm(x), cos, sin)
        cache = Cache(
            jax.lax.dynamic_update_slice_in_dim(cache.keys, k, start, axis=1),
            jax.lax.dynamic_update_slice_in_dim(cache.values, v, start, axis=1),
        )
        # The distance of each token from each position in the cache.
        behind = start + jnp.arange(x.shape[1])[:, None] - jnp.arange(cache.keys.shape[1])[None]
        seen = behind >= 0
        if self.config.window is not None:
            seen &= behind < self.config.window
        mixed = jax.nn.dot_product_attention(q, *cache, mask=seen[None, None])
        return self._mixed_in(x, mixed), cache

    def _heads(self, x, cos, sin):
        """Returns queries, keys and values `(b, t, heads, d)`."""
        b, t, _ = x.shape
        d = self.config.head_width
        q, k, v = (
            project(x).reshape(b, t, -1, d) for project in (self.query, self.key, self.value)
        )
        if self.config.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)  # float32
        # Values are rounded only after the rotation.
        q, k = (rotate(heads, cos, sin).astype(v.dtype) for heads in (q, k))
        return q, k, v

    def _mixed_in(self, x, mixed):
        """Returns the stream after the block, from the attention's output `(b, t, heads, d)`."""
        x = x + self.attention_out(mixed.reshape(*x.shape[:2], -1))
        y = self.ffn_norm(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


def rotations(config: DecoderConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine for `positions` `(b, t)`: float32 `(b, t, d / 2)` each."""
    # float32 from this point on: a bfloat16 angle would be wrong by half a radian at position 200.
    speed = jnp.asarray(rotation_speeds(config), jnp.float32)
    angle = positions.astype(jnp.float32)[..., None] * speed[None, None]
    return jnp.cos(angle), jnp.sin(angle)


def rotation_speeds(config: DecoderConfig) -> np.ndarray:
    """Returns each channel pair's radians per position, descending: float64 `(d / 2,)`."""
    pairs = config.head_width // 2
    speed = config.rope_base ** (-np.arange(pairs) / pairs)
    match config.rope_scaling:
        case None:
            return speed
        case LinearRope(factor):
            return speed / factor
        case Llama3Rope(factor, low, high, positions):
            turns = positions * speed / (2 * np.pi)
            kept = np.clip((turns - low) / (high - low), 0, 1)  # 1 where fast
            return speed * (kept + (1 - kept) / factor)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates queries or keys `(b, t, h, d)`, each pair `(i, i + d/2)`: float32."""
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def _norm(width: int, config: DecoderConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        width, epsilon=config.norm_eps, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs
    )


def parts_that_stream(config: Any, stream: str) -> int:
    """Returns the number of parts in which embedding and head stream; 1 if they do not stream."""
    if stream == "none" or not isinstance(config, DecoderConfig) or config.tied:
        return 1
    return vocabulary.parts_of(config.vocabulary)
