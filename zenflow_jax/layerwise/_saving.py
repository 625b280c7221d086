"""The saved state of a trainer: a tree of arrays, or one file for each process.

Names and format match an engine's state, so `EngineSave` and `EngineRestore` accept it. Leaves are
numbered by their position among all trained leaves. Files contain a checksum for each array.
"""

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zenflow_jax._checkpoint.saving import Snapshot
from zenflow_jax._checkpoint.stored import StoredArray, write_state
from zenflow_jax._device.memory import HOST, upload
from zenflow_jax._spec.rules import UnfitRunError
from zenflow_jax.layerwise._blocks import Block, Bundle
from zenflow_jax.layerwise._optimizer import Parts, flat, is_large

#: The number of the layout, in the name of an array.
LAYOUT_NAME = "layout_2_of_layerwise_trainers"


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A bundle's arrays, as a `Snapshot` knows leaves. They never change, so none is copied."""

    number: int
    leaves: Sequence[Parts]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in flat(self.leaves))

    def alias(self) -> "_Kept":
        return self

    copy = alias


def new_snapshot(blocks: Sequence[Block], kept_bytes: int) -> Snapshot:
    """Captures the state: updates may replace arrays, and this many bytes of old arrays stay."""
    bundles = [(block, bundle) for block in blocks for bundle in block.bundles]
    kept = {int(bundle.number): _kept(block, bundle) for block, bundle in bundles}
    return Snapshot(kept, kept_bytes)


def _kept(block: Block, bundle: Bundle) -> _Kept:
    return _Kept(int(bundle.number), [block.leaves[i] for i in bundle.places])


@dataclasses.dataclass(frozen=True, eq=False)
class TrainerSnapshot:
    """A trainer's state at one moment, to be copied or written once, by any thread."""

    shapes: Sequence[Parts]  # of all trained leaves
    snapshot: Snapshot
    counts: Mapping[str, np.ndarray]
    processes: Sequence[int]  # ascending; each writes a file

    def close(self) -> None:
        """Releases all arrays; unsaved arrays stay unsaved. Safe to call twice."""
        self.snapshot.close()

    def tree(self) -> dict[str, Any]:
        """Copies the state into a tree of NumPy arrays; all pieces must be in this process."""
        if any(not x.sharding.is_fully_addressable for x in flat(self.shapes)):
            raise ValueError("Weights are on devices of several processes. Save with `EngineSave`.")
        leaves: list[dict[str, Any]] = [{} for _ in self.shapes]
        for number, name, x in self._arrays():
            leaves[number][name] = np.array(x).reshape(_saved_shape(x.shape))
        return {"leaves": leaves, "counts": dict(self.counts), "layout": _layout()}

    def write(self, folder: Path) -> None:
        """Writes this process's file into an existing folder, and closes the snapshot."""
        small = {"counts": self.counts, "layout": _layout()}
        moment = "step {step}, {counted} of them counted".format(**self.counts)
        leaves = [
            {name: jax.ShapeDtypeStruct(_saved_shape(x.shape), x.dtype) for name, x in _named(leaf)}
            for leaf in self.shapes
        ]
        tensors: dict[str, tuple[Any, Sequence[int]]] = {}
        for number, leaf in enumerate(self.shapes):
            for name, x in _named(leaf):
                for place in _saved_here(x):
                    shape = tuple(s.stop - s.start for s in place)
                    tensors[f"leaves/{number}/{name}@{_start(place)}"] = x.dtype, shape
                    tensors[f"checksums/{number}/{name}/{_start(place)}"] = np.dtype(np.uint32), ()
        with contextlib.closing(self):
            write_state(folder, self.processes, moment, small, leaves, tensors, self._chunks())

    def _arrays(self) -> Iterator[tuple[int, str, jax.Array]]:
        for _, kept in self.snapshot.leaves():
            for number, leaf in enumerate(kept.leaves, kept.number):
                for name, x in _named(leaf):
                    yield number, name, x

    def _chunks(self) -> Iterator[tuple[str, int, np.ndarray]]:
        for number, name, x in self._arrays():
            for shard in x.addressable_shards:
                if shard.replica_id == 0:
                    start = _start(_bounds(shard.index, x.shape))
                    piece = np.ascontiguousarray(shard.data)
                    yield f"leaves/{number}/{name}@{start}", 0, piece
                    checksum = np.array(_checksum(piece), np.uint32)
                    yield f"checksums/{number}/{name}/{start}", 0, checksum


class SavedState:
    """Reads a saved state, leaf by leaf, and checks every array that it reads from a file."""

    def __init__(self, state: Any):
        layout = state.get("layout") if isinstance(state, Mapping) else None
        if not isinstance(layout, Mapping) or list(layout) != [LAYOUT_NAME]:
            raise UnfitRunError(
                "`state` was not saved by a `layerwise.Trainer` of this version. Resume with the "
                "version that wrote it, or start a new run from its weights."
            )
        if missing := {"leaves", "counts"} - state.keys():
            raise UnfitRunError(f"`state` lacks {min(missing)!r}. Pass a trainer's whole state.")
        self.counts: Mapping[str, Any] = state["counts"]
        self._leaves, self._checksums = state["leaves"], state.get("checksums", {})

    def read(self, number: int, paths: Sequence[str], shapes: Sequence[Parts]) -> list[jax.Array]:
        """Returns the `flat` arrays of neighbouring leaves, in the memory where they wait."""
        leaves = []
        for n, (path, shape) in enumerate(zip(paths, shapes, strict=True), number):
            saved = self._leaves[n] if n < len(self._leaves) else {}
            described = {name: (_saved_shape(x.shape), x.dtype) for name, x in _named(shape)}
            if {name: (tuple(x.shape), x.dtype) for name, x in saved.items()} != described:
                raise UnfitRunError(
                    f"{path} {list(shape.weight.shape)} or its optimizer state has other shapes in "
                    "`state`. Resume with the saved run's model, optimizer and `frozen`."
                )
            made = [self._array(n, name, x, path) for name, x in _named(shape)]
            leaves.append(Parts(made[0], tuple(made[1:])))
        return flat(leaves)

    def _array(self, number: int, name: str, shape: Any, path: str) -> jax.Array:
        saved = self._leaves[number][name]
        if isinstance(saved, StoredArray):
            saved = _checked(saved, self._checksums[str(number)][name], f"{name} of {path}")
        sharding = shape.sharding.with_memory_kind(HOST if is_large(shape) else "device")
        places = sharding.addressable_devices_indices_map(shape.shape)
        pieces = []
        for device, index in places.items():
            x = np.asarray(saved[_bounds(index, shape.shape)])
            x = x.reshape(sharding.shard_shape(shape.shape))
            pieces.append(upload(x, device, sharding.memory_kind))
        return jax.make_array_from_single_device_arrays(shape.shape, sharding, pieces)


@dataclasses.dataclass(frozen=True)
class _CheckedPiece:
    """A piece of a saved array, which is read whole, once, and compared with its checksum."""

    piece: Any
    checksum: int
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.piece.shape

    def read(self, index: tuple[slice, ...], out: np.ndarray) -> None:
        np.copyto(out, self._whole[index])

    @functools.cached_property
    def _whole(self) -> np.ndarray:
        x = np.empty(self.shape, self.piece.dtype)
        self.piece.read(tuple(slice(None) for _ in self.shape), x)
        if _checksum(x) != self.checksum:
            raise ValueError(
                f"The saved {self.name} is damaged: its checksum differs. Use another checkpoint."
            )
        return x


def _checked(saved: StoredArray, checksums: Mapping[str, Any], name: str) -> StoredArray:
    checked, pieces = StoredArray(0, name, saved.shape, saved.dtype), {}
    for start, piece in saved.pieces.items():
        pieces[start] = _CheckedPiece(piece, int(checksums[",".join(map(str, start))]), name)
    checked.pieces = pieces
    return checked


def _checksum(x: np.ndarray) -> int:
    return zlib.crc32(x.reshape(-1).view(np.uint8).data)


def _named(leaf: Parts) -> Iterator[tuple[str, Any]]:
    """Yields the arrays of a leaf with the names under which they are saved."""
    yield "weight", leaf.weight
    yield from ((f"array_{i}", x) for i, x in enumerate(leaf.others))


def _saved_here(x: Any) -> Iterator[tuple[slice, ...]]:
    """Yields the places of the pieces that this process saves: of each, the first device's."""
    here, holders = jax.process_index(), {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        place = _bounds(index, x.shape)
        holders.setdefault(_start(place), (device, place))
    yield from (place for device, place in holders.values() if device.process_index == here)


def _saved_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape or (1,)  # files name a piece by its start, which a scalar lacks


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Returns a piece's place in a saved array, with starts and stops."""
    if not shape:
        return (slice(0, 1),)
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))


def _start(place: Sequence[slice]) -> str:
    return ",".join(str(s.start) for s in place)


def _layout() -> dict[str, np.ndarray]:
    return {LAYOUT_NAME: np.array(2, np.int32)}
