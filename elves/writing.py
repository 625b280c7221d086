"""Packs a file: encodes pieces into blocks, and decodes and compares each block before writing it.

A few blocks per thread are in memory, regardless of the file's size, because pieces are read in
place, possibly from a mapped file.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elves.atomic import atomic_path
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
    Reference,
    Tensor,
    encoded,
    max_header_size,
)
from elves.safetensors import encode_header

# A smaller tensor takes no more space than a reference to another.
_LEAST_DUPLICATE = 256
_ZEROS = np.zeros(BLOCK, np.uint8)


class Near(NamedTuple):
    """A base's tensor that is close to a piece: it has the same dtype, or is float32 if the piece
    is bfloat16."""

    file: TensorFile
    tensor: str
    path: str  # of the file, in the base's folder


class Piece(NamedTuple):
    """A tensor to pack."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray  # its bytes: uint8, one dimension
    near: Near | None = None


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options for packing."""

    bound: float | None = None  # the maximum error of a float32
    threads: int = 1

    def __post_init__(self) -> None:
        if self.bound is not None and not (math.isfinite(self.bound) and self.bound > 0):
            raise ElvesError(f"`bound`: must be a finite number above 0, but is {self.bound}.")

    @property
    def step(self) -> float | None:
        """Returns the largest power of two whose half is within the bound."""
        if self.bound is None:
            return None
        # Outside this range, float32 has no reciprocal or no multiples.
        return 2.0 ** min(100, max(-126, math.floor(math.log2(2 * self.bound))))


def _duplicates(pieces: Sequence[Piece]) -> dict[str, str]:
    """Returns the pieces that equal an earlier piece byte for byte, with that piece's name."""
    distinct: dict[tuple[int, str, int], list[Piece]] = {}
    equal = {}
    for piece in pieces:
        if piece.data.size < _LEAST_DUPLICATE:
            continue
        ends = zlib.crc32(piece.data[-2048:], zlib.crc32(piece.data[:2048]))
        similar = distinct.setdefault((piece.data.size, piece.dtype, ends), [])
        for other in similar:
            if np.array_equal(other.data, piece.data):
                equal[piece.name] = other.name
                break
        else:
            similar.append(piece)
    return equal


def check_bound(path: Path, pieces: Sequence[Piece], bound: float) -> None:
    """Rejects a bound above a tensor's root mean square, which would erase the tensor."""
    every: list[tuple[float, str]] = []
    for piece in pieces:
        total, count, varies = 0.0, 0, False
        for i in range(0, piece.data.size if piece.dtype == "F32" else 0, BLOCK):
            block = piece.data[i : i + BLOCK]
            words = block.view(np.float32)
            finite = words[np.isfinite(words)].astype(np.float64)
            total, count = total + finite @ finite, count + finite.size
            varies = varies or bool((block.reshape(-1, 4) != piece.data[:4]).any())
        if total > 0 and varies:
            every.append((math.sqrt(total / count), piece.name))
    # A bound affects only float32 tensors whose values differ.
    rms, name = min(every, default=(math.inf, ""))
    if bound > rms:
        raise ElvesError(
            f"the tensor `{name}` in {path}: the bound {bound:.3g} exceeds its root mean square, "
            f"{rms:.3g}. The largest sensible bound for this file is "
            f"2^{math.floor(math.log2(rms))}."
        )


def pack(
    path: Path,
    pieces: Sequence[Piece],
    options: Options,
    *,
    head: bytes = b"",
    base: Path | None = None,
    only_smaller: bool = False,
) -> Header | None:
    """Writes one packed file to `path`, replacing any existing file, and returns its header.

    Args:
        pieces: The contents after `head`, in order.
        base: The folder of the pieces' `near` tensors.
        only_smaller: If True, and the file would not be smaller, writes no file and returns None.
    """
    equal = _duplicates(pieces)
    planned = {p.name: _planned(p, options, equal.get(p.name)) for p in pieces}
    assert len(planned) == len(pieces)
    header = Header(
        SAFETENSORS,
        zlib.compress(head, 9) if head else b"",
        len(head) + sum(p.data.size for p in pieces),
        0,
        None if base is None else str(base.absolute()),
        planned,
    )
    length = max_header_size(header)
    with atomic_path(path) as part:
        with open(part, "wb") as file, _Encoder(options) as encoder:
            file.seek(length)
            tensors, whole = {}, zlib.crc32(head)
            for piece in pieces:
                t = planned[piece.name]
                if t.codec == DUPLICATE and t.of is not None:
                    first = tensors[t.of.tensor]
                    of = replace(t.of, crc32=first.crc32)
                    t = replace(t, crc32=first.crc32, error=first.error, of=of)
                else:
                    t = _write(file, piece, t, encoder)
                tensors[t.name], whole = t, _combined(whole, t.crc32, t.bytes)
            header = replace(header, tensors=tensors, crc32=whole)
            file.truncate()
            smaller = file.tell() < header.bytes
            file.seek(0)
            file.write(encoded(header, length))
        if only_smaller and not smaller:
            part.unlink()
            return None
    return header


def save(
    path: str | Path,
    tensors: Mapping[str, np.ndarray],
    bound: float | None = None,
    *,
    threads: int = 1,
) -> None:
    """Writes arrays to a packed file, from which a safetensors file can be restored.

    `bound` is the maximum error of a float32, or None for lossless packing.
    """
    names = {dtype: name for name, dtype in NUMPY.items()}
    pieces = []
    for name, x in tensors.items():
        if x.dtype not in names:
            raise ElvesError(f"the array `{name}`: safetensors cannot store {x.dtype}. Cast it.")
        data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        pieces.append(Piece(name, names[x.dtype], tuple(x.shape), data))
    head = encode_header((p.name, p.dtype, p.shape, p.data.size) for p in pieces)
    options = Options(bound=bound, threads=threads)
    if bound is not None:
        check_bound(Path(path), pieces, bound)
    pack(Path(path), pieces, options, head=head)


def _planned(piece: Piece, options: Options, equal: str | None) -> Tensor:
    name, dtype, shape, data, near = piece
    bound = float(options.bound) if options.bound and dtype == "F32" else None
    codec, of = CODECS[0], None
    if equal is not None:
        codec, of = DUPLICATE, Reference("file", "", equal, 0)
    elif near is not None:
        of = Reference("base", near.path, near.tensor, near.file.checksum(near.tensor))
    return Tensor(name, dtype, shape, data.size, codec, bound, 0.0, 0, of, ())


def _write(file: Any, piece: Piece, t: Tensor, encoder: _Encoder) -> Tensor:
    sizes, codecs, checksum, error = [], Counter({0: 0}), 0, 0.0
    for block in encoder.blocks(piece, t):
        file.write(block.data.data)
        size = min(BLOCK, t.bytes - len(sizes) * BLOCK)
        checksum = _combined(checksum, block.crc32, size)
        sizes.append(len(block.data))
        codecs[block.codec] += 1
        error = max(error, block.error)
    codec = CODECS[max(codecs, key=lambda codec: (codecs[codec], -codec))]
    of = t.of if codecs[CODECS.index("delta")] else None  # otherwise not needed for reading
    return replace(t, codec=codec, blocks=tuple(sizes), crc32=checksum, error=error, of=of)


def _combined(first: int, second: int, length: int) -> int:
    """Returns the CRC-32 of two adjacent ranges of bytes from the CRC-32 of each.

    A CRC is linear, except for the inversions at both ends: the first CRC is extended over zero
    bytes for the second range, and then added to the second CRC.
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
        self._pool = ThreadPoolExecutor(options.threads, thread_name_prefix="elves")
        self._reading = threading.Lock()  # a file must be used by one thread at a time

    def __enter__(self) -> _Encoder:
        return self

    def __exit__(self, *_: Any) -> None:
        self._pool.shutdown(cancel_futures=True)

    def blocks(self, piece: Piece, t: Tensor) -> Iterator[Encoded]:
        """Yields the blocks of a piece in order."""
        waiting: deque[Future[Encoded]] = deque()
        for begin in range(0, piece.data.size, BLOCK):
            # Encodes only a few blocks ahead, because encoded blocks wait in memory.
            if len(waiting) == 2 * self._options.threads:
                yield waiting.popleft().result()
            waiting.append(self._pool.submit(self._encode, piece, t, begin))
        while waiting:
            yield waiting.popleft().result()

    def _encode(self, piece: Piece, t: Tensor, begin: int) -> Encoded:
        words = Words(t.width, t.dtype in FLOATS, self._options.step if t.bound else None)
        data, base, near = piece.data[begin : begin + BLOCK], None, piece.near
        if data.ctypes.data % t.width:  # tensors in files may be unaligned
            data = data.copy()
        if near is not None:
            ratio = WIDTHS[near.file.tensors[near.tensor].dtype] // t.width
            with self._reading:
                base = near.file.read(near.tensor, begin * ratio, (begin + data.size) * ratio)
        coder = self._idle.popleft()
        try:
            block = coder.encode(data, words, base)
            # Copied, because the coder encodes another block before this one is written.
            return replace(block, data=block.data.copy())
        finally:
            self._idle.append(coder)
