"""The two moments of a leaf on the host: float32, or "compact" in 8-bit codes.

A bucket of 32 neighbours in a channel has a code for each number, and a single scale: its largest
magnitude. The two moments thus take 1.0625 and 1.125 bytes instead of 4 each. Buckets never span
channels.

First moment: a code `c` from -127 to 127 stands for `c (|c| + 60) / 23749` times the scale. The gap
between codes grows fourfold from zero to the largest, as on a softsign curve (FlashOptim,
https://arxiv.org/abs/2602.23349), but decoding needs no division. Second moment: its square root is
`c / 255` times the scale, for `c` from 0 to 255. Encoding rounds to the nearest code, but to at
least 1 for a second moment above zero: a second moment of zero would make the step huge.

The first moment's scale is a bfloat16, the second's is a float32. A bfloat16 scale would never
shrink there: with `b2` = 0.999, an update shrinks it by 1 in 2000, which would be rounded away.

Decoded numbers encode to the same codes and scales, because the largest code stands exactly for the
scale. So checkpoints store float32 moments without loss. A bucket is zero if its numbers (or roots)
are all below 2**-60. A number that is not finite makes its bucket NaN or infinite.
"""

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

from zenflow_jax._host.arrays import BUCKET, HostArray, Tile, aligned_zeros

# A first moment's code is `c (|c| + 2 h)` steps. In float32, the largest, 127 (127 + 2 h), times
# its reciprocal must be exactly 1. That holds for this `h` (not for every number near 30), and for
# 255.
BEND = np.float32(30)
TOP_FIRST, TOP_SECOND = np.float32(127 * (127 + 60)), np.float32(255)
PER_FIRST, PER_SECOND = 1 / TOP_FIRST, 1 / TOP_SECOND
#: Buckets below this are zero.
LEAST = np.float32(2.0**-60)

_FIRST, _SECOND = np.dtype(np.int8), np.dtype(np.uint8)
_SCALES = {_FIRST: np.dtype(ml_dtypes.bfloat16), _SECOND: np.dtype(np.float32)}


@dataclasses.dataclass(frozen=True, eq=False)
class Moment(HostArray):
    """One moment of one leaf, `(entries, rows, n, tail)`.

    `values` are float32; or codes, int8 for a first moment and uint8 for a second.
    """

    scales: np.ndarray | None = None  # like `values`, but one scale for each bucket of codes

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: Any) -> "Moment":
        """Makes zeros in float32, or in codes: int8 for a first moment, uint8 for a second."""
        kind = _SCALES.get(np.dtype(dtype))
        scales = None if kind is None else aligned_zeros(_shape_of_scales(shape), kind)
        return cls(aligned_zeros(shape, dtype), scales)

    def like(self, shape: tuple[int, ...]) -> "Moment":
        return Moment.zeros(shape, self.values.dtype)

    def read_tile(self, tile: Tile, scratch: np.ndarray) -> np.ndarray:
        values, scales, axis = self._tile_arrays(tile)
        if scales is None:
            return values
        _decode(values, _spread(scales, axis, values.shape), scratch)
        return scratch

    def write_tile(self, tile: Tile, x: np.ndarray, where: "np.ndarray | bool" = True) -> None:
        values, scales, axis = self._tile_arrays(tile)
        if scales is None:
            np.copyto(values, x, where=where)
        else:
            _encode(x, axis, values, scales, where)

    def _tile_arrays(self, tile: Tile) -> tuple[np.ndarray, np.ndarray | None, int]:
        """Returns a tile's values and scales, and the axis along which buckets lie."""
        segments, scales = self.segments, self.scales
        first, last, left, right = tile
        _, rows, width, trailing = segments
        values, axis = segments.region(self.values, tile), 0 if trailing else 1
        if scales is None:
            return values, None, axis
        if trailing:
            first, last = first // rows * _buckets_of(rows) + first % rows // BUCKET, last - first
            last = first + _buckets_of(last)
        else:
            left, right, width = left // BUCKET, _buckets_of(right), _buckets_of(width)
        return values, scales.reshape(-1, width)[first:last, left:right], axis


def new_moments(shape: tuple[int, ...], *, compact: bool) -> tuple[Moment, Moment]:
    first, second = (_FIRST, _SECOND) if compact else (np.float32, np.float32)
    return Moment.zeros(shape, first), Moment.zeros(shape, second)


def bytes_of_moments(shape: tuple[int, ...], *, compact: bool) -> int:
    size = math.prod(shape)
    if not compact:
        return 8 * size
    scales = sum(dtype.itemsize for dtype in _SCALES.values())
    return 2 * size + scales * math.prod(_shape_of_scales(shape))


def _decode(codes: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Decodes into `out`, float32; `scales` has one scale for each code."""
    np.copyto(out, codes)
    with np.errstate(all="ignore"):  # a bucket may be infinite or NaN
        if codes.dtype == _FIRST:
            out *= np.abs(out) + 2 * BEND
            out *= PER_FIRST
            out *= scales.astype(np.float32)
        else:
            out *= PER_SECOND
            out *= scales
            out *= out


def _encode(
    x: np.ndarray, axis: int, codes: np.ndarray, scales: np.ndarray, where: "np.ndarray | bool"
) -> None:
    """Encodes numbers into codes and scales; buckets lie along `axis`.

    Codes and scales keep their values where `where`, broadcast to both, is False.
    """
    first = codes.dtype == _FIRST
    with np.errstate(all="ignore"):  # a bucket may be infinite or NaN
        size = np.abs(x) if first else np.sqrt(x)
        starts = np.arange(0, x.shape[axis], BUCKET)
        largest = np.maximum.reduceat(size, starts, axis=axis)
        largest[largest < LEAST] = 0
        new_scales = largest.astype(scales.dtype)
        wide = new_scales.astype(np.float32)
        top = TOP_FIRST if first else TOP_SECOND
        inverse = np.divide(top, wide, out=np.zeros_like(wide), where=wide > 0)
        inverse = _spread(inverse, axis, x.shape)
        size *= inverse
        if first:
            size += BEND * BEND
            np.sqrt(size, out=size)
            size -= BEND
            new_codes = np.rint(np.copysign(size, x, out=size), out=size)
        else:
            new_codes = np.maximum(np.rint(size), size > 0)
        np.copyto(codes, new_codes, where=where, casting="unsafe")
    np.copyto(scales, new_scales, where=where)


def _spread(scales: np.ndarray, axis: int, shape: tuple[int, ...]) -> np.ndarray:
    """Repeats scales so that each element in a region of this shape has its bucket's scale."""
    return np.repeat(scales, BUCKET, axis=axis)[: shape[0], : shape[1]]


def _buckets_of(elements: int) -> int:
    return -(-elements // BUCKET)


def _shape_of_scales(shape: tuple[int, ...]) -> tuple[int, ...]:
    entries, rows, n, tail = shape
    if tail == 1:
        return entries, _buckets_of(rows), n, 1
    return entries, rows, n, _buckets_of(tail)
