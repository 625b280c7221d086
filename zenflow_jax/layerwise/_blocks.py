"""A block's weights in pinned host memory, and its AdamW state in NumPy.

A block is a layer, or all outer weights. Each process keeps each piece of a leaf once, however many
of its devices hold it. An update writes the state in place, but makes new arrays of weights,
because a program may still be reading the old arrays.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from zenflow_jax._device.memory import HOST, upload
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.masters import Masters
from zenflow_jax._host.moments import Moment, new_moments
from zenflow_jax._spec.leaf import DTYPES
from zenflow_jax._spec.rules import UnfitRunError
from zenflow_jax._spec.scalars import AdamScalars, window_step

#: The names of a leaf's saved arrays, each float32 with the leaf's shape.
ARRAYS = ("master", "mu", "nu")
_EVERY = np.ones((1, 1), bool)


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A flattened part of a leaf on some of this process's devices, with its AdamW state."""

    index: tuple[slice, ...]  # the piece's place in the leaf, with starts and stops
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
    abstract: Any  # shape, dtype, and sharding in pinned host memory
    devices: tuple[Any, ...]  # this process's devices
    decays: bool
    pieces: tuple[Piece, ...]  # none if the leaf is frozen


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """A layer, or the outer weights, with its state; `Snapshot` saves it as one unit."""

    name: str
    treedef: Any
    leaves: tuple[Leaf, ...]
    trains: bool

    @property
    def nbytes(self) -> int:
        pieces = (piece for leaf in self.leaves for piece in leaf.pieces)
        state_arrays = (x for piece in pieces for x in (piece.master, piece.mu, piece.nu))
        return sum(array.nbytes for x in state_arrays for array in x.arrays)

    def alias(self) -> "Block":
        return self  # an update writes the arrays in place

    def device_bytes(self) -> Counter[Any]:
        """Returns the bytes of the weights on each of this process's devices."""
        sizes = Counter[Any]()
        for leaf in self.leaves:
            x = leaf.abstract
            piece = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            sizes.update(dict.fromkeys(leaf.devices, piece))
        return sizes

    def copy(self) -> "Block":
        def copied(piece: Piece) -> Piece:
            return dataclasses.replace(piece, **{x: getattr(piece, x).copy() for x in ARRAYS})

        leaves = [dataclasses.replace(x, pieces=tuple(map(copied, x.pieces))) for x in self.leaves]
        return dataclasses.replace(self, leaves=tuple(leaves))

    def to_device(self, weights: list[jax.Array]) -> Any:
        """Starts to copy weights from host memory to the device; returns the user's tree."""
        return jax.tree.unflatten(self.treedef, _moved(weights, self._shardings[0]))

    def to_host(self, gradient: Any) -> list[jax.Array]:
        """Starts to copy a gradient from the device to host memory."""
        return _moved(jax.tree.leaves(gradient), self._shardings[1])

    @functools.cached_property
    def _shardings(self) -> tuple[list[Any], list[Any]]:
        # Created once, because creating them takes longer than copying a small array.
        in_host = [leaf.abstract.sharding for leaf in self.leaves]
        return [x.with_memory_kind("device") for x in in_host], in_host

    @property
    def abstract(self) -> Any:
        """Returns the weights' shapes and placements, as the user's tree."""
        return jax.tree.unflatten(self.treedef, [leaf.abstract for leaf in self.leaves])

    def update(
        self,
        gradients: Sequence[jax.Array],
        factor: float,
        scalars: AdamScalars,
        counted: int,
        adam: HostAdam,
    ) -> None:
        """Takes AdamW step number `counted` with `factor` times the gradients, in host memory."""
        undecayed = scalars._replace(weight_decay=0.0)
        for leaf, gradient in zip(self.leaves, gradients, strict=True):
            scaled = window_step(scalars if leaf.decays else undecayed, 1, None)
            for piece in leaf.pieces:
                g = np.asarray(gradient.addressable_data(piece.positions[0]))
                steps = np.full((1, 1), counted - 1, np.int32)
                weighed = [(g.reshape(piece.master.shape), factor)]
                arrays = piece.master, piece.mu, piece.nu
                for _ in adam.adamw(*arrays, steps, weighed, 1.0, _EVERY, scaled):
                    pass

    def weights(self) -> list[jax.Array]:
        """Makes the leaves' weights from their masters: new arrays in pinned host memory."""
        return [_assembled(leaf, lambda piece: piece.master.to_upload) for leaf in self.leaves]

    def masters(self) -> Any:
        """Copies the float32 masters to new arrays in pinned host memory, as the user's tree."""
        arrays = [_assembled(leaf, lambda piece: piece.master.as_float32()) for leaf in self.leaves]
        # The next update may write masters that are still being copied.
        return jax.tree.unflatten(self.treedef, jax.block_until_ready(arrays))


def make_block(
    name: str,
    tree: Any,
    *,
    trains: bool,
    mask: Callable[[Any], Any] | None,
    compact: bool,
    saved: Iterator[Mapping[str, Any]] | None,
) -> tuple[Block, list[jax.Array]]:
    """Makes a block and its weights in host memory, from the user's tree or from `saved`."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    masked = jax.tree.map(lambda _: True, tree) if mask is None else mask(tree)
    if jax.tree.structure(masked) != treedef:
        raise TypeError(
            f"The result of `mask` differs from {name} in structure. Return a bool for each weight."
        )
    arrays, leaves = [], []
    saved = saved if trains else None
    for (path, x), decay in zip(pairs, jax.tree.leaves(masked), strict=True):
        inner = jax.tree_util.keystr(path, simple=True, separator=".")
        full = f"{name}.{inner}" if inner else name
        if (dtype := jnp.result_type(x)) not in DTYPES:
            raise TypeError(
                f"{full} is {dtype.name}, but weights must be float32, bfloat16 or float16. Pass "
                "arrays that are not weights in the batch, or return them from `first` in `shared`."
            )
        if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
            x = upload(np.asarray(x), jax.local_devices()[0], HOST)
        arrays.append(x)
        saved_leaf = None if saved is None else next(saved, None)
        if saved is not None:
            shape = None if saved_leaf is None else tuple(saved_leaf["master"].shape)
            if shape != x.shape:
                raise UnfitRunError(
                    f"{full} has the shape {x.shape}, but {shape or 'nothing'} in `state`. Resume "
                    "with the saved run's model and `frozen`."
                )
        elif isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(f"{full} has a shape but no values. Pass an array, or pass `state`.")
        leaves.append(_make_leaf(full, x, bool(decay), trains, compact, saved_leaf))
    block = Block(name, treedef, tuple(leaves), trains)
    weights = moved(arrays, HOST) if saved is None else block.weights()
    # The user may reuse NumPy's memory for the next layer.
    return block, jax.block_until_ready(weights)


def _make_leaf(path: str, x: Any, decays: bool, trains: bool, compact: bool, saved: Any) -> Leaf:
    devices = list(x.sharding.addressable_devices_indices_map(x.shape))
    holders: dict[Any, list[Any]] = {}  # the devices, in all processes, that hold each piece
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, x.shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    pieces = []
    for bounds, holding in holders.items() if trains else ():
        positions = tuple(devices.index(device) for device in holding if device in devices)
        if not positions:
            continue
        index = tuple(slice(*pair) for pair in bounds)
        flat = (1, 1, 1, math.prod(b - a for a, b in bounds))
        saved_here = holding[0].process_index == jax.process_index()
        arrays = Masters.zeros(flat, x.dtype), *new_moments(flat, compact=compact)
        piece = Piece(index, positions, saved_here, *arrays)
        if saved is None:
            piece.master.write(np.asarray(x.addressable_data(positions[0])))
        else:
            for name in ARRAYS:
                getattr(piece, name).write(np.asarray(saved[name][index]))
        pieces.append(piece)
    where = x.sharding.with_memory_kind(HOST)
    abstract = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    return Leaf(path, abstract, tuple(devices), decays, tuple(pieces))


def _assembled(leaf: Leaf, numbers_of: Callable[[Piece], np.ndarray]) -> jax.Array:
    on_devices: list[Any] = [None] * len(leaf.devices)
    for piece in leaf.pieces:
        numbers = numbers_of(piece).reshape(piece.shape)
        for position in piece.positions:
            on_devices[position] = upload(numbers, leaf.devices[position], HOST)
    x = leaf.abstract
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, on_devices)


def moved(tree: Any, memory_kind: str) -> Any:
    """Copies arrays to another memory kind of their devices, without a program or a wait."""
    return _moved(tree, jax.tree.map(lambda x: x.sharding.with_memory_kind(memory_kind), tree))


def _moved(tree: Any, shardings: Any) -> Any:
    if all(x.is_fully_addressable for x in jax.tree.leaves(shardings)):
        return jax.device_put(tree, shardings)

    def move(x: jax.Array, sharding: Any) -> jax.Array:
        # `jax.device_put` cannot move arrays that span processes (jax 0.10.2 and 0.11.2).
        kind = sharding.memory_kind
        pieces = [
            jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind=kind))
            for shard in x.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, pieces)

    return jax.tree.map(move, tree, shardings)
