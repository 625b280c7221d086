"""Warns with `logging` about leaves that the user probably did not intend.

Warnings never change a result.
"""

import logging
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import optax

from zenflow_jax._spec.leaf import LeafSpec

_logger = logging.getLogger("zenflow_jax")

# A smaller share of extra selected parameters does not cause a warning.
_NEGLIGIBLE = 0.01
# The last key in a matrix's path, in flax and Keras.
_MATRIX = re.compile(r"\b(kernel|embedding|embeddings)\W*$")


def warn_if_all_resident(specs: Sequence[LeafSpec]) -> None:
    """Warns that no memory is saved. This is not an error, because the result is correct."""
    if not any(math.prod(spec.shape) for spec in specs) or not all(s.resident for s in specs):
        return
    first = specs[0]
    _logger.warning(
        f"zenflow saves no memory: all {len(specs)} leaves stay on the device (the first is "
        f"{first.name or 'a bare array'} of shape {first.shape}). It offloads only leaves that "
        "have two or more axes and do not match `resident`. Leave out `optax.flatten`, or "
        "change `resident` or `topk_ratio`."
    )


def warn_of_few_channels(specs: Sequence[LeafSpec], topk_ratio: float) -> None:
    """Warns if rounding up selects more than twice `topk_ratio`, as for a stack along axis 1."""
    few = [s for s in specs if not s.resident and s.k > 2 * topk_ratio * s.n]
    surplus = sum(math.prod(s.shape) * (s.k / s.n - topk_ratio) for s in few)
    if surplus <= _NEGLIGIBLE * sum(math.prod(s.shape) for s in specs):
        return
    largest = max(few, key=lambda s: math.prod(s.shape))
    _logger.warning(
        f"zenflow selects {largest.k} of {largest.n} channels along axis {largest.axis} of "
        f"{largest.name or 'a bare array'} of shape {largest.shape}, more than twice "
        f"topk_ratio={topk_ratio:g}; the same is true of {len(few) - 1} other leaves. The "
        "channels' state uses device memory. If this axis counts layers or heads, pass another "
        "`channel_axis` (an int or a function of (path, leaf)), or stack layers along the first "
        "axis."
    )


def warn_of_stacked_vectors(specs: Sequence[LeafSpec]) -> None:
    """Warns about norms and biases of stacked layers: matrices whose channels are layers."""
    offloaded = [spec for spec in specs if not spec.resident]
    sizes = {(spec.stack, n) for spec in offloaded for n in spec.shape[len(spec.stack) :]}
    vectors = [s for s in offloaded if _vector_in_stack(s) in sizes and not _MATRIX.search(s.name)]
    if vectors:
        name, shape = vectors[0].name, vectors[0].shape
        _logger.warning(
            f"zenflow treats {name} of shape {shape} as a matrix with {vectors[0].n} channels, and "
            f"{len(vectors) - 1} other leaves likewise, although this axis counts layers or "
            "experts in other leaves. If they are norms or biases, keep them on the device: "
            f"resident=lambda path, x: x.shape[:-1] == {shape[:-1]}. To silence this warning, pass "
            "resident=lambda path, x: False."
        )


def _vector_in_stack(spec: LeafSpec) -> tuple[tuple[int, ...], int] | None:
    """Returns the stack and the size of a leaf that may be a vector for each stack entry."""
    *stack, size = spec.shape
    # A layer is wider than a model is deep, unlike a kernel next to `(embed, heads, width)`.
    is_vector = spec.axis == len(stack) - 1 and spec.n <= size
    return ((*stack,), size) if is_vector else None


def warn_of_a_part(params: Any) -> None:
    """Warns that `max_grad_norm` covers only a part of a tree, as in `optax.partition`."""
    nodes = jax.tree.leaves(params, is_leaf=_is_masked)
    masked = sum(map(_is_masked, nodes))
    if masked:
        _logger.warning(
            "`max_grad_norm` clips by the norm of this `zenflow`'s leaves "
            f"({len(nodes) - masked}). `optax.partition` or `optax.masked` hides other leaves "
            f"({masked}). If these are trained, use `optax.clip_by_global_norm` before the "
            "partition instead."
        )


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)
