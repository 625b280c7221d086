"""A stack of equal blocks: written out or scanned, rematerialized or not, always the same function.

Scanned, every leaf has a leading axis over the layers, and the compiler sees one block. Written
out, gradients of a layer can leave the device while the backward pass of those before goes on.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding

from zenflow_jax import streaming

INIT_STD = 0.02  # `initializer_range` of nearly every model here


def make_blocks(
    make: Callable[[nnx.Rngs], nnx.Module], layers: int, *, scan_layers: bool, rngs: nnx.Rngs
) -> nnx.Module:
    """`layers` blocks made by `make`: one whose leaves are stacks, or a list of equal weights."""
    keys = jax.random.split(rngs.params(), layers)
    if scan_layers:
        return nnx.vmap(lambda key: make(nnx.Rngs(key)))(keys)
    return nnx.List(make(nnx.Rngs(key)) for key in keys)


def run_blocks(
    blocks: nnx.Module,
    x: jax.Array,
    *args: jax.Array | None,
    remat: bool,
    sharding: Sharding | None,
) -> jax.Array:
    """The residual stream `x` `(b, t, width)` after all blocks, each called with `x` and `args`."""

    def run(graphdef, params, x):
        return placed(nnx.merge(graphdef, params)(x, *args), sharding)

    if not isinstance(blocks, nnx.List):
        graphdef, stacks = nnx.split(blocks)

        def body(x, params):
            return run(graphdef, params, x), None

        if remat:
            # Inside a scan the compiler cannot merge the two computations.
            body = jax.checkpoint(body, prevent_cse=False)
        return streaming.scan_layers(body, x, stacks)[0]

    for block in blocks:
        graphdef, params = nnx.split(block)
        step = jax.checkpoint(run, static_argnums=0) if remat else run
        x = step(graphdef, params, x)
    return x


def placed(x: jax.Array, sharding: Sharding | None) -> jax.Array:
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def linear(n_in: int, n_out: int, *, bias: bool, **options) -> nnx.Linear:
    """A matrix `(n_in, n_out)`, normal with deviation `INIT_STD`, and a bias of zeros if wanted."""
    return nnx.Linear(n_in, n_out, use_bias=bias, kernel_init=rounded_normal, **options)


def embedding(rows: int, width: int, **options) -> nnx.Embed:
    """A table `(rows, width)`, normal with deviation `INIT_STD`."""
    return nnx.Embed(rows, width, embedding_init=rounded_normal, **options)


def rounded_normal(key, shape, dtype, **options):
    """Weights drawn in float32 and then rounded: every dtype starts from the same draw."""
    draw = jax.random.normal(key, shape, jnp.float32, **options)
    # Under jit the compiler would first multiply `INIT_STD` with a factor that ends `normal`, and
    # round otherwise.
    return (jax.lax.optimization_barrier(draw) * INIT_STD).astype(dtype)
