"""The loss of next tokens for a large vocabulary, whose logits are never there all at once.

Logits of 8,192 tokens for 150,000 words are 5 GB in float32, and their gradient as much. Here the
vocabulary is taken a part at a time, and its logits are computed once more for the gradient. Parts
of the vocabulary, not of the batch: the gradient of each part of the head is then whole when it is
made, and is not summed up in float32 beside the head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

#: Words whose logits are there at once.
PART = 8192

_LETTERS = "vw", "wv"  # of the head, by the axis of the vocabulary

_einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)

T = TypeVar("T")


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def token_losses(x: jax.Array, head: jax.Array, targets: jax.Array, axis: int) -> jax.Array:
    """Cross-entropies in nats: float32, of the shape of `targets`.

    Args:
        x: Output of the last layer `(b, t, width)`, in the dtype of the computation.
        head: The matrix that maps it to logits, in any float dtype; cast to the dtype of `x`.
        targets: Words `(b, t)`, integers. The loss of another number is NaN.
        axis: That of the vocabulary in `head`, 0 or 1; the other is the width.
    """
    return _forward(x, head, targets, axis)[0]


def _forward(x: jax.Array, head: jax.Array, targets: jax.Array, axis: int) -> Any:
    def add(sums: Any, start: Any, words: int) -> Any:
        top, total, of_target = sums
        logits = _logits(x, _slice(head, start, words, axis), axis)
        new_top = jnp.maximum(top, logits.max(-1))
        total = total * jnp.exp(top - new_top) + jnp.exp(logits - new_top[..., None]).sum(-1)
        place = targets - start
        at = jnp.take_along_axis(logits, jnp.clip(place, 0, words - 1)[..., None], -1)[..., 0]
        return new_top, total, jnp.where((place >= 0) & (place < words), at, of_target)

    zeros = jnp.zeros(targets.shape, jnp.float32)
    sums = zeros - jnp.inf, zeros, zeros + jnp.nan  # for targets that are no words
    top, total, of_target = _over_parts(add, sums, head.shape[axis])
    normalizers = top + jnp.log(total)
    return normalizers - of_target, (x, head, targets, normalizers)


def _backward(axis: int, residuals: Any, g: jax.Array) -> Any:
    x, head, targets, normalizers = residuals

    def add(gradients: Any, start: Any, words: int) -> Any:
        of_x, of_head = gradients
        matrix = _slice(head, start, words, axis).astype(x.dtype)
        logits = _logits(x, matrix, axis)
        # A target of another part has no place here: its row is all zeros.
        off = jnp.exp(logits - normalizers[..., None]) - jax.nn.one_hot(targets - start, words)
        off = (off * g[..., None]).astype(x.dtype)
        of_x += _einsum(f"btv,{_LETTERS[axis]}->btw", off, matrix)
        of_part = _einsum(f"btv,btw->{_LETTERS[axis]}", off, x).astype(head.dtype)
        return of_x, jax.lax.dynamic_update_slice_in_dim(of_head, of_part, start, axis)

    zeros = jnp.zeros(x.shape, jnp.float32), jnp.zeros_like(head)
    of_x, of_head = _over_parts(add, zeros, head.shape[axis])
    return of_x.astype(x.dtype), of_head, None


token_losses.defvjp(_forward, _backward)


def _over_parts(step: Callable[[T, Any, int], T], carry: T, words: int) -> T:
    """The carry after `step(carry, start, words)` of each part, one after the other."""
    whole, rest = divmod(words, PART)
    carry = jax.lax.fori_loop(0, whole, lambda i, carry: step(carry, i * PART, PART), carry)
    return step(carry, whole * PART, rest) if rest else carry


def _slice(head: jax.Array, start: Any, words: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(head, start, words, axis)


def _logits(x: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    return _einsum(f"btw,{_LETTERS[axis]}->btv", x, matrix.astype(x.dtype))
