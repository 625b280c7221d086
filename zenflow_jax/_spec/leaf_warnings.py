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
from zenflow_jax._spec.resolve import selected_channels

_logger = logging.getLogger("zenflow_jax")

# A smaller share of extra selected parameters does not cause a warning.
_NEGLIGIBLE = 0.01
# The last key in a norm's or a bias's path.
_VECTOR = re.compile(r"\b(bias|scale)\W*$")


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


def warn_of_uneven_pieces(specs: Sequence[LeafSpec], topk_ratio: float) -> None:
    """Warns if a mesh adds selected channels, so that the run cannot resume on fewer devices."""
    divided = [s for s in specs if not s.resident and s.pieces > 1]
    uneven = [s for s in divided if s.k != selected_channels(topk_ratio, s.n, 1)]
    if not uneven:
        return
    first = uneven[0]
    # Each piece selects a whole number of channels if the ratio is a multiple of 1 / common.
    common = math.gcd(*(s.n // s.pieces for s in divided))
    even = selected_channels(topk_ratio, common, 1) / common
    remedy = f"with topk_ratio={even!r} or " if even <= 2 * topk_ratio else ""
    _logger.warning(
        f"zenflow selects {first.k} channels of {first.name or 'a bare array'}, because the mesh "
        f"divides its channel axis into {first.pieces} pieces; on one device, it would select "
        f"{selected_channels(topk_ratio, first.n, 1)}. This run's checkpoints can be resumed only "
        "on a mesh that leads to the same number. To resume on fewer devices, start the run "
        f"{remedy}with a mesh that divides other axes."
    )


def warn_of_stacked_vectors(specs: Sequence[LeafSpec]) -> None:
    """Warns about offloaded leaves that are named like a norm or a bias, as in scanned layers."""
    named = [s for s in specs if not s.resident and _VECTOR.search(s.name)]
    if named:
        _logger.warning(
            f"zenflow treats {named[0].name} of shape {named[0].shape} as a matrix with "
            f"{named[0].n} channels, and {len(named) - 1} other leaves likewise. If they are norms "
            "or biases of stacked layers, keep them on the device, for example with "
            'resident=lambda path, x: "scale" in str(path[-1]). To silence this warning, pass '
            "resident=lambda path, x: False."
        )


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
