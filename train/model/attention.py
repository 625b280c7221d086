"""Attention by cuDNN's flash kernel where there is one, and in its plain form elsewhere.

The plain form has the scores of all pairs of positions in float32 in memory; the kernel has none.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    causal: bool = False,
    window: int | None = None,
) -> jax.Array:
    """Mixed values `(b, t, heads, d)` of queries of that shape.

    Keys and values are `(b, t, kv_heads, d)`. `mask`, which broadcasts to `(b, heads, t, t)`, says
    what a query may see; with `causal` nothing behind it, and with a `window` only the last so many
    positions, its own included.
    """
    # jax does not count the position itself.
    local = None if window is None or window >= q.shape[1] else (window - 1, 0)
    options = {"is_causal": causal, "local_window_size": local}

    def plain(
        q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, **of_kernel: Any
    ) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, **options, **of_kernel)

    flash = partial(plain, implementation="cudnn")
    if not _takes(flash, q, k, v, mask):
        return plain(q, k, v, mask)
    # Traced where no GPU may be, as in a plan for one: what it is compiled for decides.
    return jax.lax.platform_dependent(q, k, v, mask, cuda=flash, default=plain)


def _takes(kernel, *arrays) -> bool:
    """Returns whether jax with this cuDNN takes such arrays, in a backward pass too.

    On a GPU it warns with cuDNN's reason, except of float32, which the kernel is not for.
    """

    def gradients(*arrays):
        return jax.grad(lambda q: jnp.sum(kernel(q, *arrays[1:]).astype(jnp.float32)))(arrays[0])

    try:
        jax.eval_shape(gradients, *arrays)
    except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
        if jax.default_backend() == "gpu" and arrays[0].dtype != jnp.float32:
            warnings.warn(
                "Attention keeps the scores of all pairs of positions in memory: cuDNN's flash "
                f"kernel does not take these arrays ({error}).",
                stacklevel=3,
            )
        return False
    return True
