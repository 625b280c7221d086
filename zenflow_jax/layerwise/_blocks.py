"""A block's weights in pinned host memory, and its AdamW state in NumPy.

A block is a layer, or all outer weights. Each process keeps each piece of a leaf once, however many
of its devices hold it. An update writes the state in place, and makes new arrays of weights: a
program may still read the old ones.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from zenflow_jax._device.memory import HOST, upload
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.masters import Masters
from zenflow_jax._host.moments import Moment, new_moments
from zenflow_jax._spec.scalars import AdamScalars, window_step

#: The names of a leaf's saved arrays, each float32 with the leaf's shape.
ARRAYS = ("master", "mu", "nu")
_EVERY = np.ones((1, 1), bool)


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A part of a leaf that some of this process's devices hold, flat, with its AdamW state."""

    index: tuple[slice, ...]  # its place in the leaf, with starts and stops
    positions: tuple[int, ...]  # the devices' places among the leaf's addressable devices
    saved: bool  # whether this process saves it
    master: Masters
    mu: Moment
    nu: Moment

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in self.index)


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Any  # in pinned host memory
    devices: tuple[Any, ...]  # this process's
    decays: bool
    pieces: tuple[Piece, ...]  # none if the leaf is frozen

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)


@dataclasses.dataclass(frozen=True, eq=False)
class BlockState:
    """The state of a block's leaves; `Snapshot` saves it in one piece."""

    leaves: tuple[Leaf, ...]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._arrays())

    def alias(self) -> "BlockState":
        return self  # an update writes the arrays, and replaces none

    def copy(self) -> "BlockState":
        def copied(piece: Piece) -> Piece:
            return dataclasses.replace(piece, **{x: getattr(piece, x).copy() for x in ARRAYS})

        return BlockState(
            tuple(
                dataclasses.replace(leaf, pieces=tuple(map(copied, leaf.pieces)))
                for leaf in self.leaves
            )
        )

    def _arrays(self) -> Iterator[np.ndarray]:
        for leaf in self.leaves:
            for piece in leaf.pieces:
                for name in ARRAYS:
                    yield from getattr(piece, name).arrays

    def update(
        self,
        gradients: Sequence[jax.Array],
        factor: float,
        scalars: AdamScalars,
        counted: int,
        adam: HostAdam,
    ) -> None:
        """Takes the AdamW step number `counted`, with gradients in host memory times `factor`."""
        undecayed = scalars._replace(weight_decay=0.0)
        for leaf, gradient in zip(self.leaves, gradients, strict=True):
            of_step = window_step(scalars if leaf.decays else undecayed, 1, None)
            for piece in leaf.pieces:
                g = np.asarray(gradient.addressable_data(piece.positions[0]))
                steps = np.full((1, 1), counted - 1, np.int32)
                weighed = [(g.reshape(piece.master.shape), factor)]
                arrays = piece.master, piece.mu, piece.nu
                for _ in adam.adamw(*arrays, steps, weighed, 1.0, _EVERY, of_step):
                    pass

    def weights(self) -> list[jax.Array]:
        """Makes the leaves' weights from their masters: new arrays in pinned host memory."""
        return [_assembled(leaf) for leaf in self.leaves]

    def masters(self, i: int) -> np.ndarray:
        """Returns leaf `i`'s masters: float32, whole; all of its pieces must be here."""
        leaf = self.leaves[i]
        whole = np.empty(leaf.shape, np.float32)
        for piece in leaf.pieces:
            whole[piece.index] = piece.master.as_float32().reshape(piece.shape)
        return whole


def make_leaf(
    path: str,
    x: jax.Array,
    *,
    decays: bool,
    trains: bool,
    compact: bool,
    saved: Mapping[str, Any] | None,
) -> Leaf:
    """Makes a leaf and its state: from the weights `x`, or the `saved` arrays."""
    shards = x.addressable_shards
    by_index: dict[Any, list[int]] = {}
    for position, shard in enumerate(shards):
        by_index.setdefault(tuple(map(_bounds, shard.index, x.shape)), []).append(position)
    pieces = []
    for bounds, positions in by_index.items() if trains else ():
        index = tuple(slice(*pair) for pair in bounds)
        flat = (1, 1, 1, math.prod(b - a for a, b in bounds))
        piece = Piece(
            index,
            tuple(positions),
            any(shards[i].replica_id == 0 for i in positions),
            Masters.zeros(flat, x.dtype),
            *new_moments(flat, compact=compact),
        )
        if saved is None:
            piece.master.write(np.asarray(shards[positions[0]].data))
        else:
            for name in ARRAYS:
                getattr(piece, name).write(np.asarray(saved[name][index]))
        pieces.append(piece)
    return Leaf(
        path=path,
        shape=x.shape,
        dtype=np.dtype(x.dtype),
        sharding=x.sharding.with_memory_kind(HOST),
        devices=tuple(shard.device for shard in shards),
        decays=decays,
        pieces=tuple(pieces),
    )


def _bounds(s: slice, size: int) -> tuple[int, int]:
    return s.indices(size)[:2]


def _assembled(leaf: Leaf) -> jax.Array:
    on_devices: list[Any] = [None] * len(leaf.devices)
    for piece in leaf.pieces:
        numbers = piece.master.to_upload.reshape(piece.shape)
        for position in piece.positions:
            on_devices[position] = upload(numbers, leaf.devices[position], HOST)
    return _joined(on_devices, leaf.shape, leaf.sharding)


def moved(tree: Any, memory_kind: str) -> Any:
    """Copies arrays to another memory of their devices, without a program; does not wait."""

    def move(x: jax.Array) -> jax.Array:
        # `jax.device_put` moves no array that other processes share.
        pieces = [
            jax.device_put(
                shard.data, SingleDeviceSharding(shard.device, memory_kind=memory_kind)
            )
            for shard in x.addressable_shards
        ]
        return _joined(pieces, x.shape, x.sharding.with_memory_kind(memory_kind))

    if all(x.is_fully_addressable for x in jax.tree.leaves(tree)):
        return jax.device_put(
            tree, jax.tree.map(lambda x: x.sharding.with_memory_kind(memory_kind), tree)
        )
    return jax.tree.map(move, tree)


def _joined(pieces: Sequence[Any], shape: tuple[int, ...], sharding: Any) -> jax.Array:
    return jax.make_array_from_single_device_arrays(shape, sharding, list(pieces))


def map_leaves(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """Maps (path, leaf) of a block's tree."""

    def call(path: Any, x: Any) -> Any:
        return function(jax.tree_util.keystr(path, simple=True, separator="."), x)

    return jax.tree_util.tree_map_with_path(call, tree)
