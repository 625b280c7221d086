"""Ranges of a stacked leaf's first axis: cut out of its arrays, and put back.

Parameters and state hold whole leaves; where a window closes, each range is a leaf of its own. No
mesh divides the first axis of a leaf that has ranges, so nothing moves between devices.
"""

from typing import Any

import jax
from jaxtyping import Array

from zenflow_jax._device.state import LeafState
from zenflow_jax._plan.leaf import LeafSpec


def cut(x: Any, spec: LeafSpec) -> Any:
    """A leaf's array for the range that `spec` is of; as it is if the leaf is in one piece."""
    if spec.start is None:
        return x
    return jax.lax.slice_in_dim(x, spec.start, spec.start + spec.shape[0], axis=0)


def put(whole: Array, part: Array, spec: LeafSpec) -> Array:
    """A leaf's array with `part` in the place of the range that `spec` is of."""
    if spec.start is None:
        return part
    return jax.lax.dynamic_update_slice_in_dim(whole, part, spec.start, axis=0)


def cut_state(leaf: LeafState, spec: LeafSpec) -> LeafState:
    """The state of a range."""
    if spec.start is None:
        return leaf
    return jax.tree.map(lambda x: cut(x, spec), leaf)._replace(spec=spec)


def put_state(whole: LeafState, part: LeafState) -> LeafState:
    """A leaf's state with that of a range in its place."""
    spec = part.spec
    if spec.start is None:
        return part
    part = part._replace(spec=whole.spec)
    return jax.tree.map(lambda x, y: put(x, y, spec), whole, part)
