"""Reads tensors by name, from plain and from packed safetensors files.

with open_tensors(path) as file:
    file.read("w", 0, 4096)          # bytes, from the blocks that contain them
    file["w"]                        # the whole tensor
    file.get_slice("w")[2:4]         # some rows, as in safetensors
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elves.blocks import BLOCK, Coder, Damaged, Words
from elves.header import (
    DUPLICATE,
    FLOATS,
    NUMPY,
    REMEDY,
    WIDTHS,
    ElvesError,
    Reference,
    Tensor,
    is_packed,
    read_header,
)


class Info(NamedTuple):
    """Dtype, shape and size of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


class TensorFile:
    """A file of tensors, for a `with` block. Must be used from one thread only."""

    path: Path
    tensors: dict[str, Info]

    def __init__(self, path: Path):
        self.path = path
        self._mapping: mmap.mmap | None = None
        self._mapped = np.empty(0, np.uint8)
        try:
            with open(path, "rb") as file:
                if file.seek(0, 2):
                    self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                    self._mapped = np.frombuffer(self._mapping, np.uint8)
        except OSError as error:
            raise ElvesError(f"The file {path} cannot be read: {error.strerror}.") from error

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file. Safe to call twice."""
        self._mapped = np.empty(0, np.uint8)
        if self._mapping is not None:
            with contextlib.suppress(BufferError):  # the caller may still have arrays in the file
                self._mapping.close()

    def keys(self) -> list[str]:
        return list(self.tensors)

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        """Returns some of a tensor's bytes, as read-only uint8."""
        raise NotImplementedError

    def checksum(self, name: str) -> int:
        """Returns the CRC-32 of a tensor's bytes."""
        checksum, size = 0, self.tensors[name].bytes
        for begin in range(0, size, BLOCK):
            checksum = zlib.crc32(self.read(name, begin, min(begin + BLOCK, size)), checksum)
        return checksum

    def __getitem__(self, name: str) -> np.ndarray:
        return self.get_slice(name)[()]

    def get_slice(self, name: str) -> Slice:
        """Returns a tensor that is read when it is indexed."""
        return Slice(self, name, self.tensors[name])


class Slice:
    """A tensor in a file. Indexing reads the needed rows, then slices them."""

    def __init__(self, file: TensorFile, name: str, info: Info):
        self._file, self._name, self._info = file, name, info

    def get_dtype(self) -> str:
        return self._info.dtype

    def get_shape(self) -> list[int]:
        return list(self._info.shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        dtype, shape = NUMPY.get(self._info.dtype), self._info.shape
        if dtype is None:
            raise ElvesError(
                f"the tensor `{self._name}` in {self._file.path}: NumPy has no dtype "
                f"{self._info.dtype}. Restore the file, and read it with another library."
            )
        index = index if isinstance(index, tuple) else (index,)
        rows = index[0] if index and shape else slice(None)
        if not (isinstance(rows, slice) and rows.step in (None, 1)):
            rows, cut = slice(None), index
        else:
            cut = (slice(None), *index[1:]) if shape and index else index
        first, last, _ = rows.indices(shape[0] if shape else 1)
        last = max(first, last)
        width = math.prod(shape[1:]) * dtype.itemsize
        raw = self._file.read(self._name, first * width, last * width)
        whole = raw.view(dtype).reshape((last - first, *shape[1:]) if shape else ())
        return np.asarray(whole[cut])


class PlainFile(TensorFile):
    """A plain safetensors file. Raises `ElvesError` if the file is invalid or incomplete."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.head = b""  # the bytes before the tensors
        self.tensors, self._begin = {}, {}
        try:
            self._read_header()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            size = self._mapped.size
            self.close()
            raise ElvesError(
                f"The safetensors file {path} ({size} bytes) is damaged: {error}. {REMEDY}"
            ) from error

    def _read_header(self) -> None:
        end = 8 + int.from_bytes(self._mapped[:8].tobytes(), "little")
        if not 8 < end <= self._mapped.size:
            raise ValueError(f"its stated header length is {end - 8} bytes")
        self.head = self._mapped[:end].tobytes()
        header = json.loads(self.head[8:])
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
            (begin, stop), dtype = entry["data_offsets"], entry["dtype"]
            shape = tuple(entry["shape"])
            if len(self.head) + begin != end or stop < begin or type(stop) is not int:
                raise ValueError(f"`{name}` cannot extend from {begin} to {stop}")
            if dtype in WIDTHS and math.prod(shape) * WIDTHS[dtype] != stop - begin:
                raise ValueError(f"`{name}`, {dtype} {shape}, cannot have {stop - begin} bytes")
            self.tensors[name] = Info(dtype, shape, stop - begin)
            self._begin[name] = end
            end = len(self.head) + stop
        if end != self._mapped.size:
            raise ValueError(f"it should have {end} bytes")

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        at = self._begin[name]
        return self._mapped[at + begin : at + end]


class PackedFile(TensorFile):
    """A packed file. `base` is its base's folder; None means the folder used for packing."""

    def __init__(self, path: Path, *, base: Path | None = None, threads: int = 1):
        self.header, at = read_header(path)
        super().__init__(path)
        self._base = base or (Path(self.header.base) if self.header.base else None)
        self._threads = threads
        self._coders = [Coder()]
        self._references: dict[Path, TensorFile] = {}
        self._begin: dict[str, list[int]] = {}
        self.tensors = {}
        for name, t in self.header.tensors.items():
            self.tensors[name] = Info(t.dtype, t.shape, t.bytes)
            self._begin[name] = begins = []
            for size in t.blocks:
                begins.append(at)
                at += size

    def close(self) -> None:
        for file in self._references.values():
            file.close()
        super().close()

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        t = self.header.tensors[name]
        if t.codec == DUPLICATE:
            assert t.of is not None
            return self._reference(t, t.of).read(t.of.tensor, begin, end)
        numbers = range(begin // BLOCK, -(-end // BLOCK) if end > begin else begin // BLOCK)
        first = numbers.start * BLOCK
        out = np.empty(max(min(numbers.stop * BLOCK, t.bytes) - first, 0), np.uint8)
        # A referenced file must be used from one thread only.
        threads = 1 if t.of is not None else min(self._threads, len(numbers))
        while len(self._coders) < threads:
            self._coders.append(Coder())

        def decode(k: int) -> None:
            for i in numbers[k::threads]:
                piece = out[i * BLOCK - first : (i + 1) * BLOCK - first]
                self._decode(t, i, piece, self._coders[k])

        if threads > 1:
            with ThreadPoolExecutor(threads, thread_name_prefix="elves") as pool:
                list(pool.map(decode, range(threads)))
        elif numbers:
            decode(0)
        return out[begin - first : end - first]

    def whole(self) -> Iterator[bytes | np.ndarray]:
        """Yields the original file in pieces of several blocks; compares all checksums."""
        head = self.header.unpacked_head()
        whole = zlib.crc32(head)
        yield head
        step = BLOCK * self._threads
        for name, t in self.header.tensors.items():
            checksum = 0
            for begin in range(0, t.bytes, step):
                piece = self.read(name, begin, min(begin + step, t.bytes))
                checksum, whole = zlib.crc32(piece, checksum), zlib.crc32(piece, whole)
                yield piece
            if checksum != t.crc32:
                of = ", because the tensor that it duplicates has changed" * (t.codec == DUPLICATE)
                raise ElvesError(
                    f"the tensor `{name}` in {self.path}: the restored bytes do not match the "
                    f"checksum {t.crc32}{of}. {REMEDY}"
                )
        if whole != self.header.crc32:
            raise ElvesError(
                f"The file restored from {self.path} does not match the checksum "
                f"{self.header.crc32}. {REMEDY}"
            )

    def _decode(self, t: Tensor, number: int, out: np.ndarray, coder: Coder) -> None:
        at = self._begin[t.name][number]
        block = self._mapped[at : at + t.blocks[number]]

        def base() -> np.ndarray:
            assert t.of is not None
            other, begin = self._reference(t, t.of), number * BLOCK
            ratio = WIDTHS.get(other.tensors[t.of.tensor].dtype, 1) // t.width
            return other.read(t.of.tensor, begin * ratio, (begin + out.size) * ratio)

        try:
            words = Words(t.width, t.dtype in FLOATS, t.bound)
            coder.decode(block, words, base if t.of else None, out)
        except Damaged as error:
            remedy = REMEDY
            if t.of is not None and self._reference(t, t.of).checksum(t.of.tensor) != t.of.crc32:
                remedy = (
                    f"It was packed against a different `{t.of.tensor}` from the one in "
                    f"{self._reference(t, t.of).path}. Pass the right folder with --base."
                )
            raise ElvesError(
                f"the tensor `{t.name}` in {self.path}, block {number}: {error}. {remedy}"
            ) from error

    def _reference(self, t: Tensor, of: Reference) -> TensorFile:
        """Returns the file of the tensor that `of` refers to; checks that the tensor fits."""
        other = self if of.where == "file" else self._opened(t, of)
        info = other.tensors.get(of.tensor)
        fits = info is not None and (
            (info.dtype, info.bytes) == (t.dtype, t.bytes)
            or (info.dtype == "F32" and t.dtype == "BF16" and info.bytes == 2 * t.bytes)
        )
        if fits and other is self:  # prevents a cycle
            target = self.header.tensors[of.tensor]
            fits = target.codec != DUPLICATE if t.codec == DUPLICATE else target.of is None
        if not fits:
            raise ElvesError(
                f"the tensor `{t.name}` in {self.path}: `{of.tensor}` in {other.path} does not "
                f"match ({info and (info.dtype, info.shape)}). Pass the right folder with --base."
            )
        return other

    def _opened(self, t: Tensor, of: Reference) -> TensorFile:
        folder = self._base if of.where == "base" else self.path.parent
        path = folder / of.file if folder else None
        if path not in self._references:
            if path is None or not path.is_file():
                raise ElvesError(
                    f"the tensor `{t.name}` in {self.path}: the file {path or of.file}, against "
                    "which it was packed, is missing. Pass its folder with --base."
                )
            self._references[path] = open_tensors(path)
        return self._references[path]


def open_tensors(path: Path, *, base: Path | None = None, threads: int = 1) -> TensorFile:
    """Opens a plain or packed tensor file; the arguments are those of `PackedFile`."""
    if is_packed(path):
        return PackedFile(path, base=base, threads=threads)
    return PlainFile(path)
