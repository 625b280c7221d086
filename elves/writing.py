"""How a file is packed: pieces in, blocks out, each decoded and compared while it is written.

Memory holds a few blocks for each thread, whatever the size of the file: pieces are looked at where
they are, which may be a file that is mapped.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from elves import loops
from elves.blocks import BLOCK, CODECS, Coder, Encoded, Words
from elves.checksum import combined, crc32
from elves.dtypes import FLOATS, NAMES, WIDTHS
from elves.errors import ElvesError
from elves.files import TensorFile, checksum_of
from elves.header import DUPLICATE, SAFETENSORS, Header, Of, Tensor, encoded, longest
from elves.whole import sync_folder, unfinished

# Of a smaller tensor a copy costs no more than to say what it is a copy of.
_LEAST_DUPLICATE = 256


@dataclass(frozen=True)
class Near:
    """A tensor that is close to a piece: of its dtype, or the float32 of which it is the cast.

    Attributes:
        file: Where it is read while packing.
        tensor: Its name there.
        where, name: As of `Of`: how it is found when the packed file is read.
    """

    file: TensorFile
    tensor: str
    where: str
    name: str


@dataclass(frozen=True)
class Piece:
    """A tensor to pack.

    Attributes:
        data: Its bytes: uint8, of one dimension.
        near: What it is close to; None for nothing.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray
    near: Near | None = None


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to pack.

    Attributes:
        bound: The largest error that a float32 may get; None for none at all.
        threads: That encode blocks.
    """

    bound: float | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        if self.bound is not None and not (math.isfinite(self.bound) and self.bound > 0):
            raise ElvesError(
                f"`bound`: expected a finite number above 0, got {self.bound}. Pass the largest "
                "error that a weight may get, such as 2^-24, or leave it out."
            )
        if self.threads < 1:
            raise ElvesError(
                f"`threads`: expected at least 1, got {self.threads}. Leave it out for 1."
            )

    @property
    def step(self) -> float | None:
        """The largest power of two whose half is within the bound."""
        if self.bound is None:
            return None
        # Beyond these, float32 has no reciprocal or no multiples.
        return 2.0 ** min(100, max(-126, math.floor(math.log2(2 * self.bound))))


@dataclass
class Duplicates:
    """The tensors that have been packed already with the same options, to be found again."""

    _seen: dict[tuple[int, str, int], list[tuple[np.ndarray, Path, Tensor]]] = field(
        default_factory=dict
    )

    def find(self, piece: Piece, path: Path) -> tuple[Of, float] | None:
        """What `piece` equals, byte for byte, and the largest error there."""
        for data, file, t in self._seen.get(_key(piece), ()):
            if np.array_equal(data, piece.data):
                if file == path:
                    return Of("file", "", t.name, t.crc32), t.error
                return Of("folder", os.path.relpath(file, path.parent), t.name, t.crc32), t.error
        return None

    def longest(self, pieces: Sequence[Piece], path: Path) -> Of:
        """What takes as much room as any that `find` may give for these pieces."""
        seen = [one for some in self._seen.values() for one in some]
        files = {os.path.relpath(file, path.parent) for _, file, _ in seen if file != path}
        names = {p.name for p in pieces} | {t.name for _, _, t in seen}
        file, name = (max(x, key=lambda x: len(json.dumps(x)), default="") for x in (files, names))
        return Of("folder", file, name, 2**32 - 1)

    def add(self, piece: Piece, path: Path, packed: Tensor) -> None:
        """Remembers a piece, whose bytes must stay as they are, and what became of it."""
        self._seen.setdefault(_key(piece), []).append((piece.data, path, packed))


def _key(piece: Piece) -> tuple[int, str, int]:
    data = piece.data
    ends = crc32(np.concatenate([data[:2048], data[-2048:]]))
    return data.size, piece.dtype, ends


def largest_sensible_bound(pieces: Sequence[Piece]) -> tuple[float, str] | None:
    """The largest power of two that is below the root mean square of every float32 tensor.

    Returns:
        It, and the name of the tensor whose root mean square it is about. None if there is no
        tensor that a bound would be for: float32 that are not all equal.
    """
    found: list[tuple[float, str]] = []
    for piece in pieces:
        total, count = 0.0, 0
        constant = True
        if piece.dtype != "F32" or not piece.data.size:
            continue
        words = piece.data.view(np.uint32)
        for i in range(0, words.size, BLOCK // 4):
            some, finite = loops.sum_of_squares(words[i : i + BLOCK // 4])
            total, count = total + some, count + finite
            constant = constant and loops.constant(words[i : i + BLOCK // 4])
            constant = constant and words[i] == words[0]
        if total > 0 and not constant:
            found.append((math.sqrt(total / count), piece.name))
    if not found:
        return None
    smallest, name = min(found)
    return 2.0 ** math.floor(math.log2(smallest)), name


def check_bound(path: Path, pieces: Sequence[Piece], bound: float) -> None:
    """Refuses a bound that would leave nothing of some tensor.

    Raises:
        ElvesError: If it is above the root mean square of one.
    """
    sensible = largest_sensible_bound(pieces)
    if sensible is not None and bound > sensible[0] and bound > _rms(pieces, sensible[1]):
        raise ElvesError(
            f"the tensor `{sensible[1]}` in {path}: expected a bound of at most its root mean "
            f"square, {_rms(pieces, sensible[1]):.3g}, got {bound:.3g}. The largest sensible one "
            f"for this file is 2^{round(math.log2(sensible[0]))}."
        )


def _rms(pieces: Sequence[Piece], name: str) -> float:
    data = next(p.data for p in pieces if p.name == name).view(np.uint32)
    sums = [loops.sum_of_squares(data[i : i + BLOCK // 4]) for i in range(0, data.size, BLOCK // 4)]
    return math.sqrt(sum(s for s, _ in sums) / sum(n for _, n in sums))


def pack(
    path: Path,
    pieces: Sequence[Piece],
    options: Options,
    *,
    head: bytes = b"",
    base: Path | None = None,
    duplicates: Duplicates | None = None,
    only_smaller: bool = False,
) -> Header | None:
    """Writes one packed file: under another name until all of it is on the disk.

    Args:
        path: Of the file; what is there is replaced.
        pieces: All that there is behind `head`, in its order.
        options: How.
        head: Its bytes in front of the pieces.
        base: The folder of the pieces' `near` with `where` "base".
        duplicates: Of other files that are packed with this one.
        only_smaller: Whether to write nothing if the file would not be smaller.

    Returns:
        What was written; None if nothing was.

    Raises:
        ElvesError: If the bound is too large.
        OSError: If it cannot be written. Nothing is left then.
        RuntimeError: If a block could not be restored: a fault of this package or of the memory.
    """
    if options.bound is not None:
        check_bound(path, pieces, options.bound)
    duplicates = duplicates or Duplicates()
    planned = [_plan(piece, options) for piece in pieces]
    header = Header(
        SAFETENSORS,
        zlib.compress(head, 9) if head else b"",
        len(head) + sum(p.data.size for p in pieces),
        0,
        None if base is None else str(base.absolute()),
        {t.name: t for t in planned},
    )
    assert len(header.tensors) == len(pieces)
    tensors = _with_duplicates(header, duplicates.longest(pieces, path))
    length = longest(replace(header, tensors=tensors))
    with unfinished(path) as part:
        with open(part, "wb") as file:
            file.seek(length)
            tensors = {}
            with _Encoder(options) as encoder:
                for piece, t in zip(pieces, planned, strict=True):
                    tensors[piece.name] = _write(file, piece, t, encoder, duplicates, path)
            whole = zlib.crc32(head)
            for t in tensors.values():
                whole = combined(whole, t.crc32, t.bytes)
            header = replace(header, tensors=tensors, crc32=whole)
            file.truncate()
            if only_smaller and file.tell() >= header.bytes:
                return None
            file.seek(0)
            file.write(encoded(header, length))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    return header


def save(
    path: str | Path,
    tensors: Mapping[str, np.ndarray],
    bound: float | None = None,
    *,
    threads: int = 1,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes arrays as a packed file; restored, it is the safetensors file that has them.

    Args:
        path: Of the file; what is there is replaced.
        tensors: By name.
        bound: The largest error that a float32 may get; None for none at all.
        threads: That encode blocks.
        metadata: Of the safetensors file.

    Raises:
        ElvesError: If the bound is no sensible one, or safetensors has not the dtype of an array.
        OSError: If it cannot be written. Nothing is left then.
    """
    pieces = []
    for name, x in tensors.items():
        if x.dtype not in NAMES:
            raise ElvesError(
                f"the array `{name}`: expected a dtype of safetensors, got {x.dtype}. Cast it."
            )
        data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        pieces.append(Piece(name, NAMES[x.dtype], tuple(x.shape), data))
    pack(Path(path), pieces, Options(bound=bound, threads=threads), head=_head(pieces, metadata))


def _head(pieces: Sequence[Piece], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.data.size
        header[piece.name] = {
            "dtype": piece.dtype,
            "shape": list(piece.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _plan(piece: Piece, options: Options) -> Tensor:
    lossy = options.bound is not None and piece.dtype == "F32"
    of = None
    if piece.near is not None:
        near = piece.near
        of = Of(near.where, near.name, near.tensor, checksum_of(near.file, near.tensor))
    return Tensor(
        piece.name,
        piece.dtype,
        piece.shape,
        piece.data.size,
        CODECS[0],
        float(options.bound) if lossy and options.bound is not None else None,
        0.0,
        0,
        of,
        (),
    )


def _with_duplicates(header: Header, longest_of: Of) -> dict[str, Tensor]:
    """The tensors with the longest that their `of` may become, for the room of the header."""
    found = {}
    for name, t in header.tensors.items():
        may = [x for x in (t.of, longest_of) if x and (x is t.of or t.bytes >= _LEAST_DUPLICATE)]
        of = max(may, key=lambda x: len(json.dumps(dataclasses.astuple(x))), default=None)
        found[name] = replace(t, of=of)
    return found


def _write(
    file: Any, piece: Piece, t: Tensor, encoder: _Encoder, duplicates: Duplicates, path: Path
) -> Tensor:
    if piece.data.size >= _LEAST_DUPLICATE:
        same = duplicates.find(piece, path)
        if same is not None:
            of, error = same
            return replace(t, codec=DUPLICATE, crc32=of.crc32, of=of, error=error)
    sizes, counts, found, error = [], [0] * len(CODECS), 0, 0.0
    for one, size in encoder.blocks(piece, t):
        file.write(one.data.data)
        sizes.append(len(one.data))
        counts[one.codec] += 1
        found = combined(found, one.crc32, size)
        error = max(error, one.error)
    codec = CODECS[int(np.argmax(counts))]
    delta = counts[CODECS.index("delta")]
    of = t.of if delta else None  # what is of no use need not be there when it is read
    packed = replace(t, codec=codec, blocks=tuple(sizes), crc32=found, error=error, of=of)
    duplicates.add(piece, path, packed)
    return packed


class _Encoder:
    """Encodes blocks, in one thread or several."""

    def __init__(self, options: Options):
        self._options = options
        self._threads = options.threads
        self._idle = deque(Coder() for _ in range(options.threads))
        self._pool: ThreadPoolExecutor | None = None
        self._reading = threading.Lock()  # files are for one thread

    def __enter__(self) -> _Encoder:
        if self._threads > 1:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="elves")
        return self

    def __exit__(self, *_: Any) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def blocks(self, piece: Piece, t: Tensor) -> Iterator[tuple[Encoded, int]]:
        """The blocks of a piece in their order, each with the bytes that it restores."""
        step = self._options.step if t.bound is not None else None
        words = Words(t.width, t.dtype in FLOATS, step)
        numbers = range(0, piece.data.size, BLOCK)
        if self._pool is None:
            for begin in numbers:
                yield self._one(piece, t, words, begin), min(BLOCK, piece.data.size - begin)
            return
        waiting: deque[tuple[Any, int]] = deque()
        for begin in numbers:
            # No more than are soon needed: what is encoded waits in memory.
            if len(waiting) == 2 * self._threads:
                future, size = waiting.popleft()
                yield future.result(), size
            size = min(BLOCK, piece.data.size - begin)
            waiting.append((self._pool.submit(self._one, piece, t, words, begin), size))
        for future, size in waiting:
            yield future.result(), size

    def _one(self, piece: Piece, t: Tensor, words: Words, begin: int) -> Encoded:
        coder = self._idle.popleft()
        try:
            data = piece.data[begin : begin + BLOCK]
            if data.ctypes.data % t.width:  # in files, tensors may be anywhere
                data = data.copy()
            base = None
            if piece.near is not None:
                near = piece.near
                width = WIDTHS[near.file.tensors[near.tensor].dtype] // t.width
                with self._reading:
                    base = near.file.read(near.tensor, begin * width, (begin + data.size) * width)
            found = coder.encode(data, words, base)
            # With several threads the coder goes on before this one is written.
            return found if self._pool is None else replace(found, data=found.data.copy())
        finally:
            self._idle.append(coder)
