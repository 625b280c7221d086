"""The saved state of a trainer: a tree of arrays, or one file for each process.

Names and format match an engine's state, so `EngineSave` and `EngineRestore` accept it.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zenflow_jax._checkpoint.saving import Snapshot
from zenflow_jax._checkpoint.stored import write_state
from zenflow_jax._host.arrays import HostArray
from zenflow_jax._spec.rules import UnfitRunError
from zenflow_jax.layerwise._blocks import ARRAYS, Block, Leaf, Piece

#: The number of the layout, in the name of an array.
LAYOUT_NAME = "layout_1_of_layerwise_trainers"
_CHUNK = 1024 * 1024


@dataclasses.dataclass(frozen=True, eq=False)
class BlockStream:
    """A trainer's state at one moment, to be copied or written once, by any thread."""

    blocks: Sequence[Block]  # the trained blocks
    snapshot: Snapshot
    counts: Mapping[str, np.ndarray]
    processes: Sequence[int]  # ascending; each writes a file

    def close(self) -> None:
        """Lets the run update all blocks; unsaved blocks stay unsaved. Safe to call twice."""
        self.snapshot.close()

    def tree(self) -> dict[str, Any]:
        """Copies the state into a tree of NumPy arrays; all pieces must be in this process."""
        for leaf in self._leaves():
            if not leaf.abstract.sharding.is_fully_addressable:
                raise ValueError(
                    f"{leaf.path} is on devices of several processes. Save with `EngineSave`."
                )
        leaves: list[dict[str, Any]] = [
            {name: np.empty(leaf.abstract.shape, np.float32) for name in ARRAYS}
            for leaf in self._leaves()
        ]
        for _, block in self.snapshot.leaves():
            for number, name, piece, x in self._arrays([block]):
                leaves[number][name][piece.index] = x.as_float32().reshape(piece.shape)
        return {"leaves": leaves, "counts": dict(self.counts), "layout": _layout()}

    def write(self, folder: Path) -> None:
        """Writes this process's file into an existing folder, and closes the stream."""
        small = {"counts": self.counts, "layout": _layout()}
        leaves: list[dict[str, Any]] = [
            dict.fromkeys(ARRAYS, jax.ShapeDtypeStruct(leaf.abstract.shape, np.float32))
            for leaf in self._leaves()
        ]
        tensors = {_tensor(*x): (np.float32, x[2].shape) for x in self._arrays(self.blocks)}
        chunks = (
            (_tensor(*x), *chunk)
            for _, block in self.snapshot.leaves()
            for x in self._arrays([block])
            for chunk in x[3].chunks(_CHUNK)
        )
        with contextlib.closing(self):
            write_state(folder, self.processes, small, leaves, tensors, chunks)

    def _leaves(self) -> Iterator[Leaf]:
        return (leaf for block in self.blocks for leaf in block.leaves)

    def _arrays(self, blocks: Iterable[Block]) -> Iterator[tuple[int, str, Piece, HostArray]]:
        """Yields the leaf's number, the name, the piece and the numbers of each array to save."""
        numbers = {leaf.path: number for number, leaf in enumerate(self._leaves())}
        for leaf in (leaf for block in blocks for leaf in block.leaves):
            for piece in (piece for piece in leaf.pieces if piece.saved):
                for name in ARRAYS:
                    yield numbers[leaf.path], name, piece, getattr(piece, name)


def _tensor(number: int, name: str, piece: Piece, _: HostArray) -> str:
    start = ",".join(str(s.start) for s in piece.index)
    return f"leaves/{number}/{name}@{start}"


def _layout() -> dict[str, np.ndarray]:
    return {LAYOUT_NAME: np.array(1, np.int32)}


def saved_leaves(state: Any) -> Iterator[Mapping[str, Any]]:
    """Returns the saved arrays of each trained leaf, in order."""
    layout = state.get("layout") if isinstance(state, Mapping) else None
    if not isinstance(layout, Mapping) or list(layout) != [LAYOUT_NAME]:
        raise UnfitRunError(
            "`state` was not saved by a `layerwise.Trainer` of this version. Resume with the "
            "version and optimizer that wrote it, or start a new run from its weights."
        )
    return iter(state["leaves"])
