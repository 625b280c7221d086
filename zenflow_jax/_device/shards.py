"""Runs work on the leaves of a mesh: each device treats its own part as a whole leaf.

`on_each_device` is a `shard_map` for leaves. Its function sees the shapes and channels of one
device, and communicates only through `Shard.sum`, `Shard.gather` and the like. A leaf on one device
goes through the same code, without a `shard_map`.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from zenflow_jax._spec.leaf import LeafSpec
from zenflow_jax._spec.mesh import MeshAxes, explicit_axes, mesh_axes, partition_spec

#: The partition spec for replicated arrays.
REPLICATED = PartitionSpec()


class Shard:
    """A leaf as one device sees it: its pieces of the leaf's arrays, and where these lie on a mesh.

    The `at_` methods return the partition specs of the leaf's global arrays, which are all
    `REPLICATED` for a leaf on one device. `on_each_device` passes a shard to its function, which
    may also use the other methods: they communicate.

    Attributes:
        block: The leaf's spec, as if this device's block were the whole parameter.
        part: The leaf's spec, as if this device's part were the whole parameter.
        shares: For each axis, the mesh axes that divide a block among the devices that hold it.
    """

    def __init__(self, spec: LeafSpec):
        self._spec, self._place = spec, spec.placement
        self.block = self.part = spec
        self._block_axes: MeshAxes = ((),) * len(spec.shape)
        self._part_axes = self.shares = self._block_axes
        self._names: tuple[str, ...] = ()  # all mesh axes
        if (place := spec.placement) is not None:
            self.block, self.part = _cut(spec, place.block), _cut(spec, place.part)
            self._block_axes, self._part_axes, self.shares = place.block, place.part, place.shares
            self._names = tuple(place.mesh.axis_names)

    def at_block(self) -> PartitionSpec:
        """Returns the partition spec for the parameter and its updates."""
        return partition_spec(self._block_axes)

    def at_part(self) -> PartitionSpec:
        """Returns the spec for gradients, masters and moments on the device, whole or selected."""
        return partition_spec(self._part_axes)

    def at_host(self, rank: int | None = None) -> PartitionSpec:
        """Returns the spec for mail and uploads, whose axes have the order of `LeafSpec.on_host`.

        `rank` includes the unit axes that `memory.with_rank` adds.
        """
        axes, own = self._spec.exchanged(self._part_axes), len(self._spec.shape)
        return partition_spec((*axes[:-2], *((),) * ((rank or own) - own), *axes[-2:]))

    def at_channels(self) -> PartitionSpec:
        """Returns the spec for arrays with one entry per channel: `(*stack, n or k)`."""
        spec, axes = self._spec, self._block_axes
        return partition_spec(
            () if spec.axis is None else (*axes[: len(spec.stack)], axes[spec.axis])
        )

    def at_each_device(self) -> PartitionSpec:
        """Returns the spec for values that differ on every device, joined along the first axis."""
        return PartitionSpec(self._names)

    def partition(self, places: PyTree) -> Any:
        """Returns a tree of partition specs from a tree of places, such as `BLOCK`."""
        return jax.tree.map(lambda x: x if isinstance(x, PartitionSpec) else x(self), places)

    def to_local(self, channels: jax.Array) -> jax.Array:
        """Converts the leaf's `channels` to numbers on this device, which must hold all of them."""
        return channels - self._first_channel()

    def to_global(self, index: jax.Array) -> jax.Array:
        return index + self._first_channel()

    def own(self, block: jax.Array) -> jax.Array:
        """Returns this device's part of a block, or of a block's selected slices."""
        for axis, names in enumerate(self.shares):
            if names:
                assert self._place is not None
                size = block.shape[axis] // self._place.count(names)
                start = jax.lax.axis_index(names) * size
                block = jax.lax.dynamic_slice_in_dim(block, start, size, axis)
        return block

    def gather(self, part: jax.Array) -> jax.Array:
        """Returns the block, or its selected slices, from the parts on all devices that hold it."""
        for axis, names in enumerate(self.shares):
            if names:
                part = jax.lax.all_gather(part, names, axis=axis, tiled=True)
        return part

    def sum(self, per_channel: jax.Array) -> jax.Array:
        """Sums over the devices that work on the same channels; over all devices if resident."""
        return _psum(per_channel, [x for x, apart in self._divisions() if not apart])

    def sum_channels(self, x: jax.Array) -> jax.Array:
        """Sums over the devices that work on different channels; the counterpart of `sum`."""
        return _psum(x, [x for x, apart in self._divisions() if apart])

    def sum_everywhere(self, x: jax.Array) -> jax.Array:
        """Sums over all devices, including replicas."""
        return _psum(x, self._names)

    def first(self, axis: int) -> Any:
        """Returns the offset of this device's block in the leaf, along an axis."""
        names = self._block_axes[axis]
        return jax.lax.axis_index(names) * self.block.shape[axis] if names else 0

    def _first_channel(self) -> Any:
        return 0 if self._spec.axis is None else self.first(self._spec.axis)

    def _divisions(self) -> list[tuple[str, bool]]:
        """Returns the mesh axes that divide the work, and whether each divides the channels."""
        spec = self._spec
        stack = 0 if spec.resident else len(spec.stack)
        axes = enumerate(self._part_axes)
        return [(x, i < stack or i == spec.axis) for i, names in axes for x in names]


def _psum(x: jax.Array, names: Sequence[str]) -> jax.Array:
    return jax.lax.psum(x, tuple(names)) if names else x


#: Where a leaf's arrays lie, for `on_each_device`; `Shard` explains each.
BLOCK, PART, HOST_ORDER = Shard.at_block, Shard.at_part, Shard.at_host
CHANNELS, EACH_DEVICE = Shard.at_channels, Shard.at_each_device


def on_each_device(
    f: Callable[..., PyTree], spec: LeafSpec, takes: Sequence[PyTree], gives: PyTree, *args: PyTree
) -> Any:
    """Runs `f(shard, *args)` on every device in the leaf's mesh; `f` sees one device's pieces.

    `takes` contains a place, or a prefix tree of places, for each argument, such as `BLOCK`; None
    allows any value. `gives` is the place, or tree of places, for the result.
    """
    shard, place = Shard(spec), spec.placement
    if place is None:
        return f(shard, *args)
    in_specs, out_specs = shard.partition((tuple(takes), gives))
    leaves, structure = jax.tree.flatten(args)
    specs = jax.tree.leaves(jax.tree.broadcast(in_specs, args))
    mesh = place.running_mesh(leaves)
    if explicit := explicit_axes(mesh):
        # With Explicit axes, jax does not move an argument to where `in_specs` expects it.
        leaves = [
            jax.sharding.reshard(x, NamedSharding(mesh, _only(explicit, spec)))
            for x, spec in zip(leaves, specs, strict=True)
        ]
    # XLA crashes when it compiles an empty argument (jax 0.11.2, not 0.10.2), so `f` gets
    # constants.
    empty = {
        i: (NamedSharding(mesh, spec).shard_shape(x.shape), x.dtype)
        for i, (x, spec) in enumerate(zip(leaves, specs, strict=True))
        if not np.size(x)
    }
    full = [i for i in range(len(leaves)) if i not in empty]

    def on_one(*arrays: jax.Array) -> Any:
        local = {i: jnp.zeros(*kind) for i, kind in empty.items()}
        local.update(zip(full, arrays, strict=True))
        return f(shard, *jax.tree.unflatten(structure, [local[i] for i in range(len(leaves))]))

    return jax.shard_map(
        on_one,
        mesh=mesh,
        in_specs=tuple(specs[i] for i in full),
        out_specs=out_specs,
        # `Shard.gather` returns equal values on all devices, but their type does not show this.
        check_vma=False,
    )(*(leaves[i] for i in full))


def _only(names: Collection[str], spec: PartitionSpec) -> PartitionSpec:
    axes = mesh_axes(spec, len(spec))
    return partition_spec(tuple(tuple(x for x in axis if x in names) for axis in axes))


def placed_gradient(g: jax.Array, spec: LeafSpec) -> jax.Array:
    """Forces a traced gradient into its parameter's placement before it is read.

    Otherwise the compiler may sum whole gradients over all devices to suit the first read.
    """
    place = spec.placement
    if place is None or not any(place.shares) or not isinstance(g, Tracer):
        return g
    mesh = place.running_mesh([g])
    if explicit_axes(mesh):
        return g
    target = NamedSharding(mesh, partition_spec(place.block))
    return jax.lax.with_sharding_constraint(g, target)


def _cut(spec: LeafSpec, axes: MeshAxes) -> LeafSpec:
    place = spec.placement
    assert place is not None
    shape = tuple(n // place.count(names) for n, names in zip(spec.shape, axes, strict=True))
    k = 0 if spec.axis is None else spec.k // place.count(axes[spec.axis])
    return dataclasses.replace(spec, shape=shape, k=k, placement=None)
