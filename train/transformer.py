"""A decoder-only transformer over bytes: RMSNorm, rotary positions, SwiGLU.

Matrices are `(in, out)` and have no bias. Weights are kept in `weight_dtype`, matrix products run
in `compute_dtype`; norms, rotations, logits and loss are float32 whatever these are, because a
bfloat16 has 8 bits and sums over a row need more.

Letters: `b` sequences in a batch, `t` positions, `h` heads, `d` width of a head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding
from jax.typing import DTypeLike

ROTARY_BASE = 10_000.0  # the usual one; wavelengths from 2 pi to about 60,000 positions

INIT_STD = 0.02  # as in GPT-2


class Transformer(nnx.Module):
    """Logits of the next byte at every position.

    Args:
        width: Size of the residual stream.
        layers: Number of blocks.
        heads: Attention heads; `width / heads` must be an even whole number.
        ffn: Inner width of the SwiGLU layer.
        vocabulary: Number of tokens.
        weight_dtype: In which the matrices are kept. The scales of the norms are float32.
        compute_dtype: In which they are multiplied.
        rngs: Source of the initial weights. They are drawn in float32 and then rounded, so that
            every `weight_dtype` starts from the same draw.
        stream_sharding: On a mesh, where the residual stream `(b, t, width)` lies between blocks.
            Left to the compiler, it would take over how the embedding's rows are split.
    """

    def __init__(
        self,
        *,
        width: int,
        layers: int,
        heads: int,
        ffn: int,
        vocabulary: int,
        weight_dtype: DTypeLike,
        compute_dtype: DTypeLike,
        rngs: nnx.Rngs,
        stream_sharding: Sharding | None = None,
    ):
        self.stream_sharding = stream_sharding
        dtypes = {"param_dtype": weight_dtype, "dtype": compute_dtype}
        self.embed = nnx.Embed(
            vocabulary, width, **dtypes, embedding_init=_rounded_normal(INIT_STD), rngs=rngs
        )
        self.blocks = nnx.List(
            # Each block adds to the residual stream twice: scaled so that its variance does not
            # grow with depth (GPT-2, section 2.3).
            Block(width, heads, ffn, out_std=INIT_STD / (2 * layers) ** 0.5, rngs=rngs, **dtypes)
            for _ in range(layers)
        )
        self.norm = _norm(width, rngs)
        self.head = nnx.Linear(
            width,
            vocabulary,
            use_bias=False,
            kernel_init=_rounded_normal(INIT_STD),
            preferred_element_type=jnp.float32,
            rngs=rngs,
            **dtypes,
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens `(b, t)`, integers, to float32 logits `(b, t, vocabulary)`."""
        x = self._placed(self.embed(tokens))
        for block in self.blocks:
            x = self._placed(block(x))
        return self.head(self.norm(x))

    def _placed(self, x):
        if self.stream_sharding is None:
            return x
        return jax.lax.with_sharding_constraint(x, self.stream_sharding)


class Block(nnx.Module):
    """Causal attention, then SwiGLU, each added to the residual stream it read from."""

    def __init__(self, width: int, heads: int, ffn: int, *, out_std: float, rngs, **dtypes):
        def linear(n_in: int, n_out: int, std: float) -> nnx.Linear:
            init = _rounded_normal(std)
            return nnx.Linear(n_in, n_out, use_bias=False, kernel_init=init, rngs=rngs, **dtypes)

        self.heads = heads
        self.attention_norm = _norm(width, rngs)
        self.query_key_value = linear(width, 3 * width, INIT_STD)
        self.attention_out = linear(width, width, out_std)
        self.ffn_norm = _norm(width, rngs)
        self.gate = linear(width, ffn, INIT_STD)
        self.up = linear(width, ffn, INIT_STD)
        self.down = linear(ffn, width, out_std)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(b, t, width)` to the same shape and dtype."""
        x = x + self._attention(self.attention_norm(x))
        return x + self._swiglu(self.ffn_norm(x))

    def _attention(self, x):
        b, t, width = x.shape
        qkv = self.query_key_value(x).reshape(b, t, 3, self.heads, width // self.heads)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        mixed = jax.nn.dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        return self.attention_out(mixed.reshape(b, t, width))

    def _swiglu(self, x):
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


def rotary(x: jax.Array) -> jax.Array:
    """Turns queries or keys by an angle that grows with their position.

    The scalar product of a turned query at `i` with a turned key at `j` depends on the position
    through `i - j` alone.

    Args:
        x: `(b, t, h, d)` with an even `d`, any float dtype.

    Returns:
        The same shape and dtype; each vector keeps its length.

    References:
        Su et al., RoFormer, https://arxiv.org/abs/2104.09864, 2021. Pairs are `(i, i + d/2)`.
    """
    _, t, _, d = x.shape
    frequency = ROTARY_BASE ** (-jnp.arange(d // 2, dtype=jnp.float32) / (d // 2))
    # float32: a bfloat16 angle would be wrong by half a radian at position 200.
    angle = jnp.outer(jnp.arange(t, dtype=jnp.float32), frequency)[None, :, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return turned.astype(x.dtype)


def _norm(width: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(width, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs)


def _rounded_normal(std: float):
    def init(key, shape, dtype, **options):
        draw = jax.random.normal(key, shape, jnp.float32, **options)
        # Under jit the compiler would first multiply `std` with a factor that ends `normal`, and so
        # round otherwise: weights drawn on a mesh would not be quite those drawn without.
        return (jax.lax.optimization_barrier(draw) * std).astype(dtype)

    return init
