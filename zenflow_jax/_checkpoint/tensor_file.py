"""Files in the format of safetensors that are written in pieces, in any order, and read in pieces.

Its own library writes whole arrays from memory, for which a checkpoint of an engine has no room.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

#: What the files of an engine's state say that they are. Another value for other names or pieces
#: than those that `stored.py` reads; what the arrays mean, their layout says (`_version.py`).
FORMAT = "zenflow_jax engine state"
_DTYPES = {name: np.dtype(x) for name, x in (("F32", "f4"), ("I32", "i4"), ("U32", "u4"))}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# What is in front of the arrays is a multiple of this long.
_ALIGNMENT = 64
# No header of ours is that long; a length beyond it is garbage.
_LONGEST = 2**30


@contextlib.contextmanager
def new_file(
    path: Path, arrays: Mapping[str, tuple[Any, Sequence[int]]], metadata: Mapping[str, str]
) -> Iterator[Callable[..., None]]:
    """Makes a new file, which is on the disk when the block has ended without an error.

    Until then it has no header, so that nobody can read what was cut short. `arrays` has dtype and
    shape of each. Gives `write(name, elements, begin=0)`, for C-contiguous consecutive elements of
    an array, from number `begin` on.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begins, end = {}, 0
    for name, (dtype, shape) in arrays.items():
        begins[name], end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        offsets = [begins[name], end]
        dtype = _NAMES[np.dtype(dtype)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(name: str, elements: np.ndarray, begin: int = 0) -> None:
        at = len(head) + begins[name] + begin * elements.itemsize
        _write(file, elements.reshape(-1).view(np.uint8).data, at)

    try:
        yield write
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
class Tensor:
    """An array in a file, which may be gone or have been replaced when it is read."""

    path: Path
    stamp: tuple[int, int]  # as `_stamp`, when the header was read
    begin: int  # in bytes, from the start of the file
    dtype: np.dtype
    shape: tuple[int, ...]

    def read(self, index: tuple[slice, ...], out: np.ndarray) -> None:
        """Reads some of it into `out`; refuses a file that is gone or another one by now."""
        state = "none"
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            if _stamp(file.fileno()) == self.stamp:
                np.copyto(out, np.memmap(file, self.dtype, "r", self.begin, self.shape)[index])
                return
            state = "one that was written since"
        raise (FileNotFoundError if state == "none" else ValueError)(
            f"expected {self.path} as it was when the engine's state was restored, got {state}. "
            "Restore again, and delete or save over that checkpoint only when the engine is made: "
            "it reads its large arrays itself."
        )


def _stamp(file: int) -> tuple[int, int]:
    """Size and time of the last change: of another file under the same name it is another one."""
    status = os.fstat(file)
    return status.st_size, status.st_mtime_ns


def read_header(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata of a file, and its arrays by name; refuses one that is not whole."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LONGEST:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
            stamp = _stamp(file.fileno())
        metadata = header.pop("__metadata__")
        if metadata.get("format") != FORMAT:
            raise ValueError(f"a file of format {metadata.get('format')}")
        tensors = {
            name: Tensor(
                path,
                stamp,
                8 + length + x["data_offsets"][0],
                _DTYPES[x["dtype"]],
                tuple(x["shape"]),
            )
            for name, x in header.items()
        }
        for name, x in tensors.items():
            begin, end = header[name]["data_offsets"]
            size = math.prod(x.shape) * x.dtype.itemsize
            if end - begin != size or begin < 0 or 8 + length + end > stamp[0]:
                raise ValueError(f"{stamp[0]} bytes, in which {name} is not whole")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected a whole file of an engine's state, got {path}: {error}. Take another "
            "checkpoint."
        ) from error
    return metadata, tensors


def file_name(process: int | str, processes: int | str) -> str:
    """What the file of one process is called; "*" stands for any number."""
    numbers = [x if isinstance(x, str) else f"{x:05}" for x in (process, processes)]
    return f"engine-{numbers[0]}-of-{numbers[1]}.safetensors"
