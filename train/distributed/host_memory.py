"""Stacks of matrices in pinned host memory: of blocks, or of parts of a vocabulary.

A step fetches one matrix of a stack at a time. Between flushes only the optimizer state has their
selected channels; the parameters have NaN there. Code that writes weights inserts the masters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

import zenflow_jax
from train.distributed import processes

KIND = "pinned_host"


def is_stack_of_matrices(x: Any) -> bool:
    return x.ndim > 2  # a bias or scale of stacked blocks has two axes


def shardings_of(weights: Any, shardings: Any = None) -> Any:
    """Returns the sharding of each leaf of `weights`: on a device, or in its host's memory.

    `shardings` are those on a mesh; None places everything on the first device.
    """
    if shardings is None:
        first = SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: first, weights)

    def place(x: Any, where: Any) -> Any:
        return where.with_memory_kind(KIND) if is_stack_of_matrices(x) else where

    return jax.tree.map(place, weights, shardings)


def put_shapes(shapes: Any) -> Any:
    """Returns shapes on a mesh, stacks in host memory, for a described device without any."""

    def move(x: Any) -> Any:
        if not is_stack_of_matrices(x):
            return x
        mesh, spec = x.sharding.mesh.abstract_mesh, x.sharding.spec
        where = NamedSharding(mesh, spec, memory_kind=KIND)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map(move, shapes)


def put(params: Any) -> Any:
    """Moves those stacks to host memory, under jit as well."""

    def move(x: Any) -> Any:
        return jax.device_put(x, jax.memory.Space.Host) if is_stack_of_matrices(x) else x

    return jax.tree.map(move, params)


def on_device(params: Any) -> Any:
    """Returns the parameters, with None in place of those in host memory."""
    return jax.tree.map(lambda x: None if is_stack_of_matrices(x) else x, params)


def nbytes(params: Any) -> int:
    """Returns the bytes of those stacks per device."""
    stacks = [x for x in jax.tree.leaves(params) if is_stack_of_matrices(x)]
    shapes = (x.sharding.shard_shape(x.shape) if x.sharding else x.shape for x in stacks)
    return sum(math.prod(shape) * x.dtype.itemsize for shape, x in zip(shapes, stacks, strict=True))


def in_host_memory(params: Any) -> bool:
    """Returns whether any array is in host memory."""
    leaves = jax.tree.leaves(params)
    return any(isinstance(x, jax.Array) and x.sharding.memory_kind == KIND for x in leaves)


def placed(x: Any) -> Any:
    """Returns an assembled array whose memory kind jax knows.

    On a mesh jax knows it already (0.10.2).
    """
    if not isinstance(getattr(x, "sharding", None), SingleDeviceSharding):
        return x
    if x.sharding.memory_kind != KIND:
        return x
    return jax.device_put(np.asarray(x), x.sharding)


class Selected(NamedTuple):
    """Where a parameter in host memory has its selected channels."""

    leaf: int  # index of its leaf in the optimizer state
    axis: int  # of its channels
    k: int  # number of selected channels


def selected(opt_state: Any) -> list[Selected]:
    """Returns the selected channels of all parameters in host memory."""
    if not isinstance(opt_state, zenflow_jax.ZenFlowState):  # not zenflow's
        return []
    specs = enumerate(leaf.spec for leaf in opt_state.leaves)
    return [Selected(i, x.axis, x.k) for i, x in specs if x.hosted and x.k]


def with_selected(weights: Any, channels: Any, master: Any, axis: int) -> np.ndarray:
    """Returns a copied stack of matrices, with the masters of its selected channels inserted."""
    whole = np.array(processes.gather(weights))
    channels, rows = processes.gather(channels), processes.gather(master).astype(whole.dtype)
    np.put_along_axis(whole, np.expand_dims(channels, 3 - axis), rows, axis)
    return whole


def whole_weights(params: Any, opt_state: Any) -> Iterator[Any]:
    """Yields the parameters, those in host memory with their selected channels."""
    axes = {x.leaf: x.axis for x in selected(opt_state)}
    for i, x in enumerate(jax.tree.leaves(params)):
        if i not in axes:
            yield x
        else:
            leaf = opt_state.leaves[i]
            yield with_selected(x, leaf.channels, leaf.master, axes[i])
