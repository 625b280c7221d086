"""Reads the files that `saving.py` writes: large arrays only when they are asked for."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zenflow_jax._checkpoint.tensor_file import Tensor, file_name, read_header
from zenflow_jax._host.arrays import blank


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
        out = blank([s.stop - s.start for s in index], self.dtype)
        read = 0
        for start, piece in self.pieces.items():
            ends = [a + n for a, n in zip(start, piece.shape, strict=True)]
            low = [max(s.start, a) for s, a in zip(index, start, strict=True)]
            high = [min(s.stop, b) for s, b in zip(index, ends, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                place = _slices(low, high, [s.start for s in index])
                piece.read(_slices(low, high, start), out[place])
                read += out[place].size
        if read != out.size and not self.zero_elsewhere:
            raise ValueError(
                f"expected all of {self._name} in the files of the engine's state, got {read} of "
                f"{out.size} elements of {index}. Take another checkpoint."
            )
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[tuple(slice(0, n) for n in self.shape)].astype(dtype or self.dtype, copy=False)

    def __repr__(self) -> str:
        return f"StoredArray({self._name}, {self.dtype.name}{list(self.shape)})"


def read_engine_state(folder: Path) -> dict[str, Any]:
    """A saved state for `HostEngine(engine_state=...)`, whose large arrays are `StoredArray`s."""
    paths = sorted(folder.glob(file_name("*", "*")))
    headers = [read_header(path) for path in paths]
    _check_files(folder, paths, int(headers[0][0]["processes"]) if headers else 1)
    leaves: list[dict[str, Any]] = [
        {
            name: StoredArray(f"leaves/{i}/{name}", tuple(shape), np.dtype(dtype))
            for name, (dtype, shape) in leaf.items()
        }
        for i, leaf in enumerate(json.loads(headers[0][0]["leaves"]))
    ]
    for leaf in leaves:
        if "total" in leaf:
            leaf["total"].zero_elsewhere = True
    tree: dict[str, Any] = {"leaves": leaves}
    moments = set()
    for _, tensors in headers:
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
    expected = {file_name(i, processes) for i in range(processes)}
    names = {path.name for path in paths}
    if names == expected:
        return
    missing, others = sorted(expected - names), sorted(names - expected)
    raise (FileNotFoundError if missing else ValueError)(
        f"expected the files of {processes} processes that `EngineSave` wrote in {folder}, got "
        f"{f'none of {missing[0]}' if missing else f'{others[0]} as well'}. Take another "
        "checkpoint, and leave nothing but the files of one save there. What `engine.state()` gave "
        "and another saver wrote, restore by that one."
    )


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - x, b - x) for a, b, x in zip(low, high, origin, strict=True))
