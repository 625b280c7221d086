"""Runs a stack of equal blocks, scanned or not, rematerialized or not, with equal results.

If scanned, every leaf has a leading axis over the layers, and the compiler sees one block. If not,
a layer's gradients can leave the device during the backward pass of earlier layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, Sharding

from zenflow_jax import streaming

INIT_STD = 0.02  # `initializer_range` of nearly all supported models


class Stacked(nnx.Module):
    """A model around equal blocks, each made by `make` with its own `rngs`.

    If scanned, they form one block whose leaves are stacks; otherwise a list with the same weights.
    """

    def __init__(
        self,
        config: Any,
        make: Callable[..., nnx.Module],
        *,
        rngs: nnx.Rngs,
        scan_layers: bool = False,
        remat: bool = False,
        stream_sharding: NamedSharding | None = None,
    ):
        self.config = config
        self.remat = remat
        self.stream_sharding = stream_sharding
        blocks = stack(make, config.layers, rngs)
        if not scan_layers:
            # Cut from a stack, because making 36 blocks one by one takes ten times as long (3.4 s).
            graphdef, stacks = nnx.split(blocks)
            each = (jax.tree.map(lambda x, i=i: x[i], stacks) for i in range(config.layers))
            blocks = nnx.List(nnx.merge(graphdef, block) for block in each)
        self.blocks = blocks

    def run_blocks(self, x: jax.Array, *args: jax.Array | None) -> jax.Array:
        """Returns the stream `x` `(b, t, width)` after all blocks, which also take `args`."""

        def run(graphdef, params, x):
            return placed(nnx.merge(graphdef, params)(x, *args), self.stream_sharding)

        x = placed(x, self.stream_sharding)
        if not isinstance(self.blocks, nnx.List):
            graphdef, stacks = nnx.split(self.blocks)

            def body(x, params):
                return run(graphdef, params, x), None

            if self.remat:
                # Inside a scan, the compiler cannot merge the two computations.
                body = jax.checkpoint(body, prevent_cse=False)
            return streaming.scan_layers(body, x, stacks)[0]

        for block in self.blocks:
            graphdef, params = nnx.split(block)
            step = jax.checkpoint(run, static_argnums=0) if self.remat else run
            x = step(graphdef, params, x)
        return x


def stack(make: Callable[..., nnx.Module], count: int, rngs: nnx.Rngs) -> Any:
    """Makes a module whose leaves are stacks of the leaves that `make` creates with `rngs`."""
    return nnx.vmap(lambda key: make(rngs=nnx.Rngs(key)))(jax.random.split(rngs.params(), count))


def placed(x: jax.Array, sharding: Sharding | None) -> jax.Array:
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def linear(n_in: int, n_out: int, *, bias: bool, **options) -> nnx.Linear:
    """Makes a matrix `(n_in, n_out)`, normal with deviation `INIT_STD`, and optionally a bias."""
    return nnx.Linear(n_in, n_out, use_bias=bias, kernel_init=rounded_normal, **options)


def embedding(rows: int, width: int, **options) -> nnx.Embed:
    """Makes a table `(rows, width)`, normal with deviation `INIT_STD`."""
    return nnx.Embed(rows, width, embedding_init=rounded_normal, **options)


def rounded_normal(key, shape, dtype, **options):
    """Draws weights in float32, then rounds, so that every dtype starts from the same draw."""
    draw = jax.random.normal(key, shape, jnp.float32, **options)
    # Under jit, the compiler would first multiply `INIT_STD` by the last factor of `normal`, and
    # round differently.
    return (jax.lax.optimization_barrier(draw) * INIT_STD).astype(dtype)
