"""The saved state of a trainer: a tree of arrays, or one file for each process.

Names and format are those of an engine's state, so `EngineSave` and `EngineRestore` take it.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zenflow_jax._checkpoint.saving import Snapshot
from zenflow_jax._checkpoint.stored import FORMAT, file_name, new_file
from zenflow_jax._spec.rules import UnfitRunError
from zenflow_jax.layerwise._blocks import ARRAYS, Block, Leaf

#: The number of the layout, in the name of an array.
LAYOUT_NAME = "layout_1_of_layerwise_trainers"
_CHUNK = 1024 * 1024


@dataclasses.dataclass(frozen=True, eq=False)
class BlockStream:
    """A trainer's state at one moment, to be copied or written once, by any thread."""

    blocks: Sequence[Block]  # the trained ones
    snapshot: Snapshot
    counts: Mapping[str, np.ndarray]
    processes: Sequence[int]  # ascending; each writes a file

    def close(self) -> None:
        """Lets the run update all blocks: those not yet saved stay unsaved. Safe twice."""
        self.snapshot.close()

    def tree(self) -> dict[str, Any]:
        """Copies the state into a tree of NumPy arrays; all pieces must be in this process."""
        for leaf in self._leaves():
            if not leaf.sharding.is_fully_addressable:
                raise ValueError(
                    f"{leaf.path} is on devices of several processes. Save with `EngineSave`."
                )
        leaves: list[dict[str, Any]] = []
        for _, block in sorted(self.snapshot.leaves()):
            for leaf in block.leaves:
                arrays = {name: np.empty(leaf.shape, np.float32) for name in ARRAYS}
                for piece in leaf.pieces:
                    for name, x in arrays.items():
                        x[piece.index] = getattr(piece, name).as_float32().reshape(piece.shape)
                leaves.append(arrays)
        return {"leaves": leaves, "counts": dict(self.counts), "layout": _layout()}

    def write(self, folder: Path) -> None:
        """Writes this process's file into an existing folder, and closes the stream."""
        small = {f"counts/{name}": x for name, x in self.counts.items()}
        small |= {f"layout/{name}": x for name, x in _layout().items()}
        tensors: dict[str, Any] = {name: (x.dtype, x.shape) for name, x in small.items()}
        numbers, shapes = {}, []
        for number, leaf in enumerate(self._leaves()):
            numbers[leaf.path] = number
            shapes.append({name: ("float32", leaf.shape) for name in ARRAYS})
            for piece in leaf.pieces:
                for name in ARRAYS if piece.saved else ():
                    tensors[_tensor(number, name, piece.index)] = np.float32, piece.shape
        process, count = self.processes.index(jax.process_index()), len(self.processes)
        metadata = {"format": FORMAT, "processes": str(count), "leaves": json.dumps(shapes)}
        missing = len(self.blocks)
        try:
            with new_file(folder / file_name(process, count), tensors, metadata) as write:
                for name, x in small.items():
                    write(name, np.ascontiguousarray(x))
                for _, block in self.snapshot.leaves():
                    for leaf in block.leaves:
                        for piece in leaf.pieces:
                            for name in ARRAYS if piece.saved else ():
                                tensor = _tensor(numbers[leaf.path], name, piece.index)
                                for begin, elements in getattr(piece, name).chunks(_CHUNK):
                                    write(tensor, elements, begin)
                    missing -= 1
                if missing:
                    raise RuntimeError("The trainer was closed during a save. Save again.")
        finally:
            self.close()

    def _leaves(self) -> Iterator[Leaf]:
        return (leaf for block in self.blocks for leaf in block.leaves)


def _layout() -> dict[str, np.ndarray]:
    return {LAYOUT_NAME: np.array(1, np.int32)}


def _tensor(number: int, name: str, index: Sequence[slice]) -> str:
    return f"leaves/{number}/{name}@{','.join(str(s.start) for s in index)}"


def saved_leaves(state: Any) -> Iterator[Mapping[str, Any]]:
    """Returns the saved arrays of each trained leaf, in order."""
    layout = state.get("layout") if isinstance(state, Mapping) else None
    if not isinstance(layout, Mapping) or list(layout) != [LAYOUT_NAME]:
        raise UnfitRunError(
            "`state` was not saved by a `layerwise.Trainer` of this version. Resume with the "
            "version and optimizer that wrote it, or start a new run from its weights."
        )
    return iter(state["leaves"])
