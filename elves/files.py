"""Files of tensors that are read by name: plain safetensors, and packed ones, alike.

with open_tensors(path) as file:
    file.read("w", 0, 4096)          # bytes, of the blocks that have them
    file["w"]                        # the whole tensor
    file.get_slice("w")[2:4]         # some rows, as safetensors has it
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elves.blocks import BLOCK, Coder, Damaged, Words
from elves.checksum import crc32
from elves.dtypes import FLOATS, NUMPY, WIDTHS
from elves.errors import ElvesError
from elves.header import DUPLICATE, REMEDY, Of, Tensor, is_packed, read_header

# Files that refer to files that refer to files; more is a circle.
_DEEPEST = 8


class Info(NamedTuple):
    """What a tensor is."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


class TensorFile:
    """A file of tensors; use with `with`. For one thread."""

    path: Path
    tensors: Mapping[str, Info]

    def __init__(self, path: Path):
        self.path = path
        self._file = contextlib.ExitStack()
        self._mapped = _mapped(path, self._file)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Lets the file go. Safe twice."""
        self._mapped = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # arrays of the caller may still be in it
            self._file.close()

    def keys(self) -> list[str]:
        return list(self.tensors)

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        """Some bytes of a tensor, uint8; read-only."""
        raise NotImplementedError

    def __getitem__(self, name: str) -> np.ndarray:
        """A whole tensor.

        Raises:
            KeyError: If there is none of that name.
            ElvesError: If it is damaged, or of a dtype that NumPy has not.
        """
        return self.get_slice(name)[()]

    def get_slice(self, name: str) -> Slice:
        """A tensor that is read when it is indexed."""
        return Slice(self, name, self.tensors[name])


class Slice:
    """A tensor in a file. Of an index the rows are read, and what is in them then cut out."""

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
                f"the tensor `{self._name}` in {self._file.path}: expected a dtype that NumPy has, "
                f"got {self._info.dtype}. Restore the file, and read it by what can."
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
    """A safetensors file as it is.

    Raises:
        ElvesError: If it is none, or not whole.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        self.head = 0  # bytes in front of the tensors
        self._begin: dict[str, int] = {}
        try:
            self._read_header()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            size = self._mapped.size
            self.close()
            raise ElvesError(
                f"expected a whole safetensors file {path}, got {size} bytes that cannot be read "
                f"({error}). {REMEDY}"
            ) from error

    def _read_header(self) -> None:
        length = int.from_bytes(self._mapped[:8].tobytes(), "little")
        self.head = 8 + length
        if not 8 < self.head <= self._mapped.size:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(self._mapped[8 : self.head].tobytes())
        header.pop("__metadata__", None)
        places = sorted((tuple(x["data_offsets"]), name) for name, x in header.items())
        tensors, end = {}, 0
        for (begin, stop), name in places:
            one = header[name]
            shape, dtype = tuple(one["shape"]), one["dtype"]
            if begin != end or stop < begin or type(stop) is not int:
                raise ValueError(f"`{name}` from {begin} to {stop}, where {end} is next")
            if dtype in WIDTHS and math.prod(shape) * WIDTHS[dtype] != stop - begin:
                raise ValueError(f"`{name}`, {dtype} of the shape {shape}, in {stop - begin} bytes")
            tensors[name] = Info(dtype, shape, stop - begin)
            self._begin[name] = self.head + begin
            end = stop
        if self.head + end != self._mapped.size:
            raise ValueError(f"{self.head + end} bytes by its header")
        self.tensors = tensors

    def read_head(self) -> bytes:
        """What is in front of the tensors."""
        return self._mapped[: self.head].tobytes()

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        at = self._begin[name]
        return self._mapped[at + begin : at + end]


class PackedFile(TensorFile):
    """A packed file.

    Args:
        path: Of the file.
        base: The folder that it was packed against; None for where that was then.
        threads: That decode blocks.
    """

    def __init__(self, path: Path, *, base: Path | None = None, threads: int = 1, depth: int = 0):
        self.header, self._blocks = read_header(path)
        super().__init__(path)
        self.tensors = {
            name: Info(t.dtype, t.shape, t.bytes) for name, t in self.header.tensors.items()
        }
        self._base = base or (Path(self.header.base) if self.header.base else None)
        self._depth = depth
        self._threads = threads
        self._coders = [Coder()]
        self._others: dict[Path, TensorFile] = {}
        self._begin: dict[str, list[int]] = {}
        at = self._blocks
        for name, t in self.header.tensors.items():
            self._begin[name] = begins = []
            for size in t.blocks:
                begins.append(at)
                at += size

    def close(self) -> None:
        for other in getattr(self, "_others", {}).values():
            other.close()
        super().close()

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        t = self.header.tensors[name]
        if t.codec == DUPLICATE:
            assert t.of is not None
            return self._other(t, t.of).read(t.of.tensor, begin, end)
        first, last = begin // BLOCK, -(-end // BLOCK) if end > begin else begin // BLOCK
        out = np.empty(min(last * BLOCK, t.bytes) - first * BLOCK if last > first else 0, np.uint8)
        numbers = range(first, last)
        pieces = [out[(i - first) * BLOCK : (i - first + 1) * BLOCK] for i in numbers]
        if self._threads == 1 or len(numbers) == 1 or t.of is not None:
            for i, piece in zip(numbers, pieces, strict=True):
                self._decode(t, i, piece, self._coders[0])
        else:
            self._decode_at_once(t, numbers, pieces)
        return out[begin - first * BLOCK : end - first * BLOCK]

    def check(self, name: str) -> int:
        """Decodes a tensor, block by block, and forgets it.

        Returns:
            The CRC-32 of its bytes.

        Raises:
            ElvesError: If it is damaged.
        """
        t, found = self.header.tensors[name], 0
        for begin in range(0, t.bytes, BLOCK):
            piece = self.read(name, begin, min(begin + BLOCK, t.bytes))
            found = crc32(piece, found)
        return self._whole(t, found)

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """A tensor's bytes, some blocks at a time; at the end its checksum is compared."""
        t, found = self.header.tensors[name], 0
        for begin in range(0, t.bytes, BLOCK * self._threads):
            piece = self.read(name, begin, min(begin + BLOCK * self._threads, t.bytes))
            found = crc32(piece, found)
            yield piece
        self._whole(t, found)

    def _whole(self, t: Tensor, found: int) -> int:
        if found != t.crc32:
            of = ": what it is a duplicate of is another one now" if t.codec == DUPLICATE else ""
            raise ElvesError(
                f"the tensor `{t.name}` in {self.path}: expected bytes with the checksum "
                f"{t.crc32}, got {found}{of}. {REMEDY}"
            )
        return found

    def _decode_at_once(self, t: Tensor, numbers: range, pieces: Sequence[np.ndarray]) -> None:
        while len(self._coders) < self._threads:
            self._coders.append(Coder())

        def some(k: int) -> None:  # each thread has a coder of its own
            for i, piece in list(zip(numbers, pieces, strict=True))[k :: self._threads]:
                self._decode(t, i, piece, self._coders[k])

        with ThreadPoolExecutor(self._threads, thread_name_prefix="elves") as pool:
            list(pool.map(some, range(self._threads)))

    def _decode(self, t: Tensor, number: int, out: np.ndarray, coder: Coder) -> None:
        at = self._begin[t.name][number]
        block = self._mapped[at : at + t.blocks[number]]
        words = Words(t.width, t.dtype in FLOATS, t.bound)

        def base() -> np.ndarray:
            assert t.of is not None
            return self._base_of(t, t.of, number * BLOCK, out.size)

        try:
            coder.decode(block, words, base if t.of else None, out)
        except Damaged as error:
            remedy = REMEDY
            if t.of is not None and self._crc32_of(t, t.of) != t.of.crc32:
                remedy = (
                    f"It was packed against another `{t.of.tensor}` than that in "
                    f"{self._other(t, t.of).path}: name the right folder with --base, or put the "
                    "right file there."
                )
            raise ElvesError(
                f"the tensor `{t.name}` in {self.path}, block {number}: {error}. {remedy}"
            ) from error

    def _crc32_of(self, t: Tensor, of: Of) -> int:
        other = self._other(t, of)
        return checksum_of(other, of.tensor)

    def _base_of(self, t: Tensor, of: Of, begin: int, size: int) -> np.ndarray:
        other = self._other(t, of)
        width = WIDTHS.get(other.tensors[of.tensor].dtype, 1) // t.width
        return other.read(of.tensor, begin * width, (begin + size) * width)

    def _other(self, t: Tensor, of: Of) -> TensorFile:
        """The file that a tensor refers to, which must have one that fits."""
        if of.where == "file":
            other: TensorFile = self
        else:
            if of.where == "base" and self._base is None:
                raise ElvesError(
                    f"the tensor `{t.name}` in {self.path}: expected the folder that it was packed "
                    "against, got none. Name it with --base."
                )
            folder = self._base if of.where == "base" else self.path.parent
            assert folder is not None
            path = folder / of.file
            if path not in self._others:
                if self._depth == _DEEPEST:
                    raise ElvesError(
                        f"the tensor `{t.name}` in {self.path}: expected files that refer to files "
                        f"{_DEEPEST} deep at most, got more. {REMEDY}"
                    )
                if not path.is_file():
                    which = "the folder with --base" if of.where == "base" else "both files again"
                    raise ElvesError(
                        f"the tensor `{t.name}` in {self.path}: expected the file {path}, against "
                        f"which it was packed, got none. Name {which}."
                    )
                self._others[path] = open_tensors(path, depth=self._depth + 1)
            other = self._others[path]
        found = other.tensors.get(of.tensor)
        fits = found is not None and (
            (found.dtype, found.bytes) == (t.dtype, t.bytes)
            or (found.dtype == "F32" and t.dtype == "BF16" and found.bytes == 2 * t.bytes)
        )
        if fits and other is self:  # there is no circle
            target = self.header.tensors[of.tensor]
            fits = target.codec != DUPLICATE if t.codec == DUPLICATE else target.of is None
        if not fits:
            raise ElvesError(
                f"the tensor `{t.name}` in {self.path}: expected `{of.tensor}` in {other.path} "
                f"like it, got {found and (found.dtype, found.shape)}. Name the right folder with "
                "--base, or put the right file there."
            )
        return other


def open_tensors(
    path: Path, *, base: Path | None = None, threads: int = 1, depth: int = 0
) -> TensorFile:
    """A file of tensors, plain or packed.

    Args:
        path: Of the file.
        base: The folder that a packed file was packed against; None for where that was then.
        threads: That decode a tensor's blocks.
        depth: How many files have referred to this one.

    Raises:
        ElvesError: If the file cannot be read.
    """
    if is_packed(path):
        return PackedFile(path, base=base, threads=threads, depth=depth)
    return PlainFile(path)


def checksum_of(file: TensorFile, name: str) -> int:
    """The CRC-32 of a tensor's bytes."""
    found, size = 0, file.tensors[name].bytes
    for begin in range(0, size, BLOCK):
        end = min(begin + BLOCK, size)
        found = crc32(file.read(name, begin, end), found)
    return found


def _mapped(path: Path, stack: contextlib.ExitStack) -> np.ndarray:
    try:
        with open(path, "rb") as file:
            if not file.seek(0, 2):
                return np.empty(0, np.uint8)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ElvesError(
            f"expected a file {path}, got none that can be read ({error.strerror}). Check the path."
        ) from error
    stack.callback(mapped.close)
    return np.frombuffer(mapped, np.uint8)
