"""The saved state of a trainer: a tree of arrays, or one file for each process.

Names and format match an engine's state, so `EngineSave` and `EngineRestore` accept it. Leaves are
numbered by their position among all leaves. Files contain a checksum for each array.
"""

import contextlib
import dataclasses
import functools
import types
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from zenflow_jax._checkpoint.files import StoredArray, write_state
from zenflow_jax._checkpoint.saving import Snapshot
from zenflow_jax._device.memory import HOST, upload
from zenflow_jax._spec.checks import UnfitRunError
from zenflow_jax.layerwise._blocks import Block, devices_of
from zenflow_jax.layerwise._optimizer import Leaf, leaves_of
from zenflow_jax.layerwise._transfers import stays

#: The number of the layout, in the name of an array.
LAYOUT_NAME = "layout_2_of_layerwise_trainers"
_LAYOUT = {LAYOUT_NAME: np.array(2, np.int32)}


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A bundle's arrays, as a `Snapshot` knows leaves."""

    leaves: Sequence[Leaf]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self.leaves))


class TrainerSnapshot:
    """A trainer's state at one moment, to be copied or written once, by any thread.

    Updates may replace arrays; `kept_bytes` of old arrays stay.
    """

    def __init__(self, blocks: Sequence[Block], kept_bytes: int, counts: Mapping[str, np.ndarray]):
        kinds = [block.kind for block in blocks]
        self._shapes = [x for kind in kinds for x in zip(kind.weights, kind.others, strict=True)]
        self._small = {"counts": dict(counts), "layout": _LAYOUT}
        # Each of these writes a file.
        self._processes = sorted({device.process_index for device in devices_of(blocks)})
        kept = {
            block.number + bundle.places.start: _Kept(leaves_of(bundle.shapes, arrays))
            for block in blocks
            for bundle, arrays in block.bundles
        }
        # The arrays never change: an update makes new ones.
        self.unsaved = Snapshot(kept, kept_bytes, lambda x: x)

    def close(self) -> None:
        """Releases all arrays; unsaved arrays stay unsaved. Safe to call twice."""
        self.unsaved.close()

    def tree(self) -> dict[str, Any]:
        """Copies the state into a tree of NumPy arrays; all pieces must be in this process."""
        leaves: list[dict[str, Any]] = [{} for _ in self._shapes]
        for number, name, x in self._arrays():
            leaves[number][name] = np.array(x).reshape(_saved_shape(x))
        return {"leaves": leaves, **self._small}

    def write(self, folder: Path) -> None:
        """Writes this process's file into an existing folder, and closes the snapshot."""
        moment = "step {step}, {counted} of them counted".format(**self._small["counts"])
        tensors: dict[str, tuple[Any, Sequence[int]]] = {}
        leaves: list[dict[str, Any]] = [{} for _ in self._shapes]
        for number, leaf in enumerate(self._shapes):
            for name, x in _named(leaf):
                leaves[number][name] = jax.ShapeDtypeStruct(_saved_shape(x), x.dtype)
                shape = x.sharding.shard_shape(x.shape) or (1,)
                for start, _ in _pieces(x):
                    tensors[f"leaves/{number}/{name}@{start}"] = x.dtype, shape
                    tensors[f"checksums/{number}/{name}/{start}"] = np.dtype(np.uint32), ()
        arguments = self._processes, moment, self._small, leaves, tensors
        with contextlib.closing(self):
            write_state(folder, *arguments, self._chunks())

    def _arrays(self) -> Iterator[tuple[int, str, jax.Array]]:
        for begin, kept in self.unsaved.leaves():
            for number, leaf in enumerate(kept.leaves, begin):
                for name, x in _named(leaf):
                    yield number, name, x

    def _chunks(self) -> Iterator[tuple[str, int, np.ndarray]]:
        for number, name, x in self._arrays():
            shards = {shard.device: shard.data for shard in x.addressable_shards}
            for start, device in _pieces(x):
                piece = np.ascontiguousarray(shards[device])
                yield f"leaves/{number}/{name}@{start}", 0, piece
                checksum = np.array(_checksum(piece), np.uint32)
                yield f"checksums/{number}/{name}/{start}", 0, checksum


class SavedState:
    """Reads a saved state, leaf by leaf, and checks every array that it reads from a file."""

    def __init__(self, state: PyTree):
        layout = state.get("layout") if isinstance(state, Mapping) else None
        if not isinstance(layout, Mapping) or list(layout) != [LAYOUT_NAME]:
            raise UnfitRunError(
                "`state` was not saved by a `layerwise.Trainer` of this version. Resume with the "
                "version that wrote it, or start a new run from its weights."
            )
        self.counts: Mapping[str, Any] = state["counts"]
        self._leaves, self._checksums = state["leaves"], state.get("checksums", {})

    def read(self, number: int, path: str, shapes: Leaf) -> list[jax.Array]:
        """Returns a leaf's arrays, in the memory where they wait."""
        saved = self._leaves[number] if number < len(self._leaves) else {}
        expected = {name: (_saved_shape(x), x.dtype) for name, x in _named(shapes)}
        if {name: (tuple(x.shape), x.dtype) for name, x in saved.items()} != expected:
            raise UnfitRunError(
                f"{path} {list(shapes[0].shape)} or its optimizer state has other shapes in "
                "`state`. Resume with the saved run's model and optimizer."
            )
        arrays = []
        for name, shape in _named(shapes):
            values = saved[name]
            if isinstance(values, StoredArray):
                checksums = self._checksums[str(number)][name]
                values = _checked(values, checksums, f"{name} of {path}")
            arrays.append(_array(values, shape))
        return arrays


def _array(saved: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns a saved array in the memory where it waits."""
    sharding: Any = shape.sharding
    sharding = sharding.with_memory_kind("device" if stays(shape) else HOST)
    shard, pieces = sharding.shard_shape(shape.shape), []
    for device, index in sharding.addressable_devices_indices_map(shape.shape).items():
        bounds = [slice(*s.indices(n)[:2]) for s, n in zip(index, shape.shape, strict=True)]
        x = np.asarray(saved[tuple(bounds) or (slice(0, 1),)]).reshape(shard)
        pieces.append(upload(x, device, sharding.memory_kind))
    return jax.make_array_from_single_device_arrays(shape.shape, sharding, pieces)


def _checked(saved: StoredArray, checksums: Mapping[str, Any], name: str) -> StoredArray:
    """Returns a saved array whose pieces are read once, and checked before their first use."""

    def checked(piece: Any, checksum: int) -> Any:
        @functools.cache
        def values() -> np.ndarray:
            x = np.empty(piece.shape, piece.dtype)
            piece.read((), x)
            if _checksum(x) != checksum:
                raise ValueError(
                    f"The saved {name} is damaged: its checksum differs. Use another checkpoint."
                )
            return x

        read = lambda index, out: np.copyto(out, values()[index])  # noqa: E731
        return types.SimpleNamespace(shape=piece.shape, read=read)

    pieces: Any = {
        start: checked(x, int(checksums[",".join(map(str, start))]))
        for start, x in saved.pieces.items()
    }
    return dataclasses.replace(saved, pieces=pieces)


def _checksum(x: np.ndarray) -> int:
    return zlib.crc32(x.reshape(-1).view(np.uint8).data)


def _named(leaf: Leaf) -> Iterator[tuple[str, Any]]:
    """Yields the arrays of a leaf with the names under which they are saved."""
    yield "weight", leaf[0]
    yield from ((f"array_{i}", x) for i, x in enumerate(jax.tree.leaves(leaf[1])))


def _pieces(x: Any) -> Iterator[tuple[str, Any]]:
    """Yields the starts of the pieces that this process saves, with the devices that hold them.

    Each piece is saved by the process of the first device that holds it.
    """
    holders: dict[str, Any] = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        holders.setdefault(",".join(str(s.start or 0) for s in index) or "0", device)
    return (x for x in holders.items() if x[1].process_index == jax.process_index())


def _saved_shape(x: Any) -> tuple[int, ...]:
    return x.shape or (1,)  # files name a piece by its start, which a scalar lacks
