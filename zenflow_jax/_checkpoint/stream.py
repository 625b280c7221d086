"""An engine's state in files that are written from its own memory, while the run goes on.

Each process writes one file. It has the parts of leaves that are this process's to save, each under
its place in the leaf, so that other numbers of processes and devices can read them.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zenflow_jax import _version
from zenflow_jax._checkpoint.layout import check_layout
from zenflow_jax._checkpoint.tensor_file import Tensor, TensorWriter, read_header
from zenflow_jax._exchange.parts import Part
from zenflow_jax._exchange.snapshot import Snapshot
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.aligned import blank
from zenflow_jax._host.state import HostLeaf

_FORMAT = "zenflow_jax engine state"
# Elements that are put together at once, where memory does not have them as they are written.
_BLOCK = 1024 * 1024


@dataclass(frozen=True)
class SavedPart:
    """A part of a leaf that this process saves."""

    part: Part
    before: np.ndarray | None  # channels selected in the pending update's window, if others
    summed: bool  # whether a step is in its open window, whose sum is saved then


@dataclass(frozen=True, eq=False)
class EngineStream:
    """An engine's state as of one moment, to be written once, by any thread.

    Attributes:
        snapshot: The host's arrays.
        parts: Of which part each leaf of the snapshot is, by its number there.
        small: Counts and options: a tree of small NumPy arrays, the same in all processes.
        arrays: Shape, dtype and sharding of the arrays of each leaf, as `arrays_of` gives them.
        place: Where a part's array of some name is in that of its leaf.
        processes: Those that the engine is in, ascending; each writes a file.
        adam: Adds up mail, on the thread that writes.
    """

    snapshot: Snapshot
    parts: Mapping[int, SavedPart]
    small: Mapping[str, Any]
    arrays: Sequence[Mapping[str, tuple[tuple[int, ...], Any, Any]]]
    place: Callable[[str, Part], tuple[slice, ...]]
    processes: Sequence[int]
    adam: HostAdam

    def close(self) -> None:
        """Lets the run write where it likes; what is not saved then never will be. Safe twice."""
        self.snapshot.close()
        self.adam.close()

    def write(self, folder: Path) -> None:
        """Writes this process's file into a folder that is there; then it is closed."""
        try:
            self._write(folder)
        finally:
            self.close()

    def _write(self, folder: Path) -> None:
        small = dict(_flat(self.small, ""))
        wide = {i: self._tensors(saved) for i, saved in self.parts.items()}
        tensors = {name: (x.dtype, x.shape) for name, x in small.items()}
        for of_part in wide.values():
            tensors |= {tensor: (dtype, shape) for tensor, dtype, shape in of_part.values()}
        shapes = [
            {name: (np.dtype(dtype).name, shape) for name, (shape, dtype, _) in leaf.items()}
            for leaf in self.arrays
        ]
        # Others may be in jax's run, each with an engine and checkpoints of its own.
        number, count = self.processes.index(jax.process_index()), len(self.processes)
        metadata = {
            "format": _FORMAT,
            "layout": str(_version.LAYOUT),
            "zenflow_jax": _version.__version__,
            "processes": str(count),
            "leaves": json.dumps(shapes),
        }
        missing = set(wide)
        with TensorWriter(folder / _file_name(number, count), tensors, metadata) as file:
            for name, x in small.items():
                file.write(name, np.ascontiguousarray(x))
            for i, leaf in self.snapshot.leaves():
                for name, (tensor, *_) in wide[i].items():
                    for begin, elements in self._blocks(self.parts[i], leaf, name):
                        file.write(tensor, elements, begin)
                missing.remove(i)
            if missing:
                raise RuntimeError(
                    f"expected to write {len(wide)} parts of an engine's state, got all but "
                    f"{len(missing)} when it was closed. Save again, and let orbax finish: "
                    "`wait_until_finished`."
                )

    def _tensors(self, saved: SavedPart) -> dict[str, tuple[str, Any, tuple[int, ...]]]:
        """Name in the file, dtype and shape of each of a part's arrays."""
        found = {}
        for name, (_, dtype, _) in self.arrays[saved.part.leaf].items():
            if name == "total" and not saved.summed:
                continue
            place = self.place(name, saved.part)
            start = ",".join(str(s.start) for s in place)
            shape = tuple(s.stop - s.start for s in place)
            found[name] = (f"leaves/{saved.part.leaf}/{name}@{start}", dtype, shape)
        return found

    def _blocks(
        self, saved: SavedPart, leaf: HostLeaf, name: str
    ) -> Iterator[tuple[int, np.ndarray]]:
        """The elements of an array in pieces, each with the number of its first one.

        A piece is valid until the next one.
        """
        if name == "steps":
            yield 0, leaf.steps
        elif name == "before":
            yield 0, (leaf.channels if saved.before is None else saved.before) + saved.part.first
        else:
            scratch = blank((min(_BLOCK, leaf.master.size),))
            for begin in range(0, leaf.master.size, _BLOCK):
                end = min(begin + _BLOCK, leaf.master.size)
                if name == "total":
                    yield begin, self._sum(leaf, begin, end, scratch)
                else:
                    array = {"master": leaf.master, "mu": leaf.mu, "nu": leaf.nu}[name]
                    yield begin, array.range(begin, end, scratch)

    def _sum(self, leaf: HostLeaf, begin: int, end: int, scratch: np.ndarray) -> np.ndarray:
        """Some of the sum of the leaf's open window, with the bits of any other way to add up."""
        found = scratch[: end - begin]
        if leaf.total is not None:
            np.copyto(found, leaf.total.reshape(-1)[begin:end])
        mails = [(mail.reshape(-1)[begin:end], factor) for mail, factor in leaf.mails]
        self.adam.accumulate(found, mails, first=leaf.total is None)
        return found


class StoredArray:
    """An array of a saved state that is read when it is asked for, by NumPy's slices."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype):
        self._name = name
        self.shape = shape
        self.dtype = dtype
        self.pieces: dict[tuple[int, ...], Tensor] = {}  # by where they begin
        #: Whether what is in no file is zero: sums of windows without a step are not written.
        self.zero_elsewhere = False

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Some of it: a slice with start and stop for each axis."""
        found = blank([s.stop - s.start for s in index], self.dtype)
        there = 0
        for start, piece in self.pieces.items():
            ends = [a + n for a, n in zip(start, piece.shape, strict=True)]
            low = [max(s.start, a) for s, a in zip(index, start, strict=True)]
            high = [min(s.stop, b) for s, b in zip(index, ends, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                here = _slices(low, high, [s.start for s in index])
                piece.read(_slices(low, high, start), found[here])
                there += found[here].size
        if there != found.size and not self.zero_elsewhere:
            raise ValueError(
                f"expected all of {self._name} in the files of the engine's state, got {there} of "
                f"{found.size} elements of {index}. Take another checkpoint."
            )
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[tuple(slice(0, n) for n in self.shape)].astype(dtype or self.dtype, copy=False)

    def __repr__(self) -> str:
        return f"StoredArray({self._name}, {self.dtype.name}{list(self.shape)})"


def read_engine_state(folder: Path) -> dict[str, Any]:
    """A saved engine's state, for `HostEngine(engine_state=...)`; large arrays are `StoredArray`s.

    The files must stay until that engine has been made.

    Args:
        folder: Into which all processes wrote.

    Raises:
        FileNotFoundError: If there is no file, or those of some processes are missing.
        ValueError: If a file is not whole, or of a layout that this version cannot read.
    """
    paths = sorted(folder.glob(_file_name("*", "*")))
    found = [read_header(path) for path in paths]
    for path, (metadata, _) in zip(paths, found, strict=True):
        if (format := metadata.get("format")) != _FORMAT:
            raise ValueError(
                f"expected a file of an engine's state, got {path} of format {format}. Leave "
                "nothing but what `EngineSave` wrote there."
            )
        number = metadata.get("layout", "")
        check_layout(
            int(number) if number.isdecimal() else None, metadata.get("zenflow_jax"), str(path)
        )
    _check_files(folder, paths, int(found[0][0]["processes"]) if found else 0)
    leaves: list[dict[str, Any]] = [
        {
            name: StoredArray(f"leaves/{i}/{name}", tuple(shape), np.dtype(dtype))
            for name, (dtype, shape) in leaf.items()
        }
        for i, leaf in enumerate(json.loads(found[0][0]["leaves"]))
    ]
    for leaf in leaves:
        if "total" in leaf:
            leaf["total"].zero_elsewhere = True
    tree: dict[str, Any] = {"leaves": leaves}
    moments = set()
    for _, tensors in found:
        for name, tensor in tensors.items():
            if part := re.fullmatch(r"leaves/(\d+)/(\w+)@([\d,]*)", name):
                start = tuple(int(x) for x in part[3].split(","))
                leaves[int(part[1])][part[2]].pieces[start] = tensor
            else:
                *folders, last = name.split("/")
                inner = tree
                for x in folders:
                    inner = inner.setdefault(x, {})
                small = np.empty(tensor.shape, tensor.dtype)
                tensor.read((), small)
                inner[last] = small
        moments.add(tuple(int(tree["counts"][name]) for name in ("step", "token")))
    if len(moments) > 1:
        steps = " and ".join(str(step) for step, _ in sorted(moments))
        raise ValueError(
            f"expected files of one save in {folder}, got some of steps {steps}, or of other runs. "
            "Take another checkpoint, or put all the files of one into a folder."
        )
    return tree


def _check_files(folder: Path, paths: Sequence[Path], processes: int) -> None:
    """Refuses files that are not those of one save, by their names."""
    if not paths:
        raise FileNotFoundError(
            f"expected files that `EngineSave` wrote in {folder}, got none. Take another "
            "checkpoint; what `engine.state()` gave and another saver wrote, restore by that one, "
            "with `abstract_engine_state(opt_state)` as the template."
        )
    expected = {_file_name(i, processes) for i in range(processes)}
    names = {path.name for path in paths}
    if missing := sorted(expected - names):
        raise FileNotFoundError(
            f"expected the files of {processes} processes in {folder}, got none of {missing[0]}. "
            "Take another checkpoint, or one that every process wrote to the same folder."
        )
    if others := sorted(names - expected):
        raise ValueError(
            f"expected the files of {processes} processes in {folder}, got {others[0]} as well. "
            "Leave the files of one save there."
        )


def _file_name(process: "int | str", processes: "int | str") -> str:
    numbers = [x if isinstance(x, str) else f"{x:05}" for x in (process, processes)]
    return f"engine-{numbers[0]}-of-{numbers[1]}.safetensors"


def _flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, np.ndarray]]:
    for name, x in tree.items():
        if isinstance(x, Mapping):
            yield from _flat(x, f"{prefix}{name}/")
        else:
            yield prefix + name, x


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - x, b - x) for a, b, x in zip(low, high, origin, strict=True))
