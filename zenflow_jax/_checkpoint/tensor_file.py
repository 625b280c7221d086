"""Files of named arrays that are written in pieces, in any order, and read in pieces.

The format is that of safetensors: eight bytes with the length of a header, the header in JSON, and
all arrays one behind the other. Its own library writes whole arrays from memory, which is what a
checkpoint of an engine has no room for.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_DTYPES = {"F32": np.dtype(np.float32), "I32": np.dtype(np.int32)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# What is in front of the arrays is a multiple of this long.
_ALIGNMENT = 64
# No header of ours is that long; a length beyond it is garbage.
_LONGEST = 2**30


class TensorWriter:
    """A new file. Use with `with`: it is on the disk when the block has ended without an error.

    Args:
        path: Where; there must be no such file.
        arrays: Dtype (float32 or int32) and shape of each array, by name.
        metadata: Text, by name.
    """

    def __init__(
        self,
        path: Path,
        arrays: Mapping[str, tuple[Any, Sequence[int]]],
        metadata: Mapping[str, str],
    ):
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        end = 0
        self._begin: dict[str, int] = {}
        for name, (dtype, shape) in arrays.items():
            begin, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
            header[name] = {
                "dtype": _NAMES[np.dtype(dtype)],
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
            self._begin[name] = begin
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        self._first, self._end = 8 + len(text), end
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            self._write(len(text).to_bytes(8, "little") + text, 0)
        except BaseException:
            os.close(self._file)
            raise

    def write(self, name: str, elements: np.ndarray, begin: int = 0) -> None:
        """Writes consecutive elements of an array, from number `begin` on; C-contiguous."""
        at = self._first + self._begin[name] + begin * elements.itemsize
        self._write(elements.reshape(-1).view(np.uint8).data, at)

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                os.ftruncate(self._file, self._first + self._end)
                os.fsync(self._file)
        finally:
            os.close(self._file)

    def _write(self, data: Any, at: int) -> None:
        data = memoryview(data)
        while data:
            written = os.pwrite(self._file, data, at)
            data, at = data[written:], at + written


@dataclass(frozen=True)
class Tensor:
    """An array in a file, which may be gone or have been replaced when it is read."""

    path: Path
    begin: int  # in bytes, from the start of the file
    dtype: np.dtype
    shape: tuple[int, ...]

    def read(self, index: tuple[slice, ...], out: np.ndarray) -> None:
        """Reads some of it into `out`, of the same shape."""
        mapped = np.memmap(self.path, self.dtype, "r", self.begin, self.shape)
        np.copyto(out, mapped[index])


def read_header(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata of a file, and its arrays by name.

    Raises:
        ValueError: If it is no such file, or not all of it is there.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LONGEST:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
            there = os.fstat(file.fileno()).st_size
        metadata = header.pop("__metadata__")
        tensors = {
            name: Tensor(
                path, 8 + length + x["data_offsets"][0], _DTYPES[x["dtype"]], tuple(x["shape"])
            )
            for name, x in header.items()
        }
        for name, x in tensors.items():
            begin, end = header[name]["data_offsets"]
            size = math.prod(x.shape) * x.dtype.itemsize
            if end - begin != size or begin < 0 or 8 + length + end > there:
                raise ValueError(f"{there} bytes, in which {name} is not whole")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected a whole file of an engine's state, got {path}: {error}. Take another "
            "checkpoint."
        ) from error
    return metadata, tensors
