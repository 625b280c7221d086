"""Encodes a block, up to 1 MiB of a tensor, with the codec that gives the smallest result.

    stored     the bytes as they are
    constant   one word, if all words are equal
    planes     the bytes of the words by position, each plane raw or in zstd frames
    delta      the same for differences from another tensor's words
    elf        ELF's codes in planes, with an error of at most half a step (only with a bound)
    zstd       the bytes in one zstd frame, which suits integers

A block consists of a CRC-32 for the rest of the block (4 bytes), a CRC-32 for the restored bytes
(4), the codec (1), and the codec's output. Decoding it requires no other block. Integers are
little-endian.

Planes outside zstd frames are incompressible: the lower planes of weights are noise. Frames use the
fastest match finder, so they are effectively Huffman codes; thorough match finders take twice the
time and give planes that are 5% larger (benchmarks/LOG.md).
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import zstandard

from elves import loops

BLOCK = 1 << 20
#: Codecs by number. Only 0.2 wrote "elf24" and "distance", which can no longer be read.
CODECS = ("stored", "constant", "planes", "delta", "elf", "elf24", "distance", "zstd")
STORED, CONSTANT, PLANES, DELTA, ELF, _, _, ZSTD = range(len(CODECS))
_HEAD = struct.Struct("<IIB")
#: Bytes of a block's header.
HEAD = _HEAD.size
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

# Bits per byte above which a plane's frame would be as large as the plane. The estimate from at
# least 16,384 bytes of a whole block is 0.01 too low on average.
_NOISE = 7.95
# Bytes per stretch of a plane. Each stretch has its own Huffman code, which compresses better if a
# block mixes several kinds of weights.
_STRETCH = 1 << 16
# Bits per byte below which byte sequences repeat, so that a match finder is worth its time.
_REPETITIVE = 2.0

_HUFFMAN = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    min_match=7,
    hash_log=6,
    window_log=20,
    write_content_size=True,
)

# The step as a power of two, the number of planes, the number of outliers.
_ELF = struct.Struct("<hBI")


class Damaged(Exception):
    """A block differs from the original; the message describes the difference."""


@dataclass(frozen=True)
class Words:
    """The words of a tensor's bytes."""

    width: int  # bytes per word: 1, 2, 4 or 8
    is_float: bool  # whether a word begins with a sign bit and an exponent
    step: float | None = None  # ELF's, a power of two, only for float32; None without a bound


@dataclass(frozen=True)
class Encoded:
    """A block that was encoded, decoded and compared."""

    data: np.ndarray  # uint8, in the coder's memory: valid until it encodes the next block
    codec: int
    crc32: int  # of the restored bytes
    error: float  # the maximum difference; 0 if bit-identical


class Coder:
    """Encodes and decodes blocks in one thread, with memory for a few blocks, about 8 MiB.

    Reuse a coder: allocating new memory, page by page, took as long as packing.
    """

    def __init__(self) -> None:
        self._huffman = zstandard.ZstdCompressor(compression_params=_HUFFMAN)
        self._matches = zstandard.ZstdCompressor(level=3)
        self._frames = zstandard.ZstdDecompressor()
        # Each holds one candidate's planes, because the output may be a view of them.
        self._planes = [np.empty(BLOCK, np.uint8) for _ in range(3)]
        self._codes = np.empty(BLOCK, np.uint8)
        self._restored = np.empty(BLOCK, np.uint8)
        self._unpacked = np.empty(BLOCK, np.uint8)
        self._block = np.empty(HEAD + BLOCK, np.uint8)

    def encode(self, data: np.ndarray, words: Words, base: np.ndarray | None = None) -> Encoded:
        """Returns the smallest encoding of a block, after decoding it and comparing the result.

        Args:
            data: Complete words as uint8, at least one and at most `BLOCK` bytes.
            base: For "delta": the same number of the base's words, also as uint8. They have the
                same width, or are float32 and are cast to bfloat16 for words of width 2.
        """
        x = data.view(_UNSIGNED[words.width])
        candidates: list[tuple[int, Any]] = [(STORED, data.data)]
        if x[0] == x[-1] and (x == x[0]).all():
            candidates.append((CONSTANT, x[:1].tobytes()))
        else:
            planes = self._split(x, words.is_float, self._planes[0])
            candidates.append((PLANES, self._packed(planes)))
            if not words.is_float:
                candidates.append((ZSTD, self._matches.compress(data.data)))
            if base is not None:
                codes = self._codes[: x.nbytes].view(x.dtype)
                loops.difference(x, _like(base, x), codes)
                planes = self._split(codes, False, self._planes[1])
                candidates.append((DELTA, self._packed(planes)))
            if words.step is not None:
                candidates.append((ELF, self._elf(x, words.step)))
        codec, body = min(candidates, key=lambda candidate: len(candidate[1]))
        block = self._block[: HEAD + len(body)]
        block[HEAD:] = np.frombuffer(body, np.uint8)
        restored = self._restored[: data.size]
        self._decode(codec, block[HEAD:], words, base, restored)
        error = self._compared(x, restored.view(x.dtype), codec, words)
        checksum = zlib.crc32(restored)
        _HEAD.pack_into(block, 0, 0, checksum, codec)
        struct.pack_into("<I", block, 0, zlib.crc32(block[4:]))
        return Encoded(block, codec, checksum, error)

    def decode(
        self,
        block: np.ndarray,
        words: Words,
        base: Callable[[], np.ndarray] | None,
        out: np.ndarray,
    ) -> None:
        """Restores a block to `out`, which has the size of the original.

        Args:
            words: As for encoding; only whether there is a `step` matters.
            base: Returns the base's words for "delta"; None if the tensor has no base.

        Raises:
            Damaged: If the block differs from the original.
        """
        if block.size <= HEAD:
            raise Damaged(f"the block has only {block.size} bytes; its header alone has {HEAD}")
        written, checksum, codec = _HEAD.unpack_from(block)
        if zlib.crc32(block[4:]) != written:
            raise Damaged("the bytes do not match their checksum")
        if codec >= len(CODECS):
            raise Damaged(f"codec {codec} is unknown")
        if codec == ELF and (words.step is None or words.width != 4):
            raise Damaged("the codec is lossy, but the tensor has no bound")
        if codec == DELTA and (base is None or words.width not in (2, 4)):
            raise Damaged("the block has differences, but the tensor has no base")
        other = base() if codec == DELTA and base is not None else None
        self._decode(codec, block[HEAD:], words, other, out)
        if zlib.crc32(out) != checksum:
            raise Damaged(f"the restored bytes do not match the checksum {checksum}")

    # The codecs' outputs, as bytes or a view.

    def _split(self, x: np.ndarray, rotate: bool, memory: np.ndarray) -> np.ndarray:
        planes = memory[: x.nbytes].reshape(x.itemsize, x.size)
        loops.split(x, rotate, planes)
        return planes

    def _packed(self, planes: np.ndarray) -> bytes:
        """Returns each plane's encoded size, then the planes; equal sizes mean that it is raw."""
        packed = [self._smaller(plane, j == len(planes) - 1) for j, plane in enumerate(planes)]
        return b"".join([struct.pack(f"<{len(packed)}I", *map(len, packed)), *packed])

    def _smaller(self, plane: np.ndarray, exponents: bool) -> Any:
        counts = _sampled_counts(plane)
        values = np.flatnonzero(counts).astype(np.uint8)
        counts = counts[values]
        bits = np.log2(counts.sum()) - (counts * np.log2(counts)).sum() / counts.sum()
        if bits > _NOISE:
            return plane.data
        if values.size == 2:
            # The signs of rounded weights, in which the match finder would mistake noise for
            # matches.
            second = plane == values[1]
            if (second | (plane == values[0])).all():
                return b"\0" + values.tobytes() + np.packbits(second).tobytes()
        candidates = [plane.data, self._in_stretches(plane)]
        # In weights, exponents have a distribution but no repetitions.
        if bits < _REPETITIVE or not exponents:
            candidates.append(b"\1" + self._matches.compress(plane))
        return min(candidates, key=len)

    def _in_stretches(self, plane: np.ndarray) -> bytes:
        """Returns the number of parts, their sizes, and each part as a frame, or raw if smaller."""
        pieces = [plane[i : i + _STRETCH] for i in range(0, plane.size, _STRETCH)]
        frames = [self._huffman.compress(piece) for piece in pieces]
        if len(frames) == 1:
            return b"\1" + frames[0]
        # A part whose size does not change is stored as raw bytes.
        parts = [min(p.data, frame, key=len) for p, frame in zip(pieces, frames, strict=True)]
        return b"".join([struct.pack(f"<B{len(parts)}I", len(parts), *map(len, parts)), *parts])

    def _elf(self, x: np.ndarray, step: float) -> bytes:
        per_step = np.float32(1 / step)
        codes = self._codes[: x.nbytes].view(np.uint32)
        every = int(loops.elf_codes(x, per_step, codes))
        planes = self._split(codes, False, self._planes[2])[: (every.bit_length() + 7) // 8]
        with np.errstate(over="ignore", invalid="ignore"):
            outside = ~(np.abs(x.view(np.float32)) * per_step < loops.MOST)
        places = np.flatnonzero(outside).astype(np.uint32)
        head = _ELF.pack(round(math.log2(step)), len(planes), places.size)
        return head + places.tobytes() + x[places].tobytes() + self._packed(planes)

    # The inverses.

    def _decode(
        self, codec: int, body: np.ndarray, words: Words, base: np.ndarray | None, out: np.ndarray
    ) -> None:
        x = out.view(_UNSIGNED[words.width])
        if codec == STORED:
            _expect_bytes(body, out.size)
            np.copyto(out, body)
        elif codec == CONSTANT:
            _expect_bytes(body, words.width)
            x[:] = np.frombuffer(body.tobytes(), x.dtype)[0]
        elif codec == PLANES:
            self._from_planes(body, x, words.is_float, words.width)
        elif codec == DELTA:
            assert base is not None
            codes = self._codes[: x.nbytes].view(x.dtype)
            self._from_planes(body, codes, False, words.width)
            loops.undo_difference(codes, _like(base, x), x)
        elif codec == ELF:
            self._from_elf(body, x)
        elif codec == ZSTD:
            self._unpack(body, out)
        else:
            raise Damaged(f"only version 0.2 can read the codec {CODECS[codec]}")

    def _from_planes(self, body: np.ndarray, x: np.ndarray, rotate: bool, count: int) -> None:
        head, body = _cut(body, 4 * count)
        planes = self._unpacked[: count * x.size].reshape(count, x.size)
        for plane, size in zip(planes, struct.unpack(f"<{count}I", head), strict=True):
            part, body = _cut(body, size)
            if size == x.size:
                np.copyto(plane, part)
            else:
                self._plane(part, plane)
        _expect_bytes(body, 0)
        loops.merge(planes, rotate, x)

    def _plane(self, part: np.ndarray, out: np.ndarray) -> None:
        """Restores a plane from its frames."""
        head, body = _cut(part, 1)
        count = int(head[0])
        if count == 0:
            values, body = _cut(body, 2)
            _expect_bytes(body, -(-out.size // 8))
            np.take(values, np.unpackbits(body, count=out.size), out=out)
            return
        if count == 1:
            self._unpack(body, out)
            return
        if count != -(-out.size // _STRETCH):
            raise Damaged(f"{count} is not the number of stretches in {out.size} bytes")
        head, body = _cut(body, 4 * count)
        for i, size in enumerate(struct.unpack(f"<{count}I", head)):
            stretch = out[i * _STRETCH : (i + 1) * _STRETCH]
            piece, body = _cut(body, size)
            if size == stretch.size:
                np.copyto(stretch, piece)
            else:
                self._unpack(piece, stretch)
        _expect_bytes(body, 0)

    def _from_elf(self, body: np.ndarray, x: np.ndarray) -> None:
        head, body = _cut(body, _ELF.size)
        power, used, count = _ELF.unpack(head)
        if not (-126 <= power <= 126 and used <= 4 and count <= x.size):
            raise Damaged(f"invalid header: step 2**{power}, {used} planes, {count} outliers")
        places, body = _cut(body, 4 * count)
        values, body = _cut(body, 4 * count)
        places = np.frombuffer(places.tobytes(), np.uint32)
        if (places >= x.size).any():
            raise Damaged(f"outlier {places.max()} is out of range: there are {x.size} elements")
        codes = self._codes[: x.nbytes].view(np.uint32)
        self._from_planes(body, codes, False, used)
        # This is exact: codes of more than 24 bits came from float32 values that were whole
        # multiples of the step.
        np.multiply(codes >> 1, np.float32(2.0**power), out=x.view(np.float32), dtype=np.float32)
        x |= codes << 31
        x[places] = np.frombuffer(values.tobytes(), np.uint32)

    def _unpack(self, data: np.ndarray, out: np.ndarray) -> None:
        """Decodes a zstd frame into `out`, which it must fill."""
        try:
            size = zstandard.get_frame_parameters(data).content_size
            # Reuses memory, because new memory for each frame would take a fifth of the time.
            reader = self._frames.stream_reader(data)
            if size != out.size or reader.readinto(out) != size or reader.read(1):
                raise Damaged(f"the frame has {size} bytes, not {out.size}")
        except zstandard.ZstdError as error:
            raise Damaged(f"the zstd frame is damaged: {error}") from error

    def _compared(self, x: np.ndarray, back: np.ndarray, codec: int, words: Words) -> float:
        error = 0.0
        if codec == ELF and words.step is not None:
            with np.errstate(invalid="ignore"):
                errors = np.subtract(x.view("f4"), back.view("f4"), dtype=np.float64)
            errors[x == back] = 0  # bit-identical, possibly NaN or infinite
            error = float(np.abs(errors, out=errors).max())
            exact = error <= words.step / 2
        else:
            exact = np.array_equal(x, back)
        if not exact:
            raise RuntimeError(
                f"A {CODECS[codec]} block decodes to different bytes, because of a fault in "
                "this program or in memory. No file was written."
            )
        return error


def _sampled_counts(plane: np.ndarray) -> np.ndarray:
    """Counts the values of the bytes in every 16th run of 64 bytes."""
    whole = plane.size // 1024 * 1024
    sample = plane[:whole].reshape(-1, 1024)[:, :64].ravel()
    return np.bincount(np.append(sample, plane[whole : whole + 64]), minlength=256)


def _like(base: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Returns the base's words for `x`, with the width of the words in `x`."""
    if base.size == x.nbytes:
        return base.view(x.dtype)
    return base.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def _expect_bytes(data: np.ndarray, count: int) -> None:
    if data.size != count:
        raise Damaged(f"there are {data.size} bytes, not {count}")


def _cut(data: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    if data.size < count:
        raise Damaged(f"only {data.size} of {count} bytes are left")
    return data[:count], data[count:]
