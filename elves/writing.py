"""How a file is packed: pieces in, blocks out, each decoded and compared while it is written.

Memory holds a few blocks for each thread, whatever the size of the file: pieces are looked at where
they are, which may be a file that is mapped.
"""

from __future__ import annotations

import json
import math
import os
import threading
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from elves.blocks import BLOCK, CODECS, Coder, Encoded, Words
from elves.files import TensorFile
from elves.header import (
    DUPLICATE,
    FLOATS,
    NUMPY,
    SAFETENSORS,
    WIDTHS,
    ElvesError,
    Header,
    Of,
    Tensor,
    encoded,
    longest,
)
from elves.whole import sync_folder, unfinished

# Of a smaller tensor a copy costs no more than to say what it is a copy of.
_LEAST_DUPLICATE = 256
_ZEROS = np.zeros(BLOCK, np.uint8)


@dataclass(frozen=True)
class Near:
    """A tensor that is close to a piece: of its dtype, or the float32 of which it is the cast.

    Attributes:
        file: Where it is read while packing.
        tensor: Its name there.
        path: Of the file, in the folder of the base.
    """

    file: TensorFile
    tensor: str
    path: str


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
            raise ElvesError(f"`bound`: expected a finite number above 0, got {self.bound}.")
        if self.threads < 1:
            raise ElvesError(f"`threads`: expected at least 1, got {self.threads}.")

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
        seen = [entry for entries in self._seen.values() for entry in entries]
        files = {os.path.relpath(file, path.parent) for _, file, _ in seen if file != path}
        names = {p.name for p in pieces} | {t.name for _, _, t in seen}
        file, name = (max(x, key=lambda x: len(json.dumps(x)), default="") for x in (files, names))
        return Of("folder", file, name, 2**32 - 1)

    def add(self, piece: Piece, path: Path, packed: Tensor) -> None:
        """Remembers a piece, whose bytes must stay as they are, and what became of it."""
        self._seen.setdefault(_key(piece), []).append((piece.data, path, packed))


def _key(piece: Piece) -> tuple[int, str, int]:
    data = piece.data
    return data.size, piece.dtype, zlib.crc32(data[-2048:], zlib.crc32(data[:2048]))


def smallest_rms(pieces: Sequence[Piece]) -> tuple[float, str] | None:
    """The smallest root mean square of a float32 tensor, and the name of that tensor.

    A larger bound would leave nothing of it. None if there is no tensor that a bound would be for:
    float32 that are not all equal.
    """
    found: list[tuple[float, str]] = []
    for piece in pieces:
        if piece.dtype != "F32" or not piece.data.size:
            continue
        total, count, constant = 0.0, 0, True
        for i in range(0, piece.data.size, BLOCK):
            block = piece.data[i : i + BLOCK].view(np.float32)
            finite = block[np.isfinite(block)].astype(np.float64)
            total, count = total + finite @ finite, count + finite.size
            words, first = block.view(np.uint32), piece.data[:4].view(np.uint32)
            constant = constant and bool((words == first).all())
        if total > 0 and not constant:
            found.append((math.sqrt(total / count), piece.name))
    return min(found, default=None)


def check_bound(path: Path, pieces: Sequence[Piece], bound: float) -> None:
    """Refuses a bound that would leave nothing of some tensor.

    Raises:
        ElvesError: If it is above the root mean square of one.
    """
    sensible = smallest_rms(pieces)
    if sensible is not None and bound > sensible[0]:
        raise ElvesError(
            f"the tensor `{sensible[1]}` in {path}: expected a bound of at most its root mean "
            f"square, {sensible[0]:.3g}, got {bound:.3g}. The largest sensible one for this file "
            f"is 2^{math.floor(math.log2(sensible[0]))}."
        )


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
        head: The bytes in front of the pieces.
        base: The folder of the pieces' `near`.
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
    planned = {piece.name: _planned(piece, options) for piece in pieces}
    assert len(planned) == len(pieces)
    header = Header(
        SAFETENSORS,
        zlib.compress(head, 9) if head else b"",
        len(head) + sum(p.data.size for p in pieces),
        0,
        None if base is None else str(base.absolute()),
        _with_longest(planned, duplicates.longest(pieces, path)),
    )
    length = longest(header)
    with unfinished(path) as part:
        with open(part, "wb") as file, _Encoder(options) as encoder:
            file.seek(length)
            tensors, whole = {}, zlib.crc32(head)
            for piece in pieces:
                t = _write(file, piece, planned[piece.name], encoder, duplicates, path)
                tensors[piece.name], whole = t, _combined(whole, t.crc32, t.bytes)
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
    names = {dtype: name for name, dtype in NUMPY.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    pieces, end = [], 0
    for name, x in tensors.items():
        if x.dtype not in names:
            raise ElvesError(
                f"the array `{name}`: expected a dtype of safetensors, got {x.dtype}. Cast it."
            )
        data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        pieces.append(Piece(name, names[x.dtype], tuple(x.shape), data))
        begin, end = end, end + data.size
        said = {"dtype": names[x.dtype], "shape": list(x.shape), "data_offsets": [begin, end]}
        header[name] = said
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    pack(Path(path), pieces, Options(bound=bound, threads=threads), head=head)


def _planned(piece: Piece, options: Options) -> Tensor:
    bound, of, near = None, None, piece.near
    if options.bound is not None and piece.dtype == "F32":
        bound = float(options.bound)
    if near is not None:
        of = Of("base", near.path, near.tensor, near.file.checksum(near.tensor))
    return Tensor(
        piece.name, piece.dtype, piece.shape, piece.data.size, CODECS[0], bound, 0.0, 0, of, ()
    )


def _with_longest(planned: Mapping[str, Tensor], longest_of: Of) -> dict[str, Tensor]:
    """The tensors with the longest that their `of` may become, for the room of the header."""
    tensors = {}
    for name, t in planned.items():
        may = [t.of] if t.of else []
        may += [longest_of] if t.bytes >= _LEAST_DUPLICATE else []
        of = max(may, key=lambda x: len(json.dumps(astuple(x))), default=None)
        tensors[name] = replace(t, of=of)
    return tensors


def _write(
    file: Any, piece: Piece, t: Tensor, encoder: _Encoder, duplicates: Duplicates, path: Path
) -> Tensor:
    if piece.data.size >= _LEAST_DUPLICATE:
        same = duplicates.find(piece, path)
        if same is not None:
            of, error = same
            return replace(t, codec=DUPLICATE, crc32=of.crc32, of=of, error=error)
    sizes, codecs, checksum, error = [], Counter({0: 0}), 0, 0.0
    for block, size in encoder.blocks(piece, t):
        file.write(block.data.data)
        sizes.append(len(block.data))
        codecs[block.codec] += 1
        checksum = _combined(checksum, block.crc32, size)
        error = max(error, block.error)
    codec = CODECS[max(codecs, key=lambda codec: (codecs[codec], -codec))]
    of = t.of if codecs[CODECS.index("delta")] else None  # else it need not be there to be read
    packed = replace(t, codec=codec, blocks=tuple(sizes), crc32=checksum, error=error, of=of)
    duplicates.add(piece, path, packed)
    return packed


def _combined(first: int, second: int, length: int) -> int:
    """The CRC-32 of two stretches of bytes, one behind the other, from those of each.

    A CRC is linear, but for the inversions at both ends: the first one, carried on over as many
    zeros as the second has bytes, is added to the second.
    """
    carried = first ^ 0xFFFFFFFF
    for begin in range(0, length, BLOCK):
        carried = zlib.crc32(_ZEROS[: length - begin], carried)
    return second ^ carried ^ 0xFFFFFFFF


class _Encoder:
    """Encodes blocks, in one thread or several."""

    def __init__(self, options: Options):
        self._options = options
        self._idle = deque(Coder() for _ in range(options.threads))
        self._pool: ThreadPoolExecutor | None = None
        self._reading = threading.Lock()  # files are for one thread

    def __enter__(self) -> _Encoder:
        if self._options.threads > 1:
            self._pool = ThreadPoolExecutor(self._options.threads, thread_name_prefix="elves")
        return self

    def __exit__(self, *_: Any) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def blocks(self, piece: Piece, t: Tensor) -> Iterator[tuple[Encoded, int]]:
        """The blocks of a piece in their order, each with the bytes that it restores."""
        waiting: deque[tuple[Any, int]] = deque()
        for begin in range(0, piece.data.size, BLOCK):
            size = min(BLOCK, piece.data.size - begin)
            if self._pool is None:
                yield self._encode(piece, t, begin), size
                continue
            # No more than are soon needed: what is encoded waits in memory.
            if len(waiting) == 2 * self._options.threads:
                future, length = waiting.popleft()
                yield future.result(), length
            waiting.append((self._pool.submit(self._encode, piece, t, begin), size))
        for future, length in waiting:
            yield future.result(), length

    def _encode(self, piece: Piece, t: Tensor, begin: int) -> Encoded:
        words = Words(t.width, t.dtype in FLOATS, self._options.step if t.bound else None)
        coder = self._idle.popleft()
        try:
            data = piece.data[begin : begin + BLOCK]
            if data.ctypes.data % t.width:  # in files, tensors may be anywhere
                data = data.copy()
            base, near = None, piece.near
            if near is not None:
                ratio = WIDTHS[near.file.tensors[near.tensor].dtype] // t.width
                with self._reading:
                    base = near.file.read(near.tensor, begin * ratio, (begin + data.size) * ratio)
            block = coder.encode(data, words, base)
            # With several threads the coder goes on before this one is written.
            return block if self._pool is None else replace(block, data=block.data.copy())
        finally:
            self._idle.append(coder)
