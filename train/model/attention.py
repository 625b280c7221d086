"""Computes attention with cuDNN's flash kernel if available, otherwise in the plain form.

The plain form keeps float32 scores of all pairs of positions in memory; the kernel does not.
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
    """Returns the mixed values `(b, t, heads, d)` for queries of that shape.

    Keys and values are `(b, t, kv_heads, d)`. `mask` is broadcast to `(b, heads, t, t)` and selects
    the keys that a query attends to; `causal` hides later positions, and a `window` all but the
    last `window` positions, including the query's own.
    """
    # jax does not count the position itself.
    local = None if window is None or window >= q.shape[1] else (window - 1, 0)
    options = {"is_causal": causal, "local_window_size": local}

    def plain(
        q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, **kernel_options: Any
    ) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, **options, **kernel_options)

    flash = partial(plain, implementation="cudnn")
    if not _supports(flash, q, k, v, mask):
        return plain(q, k, v, mask)
    # This may be traced without a GPU, as in a plan, so the compilation target decides.
    return jax.lax.platform_dependent(q, k, v, mask, cuda=flash, default=plain)


def _supports(kernel, *arrays) -> bool:
    """Returns whether jax with this cuDNN accepts these arrays, including for a backward pass.

    On a GPU, it warns with cuDNN's reason, except for float32, which the kernel does not support.
    """

    def gradients(*arrays):
        return jax.grad(lambda q: jnp.sum(kernel(q, *arrays[1:]).astype(jnp.float32)))(arrays[0])

    try:
        jax.eval_shape(gradients, *arrays)
    except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
        if jax.default_backend() == "gpu" and arrays[0].dtype != jnp.float32:
            warnings.warn(
                "Attention stores the scores of all pairs of positions, because cuDNN's flash "
                f"kernel does not support these arrays ({error}).",
                stacklevel=3,
            )
        return False
    return True
