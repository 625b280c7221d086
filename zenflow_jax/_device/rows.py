"""What each device has of several leaves, as one array with a row for each device.

An array for each leaf would cost a boundary as much as the update itself, in models of hundreds of
small leaves.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from zenflow_jax._device.shards import Layout
from zenflow_jax._plan.leaf import LeafSpec


def row(x: Array) -> Array:
    """One device's piece of one leaf as a row."""
    return x.reshape(1, -1)


def join(rows: Sequence[Array]) -> Array:
    """The rows of some leaves as one."""
    return jnp.concatenate(rows, axis=1)


def split(joined: Array, widths: Sequence[int]) -> list[Array]:
    """The inverse of `join`."""
    return jnp.split(joined, np.cumsum(widths)[:-1], axis=1)


def abstract_rows(
    weights: Sequence[Any], specs: Sequence[LeafSpec], widths: Sequence[int], dtype: Any
) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of the joined rows of some parameters' leaves."""
    beside = weights[0].sharding
    made = jax.ShapeDtypeStruct((beside.num_devices, sum(widths)), dtype)
    return of_each_device(made, beside, specs[0])


def of_each_device(made: Any, beside: Any, spec: LeafSpec) -> jax.ShapeDtypeStruct:
    """Shape and dtype of `made`, placed as what differs on every device of a leaf's parameter.

    Args:
        made: Has a shape and a dtype.
        beside: The parameter's sharding.
        spec: The leaf.
    """
    if isinstance(beside, NamedSharding):
        beside = NamedSharding(beside.mesh, Layout(spec).each_device)
    return jax.ShapeDtypeStruct(made.shape, made.dtype, sharding=beside)
