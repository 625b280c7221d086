"""The two moments of a leaf on the host: float32, or "compact" in codes of 8 bits.

A block of 32 neighbours in a channel has a code for each and one scale, its largest magnitude. So
the two moments take 1.0625 and 1.125 bytes in place of 4 each. Blocks never span channels.

First moment: codes `c` from -127 to 127 stand for `c (|c| + 60) / 23749` of the scale. The steps
between them grow from near zero to the largest by 4, as those of a softsign curve do (FlashOptim,
https://arxiv.org/abs/2602.23349); but this curve takes no division on the way back. Second moment:
its square root is `c / 255` of the scale, `c` from 0 to 255. A code is the nearest, and at least 1
where a second moment is above zero: one that vanished under a first moment would make a huge step.

The first moment's scale is a bfloat16, the second's a float32. In bfloat16 it would stand still:
where `b2` is 0.999 an update lets the root shrink by 1 in 2000, which would be rounded away.

Numbers that were decoded give the same codes and scales again, as the largest code stands for the
scale, exactly. So checkpoints have float32 moments and lose nothing. A block whose numbers (or
roots) are all below 2**-60 is zero. A number that is not finite makes its block NaN or infinite.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from zenflow_jax._host.arrays import PIECE, HostArray, blank

#: Elements that share a scale; fewer where a channel ends.
BLOCK = 32
# A first moment's code is `c (|c| + 2 h)` steps. Of the numbers near 30 this `h` is one where
# 127 (127 + 2 h) times its reciprocal is 1 in float32, as it has to be, and as 255 times its is.
BEND = np.float32(30)
TOP_FIRST, TOP_SECOND = np.float32(127 * (127 + 60)), np.float32(255)
PER_FIRST, PER_SECOND = 1 / TOP_FIRST, 1 / TOP_SECOND
#: Blocks below are zero.
LEAST = np.float32(2.0**-60)

_FIRST, _SECOND = np.dtype(np.int8), np.dtype(np.uint8)
_SCALES = {_FIRST: np.dtype(ml_dtypes.bfloat16), _SECOND: np.dtype(np.float32)}

#: First and last + 1 segment, first and last + 1 element in each.
Tile = tuple[int, int, int, int]


class Layout(NamedTuple):
    """How `(entries, rows, n, tail)` lies in memory, as segments of `width` elements.

    Leading: a segment is a channel. Trailing: it is a row of all of them, and blocks have 32 rows.
    """

    segments: int
    rows: int  # segments of an entry; of all of them where channels lead
    width: int
    trailing: bool

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> "Layout":
        entries, rows, n, tail = shape
        assert rows == 1 or tail == 1
        if tail == 1:
            return cls(entries * rows, rows, n, True)
        return cls(entries * n, entries * n, tail, False)

    @property
    def axis(self) -> int:
        return 0 if self.trailing else 1

    def tiles(self, limit: int) -> list[Tile]:
        """Tiles of whole blocks of one entry, of at most `limit` elements or one block."""
        height, breadth = (BLOCK, 1) if self.trailing else (1, BLOCK)
        edges = _cut(self.width, limit // height, breadth)
        sides = _cut(self.rows, limit // edges[0][1], height)
        return [
            (entry + top, entry + bottom, left, right)
            for entry in range(0, self.segments, self.rows)
            for top, bottom in sides
            for left, right in edges
        ]

    def scales(self, tile: Tile) -> tuple[slice, slice]:
        first, last, left, right = tile
        if not self.trailing:
            return slice(first, last), slice(left // BLOCK, blocks_of(right))
        start = first // self.rows * blocks_of(self.rows) + first % self.rows // BLOCK
        return slice(start, start + blocks_of(last - first)), slice(left, right)


@dataclasses.dataclass(frozen=True, eq=False)
class Moment(HostArray):
    """One moment of one leaf, `(entries, rows, n, tail)`.

    `values` are float32; or codes, int8 of a first moment and uint8 of a second.
    """

    scales: np.ndarray | None = None  # of the codes: like `values`, one for each block

    @classmethod
    def compact(cls, shape: tuple[int, ...], dtype: Any) -> "Moment":
        """Zeros in codes: int8 for a first moment, uint8 for a second."""
        return cls(blank(shape, dtype), blank(_shape_of_scales(shape), _SCALES[np.dtype(dtype)]))

    def write(self, x: np.ndarray) -> None:
        if self.scales is None:
            np.copyto(self.values, x.reshape(self.shape))
            return
        x = np.ascontiguousarray(x)
        for tile in Layout.of(self.shape).tiles(PIECE):
            self.write_tile(x, tile)

    def write_tile(self, x: np.ndarray, tile: Tile) -> None:
        numbers, codes, scales, axis = self._tile_of(x, tile)
        encode(np.array(numbers), axis, codes, scales)

    def read_tile(self, x: np.ndarray, tile: Tile) -> None:
        numbers, codes, scales, axis = self._tile_of(x, tile)
        decode(codes, spread(scales, axis, codes.shape), numbers)

    def _tile_of(self, x: np.ndarray, tile: Tile) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """The tile of `x`, of the codes and of their scales; along which axis blocks lie."""
        assert self.scales is not None
        assert x.flags.c_contiguous  # else `reshape` would copy, and what is read be lost
        layout = Layout.of(self.shape)
        region = slice(*tile[:2]), slice(*tile[2:])
        numbers, codes = (a.reshape(-1, layout.width)[region] for a in (x, self.values))
        return numbers, codes, as_matrix(self.scales, layout)[layout.scales(tile)], layout.axis

    def _decoded(self, begin: int, end: int) -> np.ndarray:
        # Whole segments, for blocks may begin and end anywhere in them.
        assert self.scales is not None
        layout = Layout.of(self.shape)
        rows, width = layout.rows, layout.width
        first, last = begin // width, -(-end // width)
        scales = as_matrix(self.scales, layout)
        if layout.trailing:
            segments = np.arange(first, last)
            scales = scales[segments // rows * blocks_of(rows) + segments % rows // BLOCK]
        else:
            scales = spread(scales[first:last], 1, (last - first, width))
        numbers = np.empty((last - first, width), np.float32)
        decode(self.values.reshape(-1, width)[first:last], scales, numbers)
        return numbers.reshape(-1)[begin - first * width : end - first * width]


def new_moments(shape: tuple[int, ...], *, compact: bool) -> tuple[Moment, Moment]:
    if compact:
        return Moment.compact(shape, _FIRST), Moment.compact(shape, _SECOND)
    return Moment(blank(shape)), Moment(blank(shape))


def bytes_of_moments(shape: tuple[int, ...], *, compact: bool) -> int:
    size = math.prod(shape)
    if not compact:
        return 8 * size
    scales = sum(dtype.itemsize for dtype in _SCALES.values())
    return 2 * size + scales * math.prod(_shape_of_scales(shape))


def decode(codes: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Writes to `out`, float32, the numbers that codes stand for; `scales` are of each code."""
    np.copyto(out, codes)
    with np.errstate(all="ignore"):  # of blocks that are not finite
        if codes.dtype == _FIRST:
            out *= np.abs(out) + 2 * BEND
            out *= PER_FIRST
            out *= scales.astype(np.float32)
        else:
            out *= PER_SECOND
            out *= scales
            out *= out


def encode(
    x: np.ndarray,
    axis: int,
    codes: np.ndarray,
    scales: np.ndarray,
    where: "np.ndarray | bool" = True,
) -> None:
    """Writes codes and scales of numbers, which are garbage afterwards; blocks lie along `axis`.

    Where `where`, broadcast to both, is False both stay as they are.
    """
    first = codes.dtype == _FIRST
    with np.errstate(all="ignore"):  # of blocks that are not finite
        size = np.abs(x) if first else np.sqrt(x, out=x)
        starts = np.arange(0, x.shape[axis], BLOCK)
        largest = np.maximum.reduceat(size, starts, axis=axis)
        largest[largest < LEAST] = 0
        new_scales = largest.astype(scales.dtype)
        wide = new_scales.astype(np.float32)
        top = TOP_FIRST if first else TOP_SECOND
        inverse = np.divide(top, wide, out=np.zeros_like(wide), where=wide > 0)
        inverse = spread(inverse, axis, x.shape)
        if first:
            size *= inverse
            size += BEND * BEND
            np.sqrt(size, out=size)
            size -= BEND
            new_codes = np.copysign(size, x, out=size)
            np.rint(new_codes, out=new_codes)
        else:
            x *= inverse
            new_codes = np.maximum(np.rint(x), x > 0)
        np.copyto(codes, new_codes, where=where, casting="unsafe")
    np.copyto(scales, new_scales, where=where)


def spread(scales: np.ndarray, axis: int, shape: tuple[int, ...]) -> np.ndarray:
    """For each element of a region of this shape its block's scale."""
    return np.repeat(scales, BLOCK, axis=axis)[: shape[0], : shape[1]]


def as_matrix(scales: np.ndarray, layout: Layout) -> np.ndarray:
    """Scales as `(segments or blocks of them, blocks or channels)`."""
    return scales.reshape(-1, layout.width if layout.trailing else blocks_of(layout.width))


def blocks_of(elements: int) -> int:
    return -(-elements // BLOCK)


def _shape_of_scales(shape: tuple[int, ...]) -> tuple[int, ...]:
    entries, rows, n, tail = shape
    return (entries, blocks_of(rows), n, 1) if tail == 1 else (entries, rows, n, blocks_of(tail))


def _cut(size: int, limit: int, step: int) -> list[tuple[int, int]]:
    """Cuts a size into pieces of at most `limit`, at multiples of `step`."""
    piece = max(limit // step, 1) * step
    return [(i, min(i + piece, size)) for i in range(0, size, piece)]
