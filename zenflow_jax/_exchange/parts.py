"""Cuts this process's parts of offloaded leaves out of global arrays, and reassembles them.

The host keeps each part of this process's devices once, however many devices hold it. All arrays on
a mesh list their local pieces in the same order; a device's place in this order is its *position*.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from zenflow_jax._device.memory import read, shape_with_rank, without_units
from zenflow_jax._device.shards import Shard
from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._spec.groups import group_specs
from zenflow_jax._spec.leaf import LeafSpec

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a leaf; each of its arrays is on a single device."""

    leaf: int  # number among the offloaded leaves
    spec: LeafSpec  # the spec as if the part were the whole leaf, in the host's axis order
    index: tuple[slice, ...]  # the part's place in the leaf, in the same order
    first: int  # the number of its first channel in the leaf
    positions: tuple[int, ...]  # the positions of this process's devices that hold it
    devices: tuple[Any, ...]  # the jax devices at these positions
    saved: bool  # whether this process saves it

    def of(self, x: jax.Array | None) -> jax.Array:
        """Returns the part's piece of `x`, from its first device; `x` is placed like the leaf."""
        assert x is not None, "a part belongs to an offloaded leaf"
        return x.addressable_data(self.positions[0])

    def cut(self, piece: np.ndarray) -> np.ndarray:
        """Returns this part's range of the device's piece, which may be larger."""
        if self.spec.start is None or piece.shape[0] == self.spec.shape[0]:
            return piece
        return piece[self.index[0]]

    def cut_mail(self, piece: np.ndarray) -> np.ndarray:
        """Returns this part's range of a mail's piece, without the unit axes."""
        return self.cut(piece.reshape(without_units(piece.shape, len(self.spec.shape))))


@dataclasses.dataclass(frozen=True)
class OffloadedLeaves:
    """The offloaded leaves of one run, and this process's parts of them."""

    places: tuple[int, ...]  # each leaf's index in the state
    specs: tuple[LeafSpec, ...]
    parts: tuple[Part, ...]
    groups: tuple["Group", ...]

    @classmethod
    def of(cls, state: ZenFlowState) -> "OffloadedLeaves":
        """Finds a state's offloaded leaves."""
        places = [i for i, leaf in enumerate(state.leaves) if not leaf.spec.resident]
        specs = tuple(state.leaves[i].spec for i in places)
        parts = tuple(parts_of(specs, [state.mail[i] for i in places]))
        groups = tuple(Group.of(j, specs, parts) for j in range(state.schedule.groups))
        return cls(tuple(places), specs, parts, groups)

    @functools.cached_property
    def pieces(self) -> tuple[tuple[int, ...], ...]:
        """Returns the part numbers of each piece: a single part, or its ranges in order."""
        by_piece = itertools.groupby(
            range(len(self.parts)), key=lambda i: (self.parts[i].leaf, self.parts[i].positions)
        )
        return tuple(tuple(numbers) for _, numbers in by_piece)

    def pick(self, values: Iterable[_T]) -> list[_T]:
        every = list(values)
        return [every[i] for i in self.places]


@dataclasses.dataclass(frozen=True)
class Group:
    """The leaves, or ranges of leaves, whose windows close together."""

    leaves: tuple[int, ...]  # numbers among the offloaded leaves
    specs: tuple[LeafSpec, ...]  # for leaves or ranges
    part_numbers: tuple[int, ...]
    parts: tuple[Part, ...]  # these parts, with leaf numbers within the group

    @functools.cached_property
    def on_one_device(self) -> bool:
        """Returns whether the group's leaves are on one device, the run's only device."""
        return all(spec.placement is None for spec in self.specs)

    @functools.cached_property
    def in_ranges(self) -> bool:
        return any(spec.start is not None for spec in self.specs)

    @classmethod
    def of(cls, group: int, specs: Sequence[LeafSpec], parts: Sequence[Part]) -> "Group":
        by_leaf = group_specs(specs, group)
        order = {leaf: i for i, leaf in enumerate(by_leaf)}
        numbers = tuple(i for i, part in enumerate(parts) if part.spec.group == group)
        return cls(
            leaves=tuple(by_leaf),
            specs=tuple(by_leaf.values()),
            part_numbers=numbers,
            parts=tuple(dataclasses.replace(parts[i], leaf=order[parts[i].leaf]) for i in numbers),
        )

    def pick(self, values: Sequence[_T]) -> list[_T]:
        return [values[i] for i in self.leaves]


def parts_of(specs: Sequence[LeafSpec], mail: Sequence[Any]) -> list[Part]:
    """Finds this process's parts of offloaded leaves, by the sharding of their mail."""
    parts: list[Part] = []
    for number, (leaf, sent) in enumerate(zip(specs, mail, strict=True)):
        spec = leaf.on_host
        axis = spec.axis
        assert axis is not None
        # The shards' own indices would be wrong: before a step, mail may be smaller than the leaf.
        shape = shape_with_rank(spec.shape, sent.ndim)
        indices = sent.sharding.addressable_devices_indices_map(shape)
        holders: dict[tuple[tuple[int, int], ...], list[tuple[int, Any, int]]] = {}
        for position, shard in enumerate(sent.addressable_shards):
            index = indices[shard.device]
            ranges = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
            key = without_units(ranges, len(spec.shape))
            holders.setdefault(key, []).append((position, shard.device, shard.replica_id))
        for key, held in holders.items():
            positions, devices, replicas = zip(*held, strict=True)
            index = tuple(slice(*ends) for ends in key)
            for part in spec.ranges:
                if part.start is not None:
                    layers = slice(part.start, part.start + part.shape[0])
                    index = (layers, *index[1:])
                parts.append(
                    Part(
                        leaf=number,
                        spec=Shard(part).part,
                        index=index,
                        first=key[axis][0],
                        positions=positions,
                        devices=devices,
                        saved=0 in replicas,
                    )
                )
    return parts


def devices_of(weights: Sequence[jax.Array]) -> set[Any]:
    return {device for weight in weights for device in weight.sharding.device_set}


def host_part(weight: jax.Array, part: Part, spec: LeafSpec) -> np.ndarray:
    """Reads a part of a parameter, in the host's axis order; `spec` is the whole leaf's."""
    index = spec.exchanged(part.index)
    for shard in weight.addressable_shards:
        ends = [s.indices(size)[:2] for s, size in zip(shard.index, weight.shape, strict=True)]
        pairs = list(zip(index, ends, strict=True))
        if all(low <= s.start and s.stop <= high for s, (low, high) in pairs):
            inside = tuple(slice(s.start - low, s.stop - low) for s, (low, _) in pairs)
            return spec.turned(read(shard.data)[inside])
    raise AssertionError("this process's parts are inside its blocks")


def host_channels(channels: jax.Array, part: Part) -> np.ndarray:
    """Copies a part's selected channels, `(entries, k)`, counted from the part's first channel."""
    # A live view of the array would block its donation.
    shape = part.spec.view3(part.spec.k)[:2]
    return np.array(part.cut(read(channels))).reshape(shape) - part.first


def part_sharding(weight: jax.Array, spec: LeafSpec) -> jax.sharding.Sharding:
    """Returns the sharding for an array assembled from a leaf's parts, in the host's order."""
    if not isinstance(weight.sharding, NamedSharding):
        return weight.sharding
    return NamedSharding(weight.sharding.mesh, Shard(spec).at_host())


def assemble(
    pieces: Sequence[jax.Array], shape: Sequence[int], sharding: jax.sharding.Sharding
) -> jax.Array:
    """Assembles one array from the pieces on this process's devices, without a copy."""
    if not isinstance(sharding, NamedSharding):
        return pieces[0]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, pieces)


def keep_sharding(new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns `new` with `old`'s sharding, spelled in the same way.

    jit distinguishes `P("data")` from `P("data", None)`, and compiles a step for each spelling.
    """
    # Tests identity first, because comparing is slower.
    if new.sharding is old.sharding or not isinstance(old.sharding, NamedSharding):
        return new
    if new.sharding == old.sharding:
        return new
    return assemble([s.data for s in new.addressable_shards], old.shape, old.sharding)


def by_leaf(parts: Sequence[Part], pieces: Sequence[Sequence[_T]]) -> list[list[_T]]:
    """Returns each leaf's pieces in device order, from each part's pieces."""
    count = 1 + max((part.leaf for part in parts), default=-1)
    by_position: list[dict[int, _T]] = [{} for _ in range(count)]
    for part, on_devices in zip(parts, pieces, strict=True):
        by_position[part.leaf].update(zip(part.positions, on_devices, strict=True))
    return [[x for _, x in sorted(leaf.items())] for leaf in by_position]
