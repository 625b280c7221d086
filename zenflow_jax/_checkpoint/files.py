"""Files with an engine's or a trainer's state: written in pieces, in any order, read on demand.

They use the safetensors format. The safetensors library can write only whole arrays that are in
memory, which has no room for such copies during a save. `saving.py` describes the contents.
"""

import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from zenflow_jax._host.arrays import aligned_zeros

#: The format name in the files' metadata. Change it when names or pieces change; the layout number
#: (`_version.py`) covers the meaning of arrays.
FORMAT = "zenflow_jax engine state"
_KINDS: dict[str, Any] = dict(F32="f4", I32="i4", U32="u4", U8="u1")
# For any optimizer's state, which `layerwise` saves.
_KINDS |= dict(F16="f2", I16="i2", U16="u2", I8="i1", BOOL="?", BF16=ml_dtypes.bfloat16)
_DTYPES = {name: np.dtype(kind) for name, kind in _KINDS.items()}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# The header's size is a multiple of this.
_ALIGNMENT = 64


def write_state(
    folder: Path,
    processes: Sequence[int],
    moment: str,
    small: Mapping[str, Any],
    leaves: Sequence[Mapping[str, Any]],
    pieces: Mapping[str, tuple[Any, Sequence[int]]],
    chunks: Iterable[tuple[str, int, np.ndarray]],
) -> None:
    """Writes this process's file of a saved state to an existing folder.

    Each of `processes` writes one file with the same `moment` and `small`, a tree of arrays.
    `leaves` describes the large arrays. `pieces` gives the dtype and shape of each piece in this
    file; `chunks` yields their elements, each chunk with the piece's name and first index. Until
    all is on disk the file has no header, so it is unreadable.
    """
    paths = jax.tree_util.tree_leaves_with_path(small)
    flat = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in paths}
    arrays = {name: (x.dtype, x.shape) for name, x in flat.items()} | dict(pieces)
    # Other processes in the jax run may have separate engines and checkpoints.
    number, count = processes.index(jax.process_index()), len(processes)
    shapes = [{name: (x.dtype.name, x.shape) for name, x in leaf.items()} for leaf in leaves]
    metadata = {"format": FORMAT, "processes": str(count), "moment": moment}
    header: dict[str, Any] = {"__metadata__": metadata | {"leaves": json.dumps(shapes)}}
    begins, end = {}, 0
    for name, (dtype, shape) in arrays.items():
        begins[name], end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        place = {"shape": list(shape), "data_offsets": [begins[name], end]}
        header[name] = {"dtype": _NAMES[np.dtype(dtype)], **place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    # Checks names, not elements, because parts of a leaf that share channels write the same counts.
    missing = {name for name, (_, shape) in arrays.items() if 0 not in shape}
    file = os.open(folder / file_name(number, count), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        whole = ((name, 0, x) for name, x in flat.items())
        for name, begin, elements in itertools.chain(whole, chunks):
            at = len(head) + begins[name] + begin * elements.itemsize
            _write(file, elements.reshape(-1).view(np.uint8).data, at)
            missing.discard(name)
        if missing:
            raise RuntimeError("The save was closed before the whole state was written.")
        os.ftruncate(file, len(head) + end)
        os.fsync(file)
        _write(file, head, 0)
        os.fsync(file)
    finally:
        os.close(file)


def _write(file: int, data: Any, at: int) -> None:
    data = memoryview(data)
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written


@dataclass(frozen=True)
class _Tensor:
    """An array in a file, which may be deleted or replaced before the read."""

    path: Path
    stamp: tuple[int, int]  # the result of `_stamp` when the header was read
    begin: int  # in bytes, from the start of the file
    dtype: np.dtype
    shape: tuple[int, ...]

    def read(self, index: tuple[slice, ...], out: np.ndarray) -> None:
        """Reads a slice into `out`; rejects a deleted or replaced file."""
        with self.path.open("rb") as file:
            if _stamp(file.fileno()) != self.stamp:
                raise ValueError(
                    f"{self.path} was overwritten after its header was read. Restore again."
                )
            np.copyto(out, np.memmap(file, self.dtype, "r", self.begin, self.shape)[index])


def _stamp(file: int) -> tuple[int, int]:
    """Returns size and modification time, which reveal whether a file was replaced."""
    status = os.fstat(file)
    return status.st_size, status.st_mtime_ns


def _read_header(path: Path) -> tuple[dict[str, str], dict[str, _Tensor]]:
    """Returns a file's metadata, and its arrays by name; rejects an incomplete file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            stamp = _stamp(file.fileno())
        metadata = header.pop("__metadata__")
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its format is {metadata.get('format')}")
        tensors = {}
        for name, x in header.items():
            dtype, shape, (begin, end) = _DTYPES[x["dtype"]], tuple(x["shape"]), x["data_offsets"]
            if end - begin != math.prod(shape) * dtype.itemsize or begin < 0:
                raise ValueError(f"the {end - begin} bytes of {name} do not match its shape")
            if 8 + length + end > stamp[0]:
                raise ValueError(f"its {stamp[0]} bytes do not contain all of {name}")
            tensors[name] = _Tensor(path, stamp, 8 + length + begin, dtype, shape)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"{path} is not a complete engine state file: {error}. Use another checkpoint."
        ) from error
    return metadata, tensors


def file_name(process: int | str, processes: int | str) -> str:
    """Returns the name of a process's file; "*" stands for any number."""
    numbers = [x if isinstance(x, str) else f"{x:05}" for x in (process, processes)]
    return f"engine-{numbers[0]}-of-{numbers[1]}.safetensors"


@dataclass(eq=False)
class StoredArray:
    """An array in a saved state, read on demand by slicing as in NumPy."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: dict[tuple[int, ...], _Tensor] = field(default_factory=dict)  # by their start indices

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part; `index` contains a slice with start and stop for each axis."""
        out = aligned_zeros([s.stop - s.start for s in index], self.dtype)
        read = 0
        for start, piece in self.pieces.items():
            ends = [a + n for a, n in zip(start, piece.shape, strict=True)]
            low = [max(s.start, a) for s, a in zip(index, start, strict=True)]
            high = [min(s.stop, b) for s, b in zip(index, ends, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                place = _slices(low, high, [s.start for s in index])
                piece.read(_slices(low, high, start), out[place])
                read += out[place].size
        # Sums of windows without steps are not written.
        if read != out.size and not self.name.endswith(("/total", "/squares")):
            raise ValueError(
                f"The files have only {read} of {out.size} elements of {self.name} at {index}. "
                "Use another checkpoint."
            )
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[tuple(slice(0, n) for n in self.shape)].astype(dtype or self.dtype, copy=False)


def read_engine_state(folder: Path) -> dict[str, Any]:
    """Reads a saved state for `HostEngine(engine_state=...)`; large arrays are `StoredArray`s."""
    files = {path.name: _read_header(path) for path in sorted(folder.glob(file_name("*", "*")))}
    metadata = next(iter(files.values()))[0] if files else {"processes": "1"}
    processes = int(metadata["processes"])
    expected = {file_name(i, processes) for i in range(processes)}
    if missing := sorted(expected - files.keys()):
        raise FileNotFoundError(f"{folder} lacks {missing[0]}. Use another checkpoint.")
    if strange := [x for x, (y, _) in files.items() if x not in expected or y != metadata]:
        raise ValueError(
            f"{folder} has files from several saves, such as {strange[0]}. Keep one save's files."
        )
    leaves: list[dict[str, Any]] = [
        {
            name: StoredArray(f"leaves/{i}/{name}", tuple(shape), np.dtype(x))
            for name, (x, shape) in leaf.items()
        }
        for i, leaf in enumerate(json.loads(metadata["leaves"]))
    ]
    tree: dict[str, Any] = {"leaves": leaves}
    for _, tensors in files.values():
        for name, tensor in tensors.items():
            if part := re.fullmatch(r"leaves/(\d+)/(\w+)@([\d,]*)", name):
                start = tuple(int(x) for x in part[3].split(","))
                leaves[int(part[1])][part[2]].pieces[start] = tensor
            else:
                *folders, last = name.split("/")
                inner = tree
                for x in folders:
                    inner = inner.setdefault(x, {})
                inner[last] = np.empty(tensor.shape, tensor.dtype)
                tensor.read((), inner[last])
    return tree


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - x, b - x) for a, b, x in zip(low, high, origin, strict=True))
