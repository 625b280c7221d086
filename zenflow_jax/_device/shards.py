"""Runs work on leaves of a mesh: each device works on its own part, as on a whole leaf.

`on_each_device` is a `shard_map` that knows leaves. The function that it runs sees the shapes of
one device, selects among the channels of one device, and names the places where devices talk:
`Here.sum`, `Here.gather`. Nothing else moves between devices. A leaf on one device goes through the
same code, without a `shard_map`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from zenflow_jax._device.memory import mail_shape
from zenflow_jax._plan.leaf import LeafSpec
from zenflow_jax._plan.mesh import MeshAxes, partition_spec

#: The partition spec of what all devices hold alike.
REPLICATED = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Layout:
    """The partition specs of a leaf's arrays; all `REPLICATED` for a leaf on one device."""

    spec: LeafSpec

    @property
    def block(self) -> PartitionSpec:
        """For the parameter, and for what is added to it."""
        place = self.spec.placement
        return REPLICATED if place is None else partition_spec(place.block)

    @property
    def part(self) -> PartitionSpec:
        """For gradients, masters and moments, whole or selected."""
        place = self.spec.placement
        return REPLICATED if place is None else partition_spec(place.part)

    @property
    def channels(self) -> PartitionSpec:
        """For arrays with one entry per channel, `(*stack, n)` or `(*stack, k)`."""
        place, spec = self.spec.placement, self.spec
        if place is None or spec.axis is None:
            return REPLICATED
        return partition_spec((*place.block[: len(spec.stack)], place.block[spec.axis]))

    @property
    def each_device(self) -> PartitionSpec:
        """For what differs on every device, joined along the first axis."""
        place = self.spec.placement
        return REPLICATED if place is None else PartitionSpec(tuple(place.mesh.axis_names))

    def mail(self, rank: int) -> PartitionSpec:
        """For a part with the leading unit axes of mail."""
        place = self.spec.placement
        return (
            REPLICATED if place is None else partition_spec(place.part, rank - len(self.spec.shape))
        )


class Here:
    """A leaf as one device sees it, inside `on_each_device`.

    Attributes:
        block: The leaf's spec, as if this device's block of the parameter were all of it.
        part: The same for the part that this device works on.
    """

    def __init__(self, spec: LeafSpec):
        place = spec.placement
        self._place = place
        self._spec = spec
        self.block = spec if place is None else _cut(spec, place.block)
        self.part = spec if place is None else _cut(spec, place.part)

    def to_local(self, channels: jax.Array) -> jax.Array:
        """The numbers on this device of the leaf's `channels`, which must all be on it."""
        return channels - self._first()

    def to_global(self, index: jax.Array) -> jax.Array:
        """The inverse of `to_local`."""
        return index + self._first()

    def own(self, block: jax.Array) -> jax.Array:
        """This device's part of a block, or of selected slices of it."""
        for axis, names in enumerate(self.shares):
            if names:
                assert self._place is not None
                size = block.shape[axis] // self._place.count(names)
                start = jax.lax.axis_index(names) * size
                block = jax.lax.dynamic_slice_in_dim(block, start, size, axis)
        return block

    def gather(self, part: jax.Array) -> jax.Array:
        """The block, or selected slices of it, from the parts of all devices that hold it."""
        for axis, names in enumerate(self.shares):
            if names:
                part = jax.lax.all_gather(part, names, axis=axis, tiled=True)
        return part

    def sum(self, per_channel: jax.Array) -> jax.Array:
        """The sum over the devices that work on the same channels; over all, if resident."""
        if self._place is None:
            return per_channel
        axis, stack = self._spec.axis, 0 if self._spec.resident else len(self._spec.stack)
        names = [
            name
            for i, names in enumerate(self._place.part)
            if i >= stack and i != axis
            for name in names
        ]
        return jax.lax.psum(per_channel, tuple(names)) if names else per_channel

    def sum_channels(self, x: jax.Array) -> jax.Array:
        """The sum over the devices that work on different channels; the counterpart of `sum`."""
        if self._place is None:
            return x
        axis, stack = self._spec.axis, len(self._spec.stack)
        names = [
            name
            for i, names in enumerate(self._place.part)
            if i < stack or i == axis
            for name in names
        ]
        return jax.lax.psum(x, tuple(names)) if names else x

    def sum_everywhere(self, x: jax.Array) -> jax.Array:
        """The sum over all devices, also over those that hold the same."""
        return x if self._place is None else jax.lax.psum(x, self._place.mesh.axis_names)

    def number_of_device(self) -> jax.Array:
        """This device's number on its mesh, uint32."""
        if self._place is None:
            return jnp.zeros((), jnp.uint32)
        return jax.lax.axis_index(self._place.mesh.axis_names).astype(jnp.uint32)

    def sum_blocks(self, x: jax.Array) -> jax.Array:
        """The sum over the devices that hold different blocks."""
        if self._place is None:
            return x
        names = [name for names in self._place.block for name in names]
        return jax.lax.psum(x, tuple(names)) if names else x

    def to_mail(self, part: jax.Array, rank: int) -> jax.Array:
        return part.reshape(mail_shape(part.shape, rank))

    def first(self, axis: int) -> Any:
        """Where this device's block begins in the leaf, along an axis."""
        names = () if self._place is None else self._place.block[axis]
        return jax.lax.axis_index(names) * self.block.shape[axis] if names else 0

    def _first(self) -> Any:
        """The number in the leaf of this device's first channel."""
        return 0 if self._spec.axis is None else self.first(self._spec.axis)

    @property
    def shares(self) -> MeshAxes:
        """For each axis, the mesh axes among which the devices that hold a block divide it."""
        return ((),) * len(self._spec.shape) if self._place is None else self._place.shares


def on_each_device(
    f: Callable[..., Any], spec: LeafSpec, takes: Sequence[Any], gives: Any
) -> Callable[..., Any]:
    """`f(here, *args)` on every device of the leaf's mesh.

    Args:
        f: Pure. Sees one device's pieces of its arguments.
        spec: The leaf.
        takes: The partition spec of each argument, or a tree of them that is a prefix of it.
        gives: The same for the result. Where it says that devices hold the same, `f` must give the
            same.
    """
    here = Here(spec)
    place = spec.placement
    if place is None:
        return lambda *args: f(here, *args)
    mapped = jax.shard_map(
        lambda *args: f(here, *args),
        mesh=place.mesh,
        in_specs=tuple(takes),
        out_specs=gives,
        # `Here.gather` gives the same on all devices, which its type does not say.
        check_vma=False,
    )
    explicit = place.explicit
    if not explicit:
        return mapped

    def put(spec: PartitionSpec, tree: Any) -> Any:
        # With Explicit axes, jax does not move an argument to where `takes` wants it.
        names = tuple(
            tuple(x for x in entry if x in explicit)
            for entry in (e if isinstance(e, tuple) else () if e is None else (e,) for e in spec)
        )
        target = NamedSharding(place.mesh, partition_spec(names))
        return jax.tree.map(lambda x: jax.sharding.reshard(x, target), tree)

    def moved(*args: Any) -> Any:
        return mapped(
            *(
                jax.tree.map(put, take, arg, is_leaf=lambda x: isinstance(x, PartitionSpec))
                for take, arg in zip(takes, args, strict=True)
            )
        )

    return moved


def as_its_parameter(g: jax.Array, spec: LeafSpec) -> jax.Array:
    """A traced gradient that the compiler must place as its parameter before anything reads it.

    Left to itself the compiler may place it like the parts that the first reader takes. To get
    there, it may sum whole gradients over all devices in the backward pass.
    """
    place = spec.placement
    if place is None or place.explicit or not any(place.shares) or not isinstance(g, Tracer):
        return g
    target = NamedSharding(place.mesh, partition_spec(place.block))
    return jax.lax.with_sharding_constraint(g, target)


def _cut(spec: LeafSpec, axes: MeshAxes) -> LeafSpec:
    place = spec.placement
    assert place is not None
    shape = tuple(n // place.count(names) for n, names in zip(spec.shape, axes, strict=True))
    k = 0 if spec.axis is None else spec.k // place.count(axes[spec.axis])
    return dataclasses.replace(spec, shape=shape, k=k, placement=None)
