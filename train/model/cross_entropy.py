"""Computes the next-token loss for a large vocabulary, without all logits in memory at once.

Logits of 8,192 tokens for 150,000 words take 5 GB in float32, and so does their gradient. Here the
parts of the vocabulary take turns, and a part's logits are recomputed for the gradient. Because the
vocabulary is divided, not the batch, the gradient of a part of the head is complete at once, and
needs no second array for sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

#: Number of words whose logits are in memory at once.
PART = 8192

_LETTERS = "vw", "wv"  # the head's shape, by the axis of the vocabulary

_einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)

T = TypeVar("T")


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def token_losses(x: jax.Array, head: jax.Array, targets: jax.Array, axis: int) -> jax.Array:
    """Returns cross-entropies in nats: float32, in the shape of `targets`.

    Args:
        x: Output of the last layer `(b, t, width)`, in the dtype of the computation.
        head: The matrix that maps `x` to logits, in any float dtype; cast to the dtype of `x`.
        targets: Words `(b, t)`, integers. The loss of an invalid index is NaN.
        axis: The axis of the vocabulary in `head`, 0 or 1; the other is the width.
    """
    return _forward(x, head, targets, axis)[0]


def _forward(x: jax.Array, head: jax.Array, targets: jax.Array, axis: int) -> Any:
    def add(sums: Any, start: Any, words: int) -> Any:
        logits = _logits(x, _slice(head, start, words, axis), axis)
        return add_words(sums, logits, targets - start)

    top, total, target_logit = _over_parts(add, no_words(targets), head.shape[axis])
    normalizers = top + jnp.log(total)
    return normalizers - target_logit, (x, head, targets, normalizers)


def _backward(axis: int, residuals: Any, g: jax.Array) -> Any:
    x, head, targets, normalizers = residuals

    def add(gradients: Any, start: Any, words: int) -> Any:
        x_grad, head_grad = gradients
        matrix = _slice(head, start, words, axis).astype(x.dtype)
        logits = _logits(x, matrix, axis)
        # A target in another part is outside this part, so its row is all zeros.
        grad = jnp.exp(logits - normalizers[..., None]) - jax.nn.one_hot(targets - start, words)
        grad = (grad * g[..., None]).astype(x.dtype)
        x_grad += _einsum(f"btv,{_LETTERS[axis]}->btw", grad, matrix)
        part_grad = _einsum(f"btv,btw->{_LETTERS[axis]}", grad, x).astype(head.dtype)
        return x_grad, jax.lax.dynamic_update_slice_in_dim(head_grad, part_grad, start, axis)

    zeros = jnp.zeros(x.shape, jnp.float32), jnp.zeros_like(head)
    x_grad, head_grad = _over_parts(add, zeros, head.shape[axis])
    return x_grad.astype(x.dtype), head_grad, None


token_losses.defvjp(_forward, _backward)


def no_words(targets: jax.Array) -> Any:
    """Returns the sums of `add_words` before any words."""
    zeros = jnp.zeros(targets.shape, jnp.float32)
    return zeros - jnp.inf, zeros, zeros + jnp.nan  # for targets that are not words


def add_words(sums: Any, logits: jax.Array, place: jax.Array) -> Any:
    """Returns the largest logit, the sum of exponentials without it, and the logit of the target.

    `place` is the target's index among the words of `logits`, or outside that range.
    """
    # The loss does not depend on the number that is subtracted from all logits.
    top, (_, total, target_logit) = jax.lax.stop_gradient(sums[0]), sums
    new_top = jax.lax.stop_gradient(jnp.maximum(top, logits.max(-1)))
    total = total * jnp.exp(top - new_top) + jnp.exp(logits - new_top[..., None]).sum(-1)
    is_target = jax.nn.one_hot(place, logits.shape[-1], dtype=bool)
    logit = jnp.where(is_target, logits, 0).sum(-1)
    return new_top, total, jnp.where(is_target.any(-1), logit, target_logit)


@jax.custom_vjp
def logits_of(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns float32 logits; the product has the dtype of `matrix` `(width, words)`."""
    return _logits(x.astype(matrix.dtype), matrix, 1)


def _logits_backward(residuals: Any, g: jax.Array) -> Any:
    x, matrix = residuals
    g = g.astype(matrix.dtype)
    # Gradients with respect to `x` are summed over several parts.
    x_grad = _einsum("btv,wv->btw", g, matrix).astype(x.dtype)
    return x_grad, _einsum("btw,btv->wv", x.astype(matrix.dtype), g).astype(matrix.dtype)


logits_of.defvjp(lambda x, matrix: (logits_of(x, matrix), (x, matrix)), _logits_backward)


def _over_parts(step: Callable[[T, Any, int], T], carry: T, words: int) -> T:
    """Returns the carry after `step(carry, start, words)` for one part after another."""
    whole, rest = divmod(words, PART)
    carry = jax.lax.fori_loop(0, whole, lambda i, carry: step(carry, i * PART, PART), carry)
    return step(carry, whole * PART, rest) if rest else carry


def _slice(head: jax.Array, start: Any, words: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(head, start, words, axis)


def _logits(x: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    return _einsum(f"btw,{_LETTERS[axis]}->btv", x, matrix.astype(x.dtype))
