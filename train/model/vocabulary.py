"""Splits embedding and head into parts of the vocabulary, which are scanned like layers.

This lets their gradients leave the device part by part. Both are stacks of parts, as returned by
`streaming.stream`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from train.model import cross_entropy
from train.model.blocks import stack
from zenflow_jax import streaming

#: The maximum number of vocabulary parts, and the largest part in units of `cross_entropy.PART`.
MOST, LARGEST = 16, 4

T = TypeVar("T")


def parts_of(words: int) -> int:
    """Returns the number of equal parts; 1 if the vocabulary is small, or its parts too large."""
    parts = max(i for i in range(1, MOST + 1) if words % i == 0)
    return parts if cross_entropy.PART < words <= parts * LARGEST * cross_entropy.PART else 1


def make_parts(make: Callable[..., nnx.Module], words: int, parts: int, rngs: nnx.Rngs) -> Any:
    """Makes an embedding or head for `words` words; several parts form a stack."""
    if parts == 1:
        return make(words, rngs=rngs)
    return stack(partial(make, words // parts), parts, rngs)


def embedded(table: Any, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns rows `(b, t, width)` of a table `(parts, words, width)`; NaN for invalid tokens."""
    _, words, width = table.shape

    def add(x: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
        return add_rows(x, part, tokens - start)

    return _over_parts(add, no_rows(tokens, width, dtype), table, words)


def no_rows(tokens: jax.Array, width: int, dtype: DTypeLike) -> jax.Array:
    """Returns the result of `embedded` before any part: NaN."""
    return jnp.full((*tokens.shape, width), jnp.nan, dtype)


def add_rows(x: jax.Array, part: jax.Array, place: jax.Array) -> jax.Array:
    """Puts rows of a part `(words, width)` into `x`; `place` may be outside the part."""
    rows = _rows(part.astype(x.dtype), place)
    return jnp.where(((place >= 0) & (place < len(part)))[..., None], rows, x)


@jax.custom_vjp
def _rows(part: jax.Array, place: jax.Array) -> jax.Array:
    return jnp.take(part, place, axis=0, mode="clip")


def _rows_backward(residuals: tuple[jax.Array, jax.Array], g: jax.Array) -> Any:
    # A scatter on a GPU would sort all values in `g` for each part, to add them in order.
    place, part = residuals
    one_hot = jax.nn.one_hot(place, len(part), dtype=g.dtype)
    part_grad = jnp.einsum("btv,btw->vw", one_hot, g, preferred_element_type=jnp.float32)
    return part_grad.astype(part.dtype), None


_rows.defvjp(lambda part, place: (_rows(part, place), (place, part)), _rows_backward)


def token_losses(x: jax.Array, head: Any, targets: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Computes `cross_entropy.token_losses` for a head `(parts, width, words)`; `x` is float32.

    Products are in `dtype`; gradients with respect to `x` are summed in float32.
    """

    def add(sums: Any, part: jax.Array, start: jax.Array) -> Any:
        return add_logits(sums, x, part.astype(dtype), targets - start)

    sums = cross_entropy.no_words(targets)
    return losses_of(_over_parts(add, sums, head, head.shape[2]))


def add_logits(sums: Any, x: jax.Array, part: jax.Array, place: jax.Array) -> Any:
    """Adds the words of a part `(width, words)` to sums started by `cross_entropy.no_words`."""
    return cross_entropy.add_words(sums, cross_entropy.logits_of(x, part), place)


def losses_of(sums: Any) -> jax.Array:
    """Returns the cross-entropies from the sums over all words."""
    top, total, target_logit = sums
    return top + jnp.log(total) - target_logit


def _over_parts(step: Callable[[T, Any, jax.Array], T], carry: T, stack: Any, words: int) -> T:
    """Returns the carry after `step(carry, part, start)` for one part after another."""

    def body(carry: T, part: tuple[Any, jax.Array]) -> tuple[T, None]:
        return step(carry, *part), None

    starts = words * jnp.arange(stack.shape[0])
    return streaming.scan_layers(jax.checkpoint(body, prevent_cse=False), carry, (stack, starts))[0]
