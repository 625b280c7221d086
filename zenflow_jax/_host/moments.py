"""The two moments of a leaf on the host: float32, or "compact" in codes of 8 bits.

A group of 32 neighbours in a channel has codes and one unit in which they count. So the two moments
take 1.0625 and 1.125 bytes in place of 4 each. Groups never span channels: a channel that takes no
step keeps every bit, and one that is handed over changes nothing of its neighbours.

First moment: codes `c` from -127 to 127 stand for `c (|c| + 60)` units. The steps between them grow
from near zero to the largest by 4, as those of a softsign curve do (FlashOptim,
https://arxiv.org/abs/2602.23349); but this curve takes no division on the way back. Second moment:
its square root is `c` units, `c` from 0 to 254. A code is the nearest, and at least 1 where a
second moment is above zero: one that vanished under a first moment would make a huge step. One code
of each, -128 and 255, stands for what is not finite; it comes back as NaN, and its neighbours as
they are.

The unit is the group's largest number over that of the largest code, rounded to 9 bits of a first
moment and 16 of a second. Kept are bits 15 to 30 of the first one's float32: it has no sign, and
ends in zeros. So it has float32's range, and is never rounded to zero, as second moments in float16
would be. The second one's is a float32. With 9 bits it would stand still: where `b2` is 0.999 an
update lets the root shrink by 1 in 2000, which would be rounded away each time. Codes have up to 15
and 8 bits, so codes times unit are exact in float32; and with 9 bits the largest number always gets
the largest code, with 8 not. Hence what has been read and is written again, in the same groups,
gives the same codes and units: checkpoints have float32 moments and lose nothing. At the lower end,
a group of first moments below 2**-100 becomes zero, as their squares are in float32; units of
second moments are at least 2**-74, so that a code's square never is. Where the largest of a group
is zero, so is the unit.

Letters: `m` the first moment; `w` the square root of the second, which the kernels work with.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from zenflow_jax._host.aligned import blank, copied

#: Elements that share a unit; fewer where a channel ends.
GROUP = 32
#: What stands for a number that is not finite.
NO_FIRST, NO_SECOND = -128, 255
# A first moment's code `c` is `c (|c| + 2 h)` units. Of the numbers near 30 this `h` is one where
# 127 (127 + 2 h) times its reciprocal is 1 in float32.
BEND = np.float32(30)
TOP_FIRST, TOP_SECOND = np.float32(127 * (127 + 60)), np.float32(254)
PER_FIRST, PER_SECOND = 1 / TOP_FIRST, 1 / TOP_SECOND
BEND_SQUARED = BEND * BEND
#: A group of first moments, all smaller, is zero.
LEAST_FIRST = np.float32(2.0**-100)
#: The smallest unit of a second moment.
LEAST_UNIT = np.float32(2.0**-74)
#: Added to a small number it leaves the nearest integer in the lower bits: ties to even.
ROUNDER = np.float32(1.5 * 2**23)
#: The bits of float32 infinity.
INFINITE = 0x7F800000
_MAGNITUDE = np.int32(0x7FFFFFFF)

_UNITS = (np.dtype(np.uint16), np.dtype(np.float32))
_FIRST, _SECOND = np.dtype(np.int8), np.dtype(np.uint8)
# Elements that are worked on at once: the scratch stays in the cache.
_BLOCK = 128 * 1024


class Layout(NamedTuple):
    """How `(entries, rows, n, tail)` lies in memory, as segments of `width` elements."""

    rows: int  # segments of a stack entry in the trailing layout
    width: int
    trailing: bool

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> "Layout":
        _, rows, n, tail = shape
        if n == 1:  # One channel: its elements are contiguous in either layout.
            rows, tail = 1, rows * tail
        assert rows == 1 or tail == 1
        return cls(rows, n, True) if tail == 1 else cls(1, tail, False)

    @property
    def axis(self) -> int:
        """Along which axis of `(segments, width)` groups of codes lie."""
        return 0 if self.trailing else 1

    def cut_at_entries(self, first: int, last: int) -> Iterator[slice]:
        """Cuts a range of segments where stack entries end, if groups of codes span segments."""
        if not self.trailing:
            yield slice(first, last)
            return
        for entry in range(first // self.rows, -(-last // self.rows)):
            yield slice(max(first, entry * self.rows), min(last, (entry + 1) * self.rows))

    def units(self, segments: slice, elements: slice) -> tuple[slice, slice]:
        """Where the units of a region are: of whole groups of codes, in one stack entry."""
        if not self.trailing:
            return segments, slice(elements.start // GROUP, blocks_of(elements.stop))
        entry, row = divmod(segments.start, self.rows)
        first = entry * blocks_of(self.rows) + row // GROUP
        return slice(first, first + blocks_of(segments.stop - segments.start)), elements

    def spread(self, units: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The unit of each element of a region of whole groups, of this shape."""
        wide = np.repeat(units, GROUP, axis=self.axis)
        return wide[: shape[0], : shape[1]]


@dataclasses.dataclass(frozen=True, eq=False)
class Moment:
    """One moment of one leaf, `(entries, rows, n, tail)`, C-contiguous."""

    values: np.ndarray  # float32; or codes, int8 of a first moment, uint8 of a second
    units: np.ndarray | None = None  # (segments or blocks of them, groups): of the codes

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> "Moment":
        """In float32."""
        return cls(blank(shape))

    @classmethod
    def compact(cls, shape: tuple[int, ...], dtype: Any) -> "Moment":
        """Zeros in codes: int8 for a first moment, uint8 for a second."""
        return cls(blank(shape, dtype), blank(_units_shape(shape), _UNITS[dtype == _SECOND]))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def arrays(self) -> list[np.ndarray]:
        """Those that there are."""
        return [self.values] if self.units is None else [self.values, self.units]

    @functools.cached_property
    def layout(self) -> Layout:
        return Layout.of(self.shape)

    def as_float32(self) -> np.ndarray:
        """All of it: new memory where it is compact, else `values`, which updates write."""
        if self.units is None:
            return self.values
        found = blank(self.shape)
        self.range(0, found.size, found.reshape(-1))
        return found

    def copy(self) -> "Moment":
        """The same in other memory."""
        return Moment(copied(self.values), None if self.units is None else copied(self.units))

    def range(self, begin: int, end: int, scratch: np.ndarray) -> np.ndarray:
        """Some of it in C order, float32: a view, or written to the start of `scratch`."""
        if self.units is None:
            return self.values.reshape(-1)[begin:end]
        out = scratch[: end - begin]
        width = self.layout.width
        codes, at = self.values.reshape(-1), begin
        for first, last, left, right in _regions(begin, end, width):
            size = (last - first) * (right - left)
            some = out[at - begin : at - begin + size].reshape(last - first, right - left)
            units = self._units_of(first, last, left, right)
            decode(codes[at : at + size].reshape(some.shape), units, out=some)
            if codes.dtype == _SECOND:
                some *= some
            at += size
        return out

    def write(self, x: np.ndarray) -> None:
        """Sets all of it; `x` is of the same shape, float32."""
        assert x.shape == self.shape
        if self.units is None:
            np.copyto(self.values, x)
            return
        rows, width, trailing = self.layout
        codes, flat = self.values.reshape(-1, width), np.ascontiguousarray(x).reshape(-1, width)
        tiles = tiles_of_groups(flat.shape[0], self.layout, _BLOCK)
        for first, last, left, right in tiles:
            for segments in self.layout.cut_at_entries(first, last):
                here = (segments, slice(left, right))
                some = np.array(flat[here], np.float32)
                if codes.dtype == _SECOND:
                    with np.errstate(invalid="ignore"):
                        np.sqrt(some, out=some)
                encode(some, self.layout.axis, codes[here], self.units[self.layout.units(*here)])

    def _groups(self, segments: Any, elements: Any) -> tuple[Any, Any]:
        """Indices into `units` of elements, by their segments and their places in these."""
        rows, _, trailing = self.layout
        if not trailing:
            return segments, elements // GROUP
        return segments // rows * blocks_of(rows) + segments % rows // GROUP, elements

    def _units_of(self, first: int, last: int, left: int, right: int) -> np.ndarray:
        """The unit of each element of a region, or `(segments, 1)` where one has it for all."""
        assert self.units is not None
        i, j = self._groups(np.arange(first, last), np.arange(left, right))
        if self.layout.trailing:
            return self.units[i][:, left:right]
        some = self.units[first:last, j[0] : j[-1] + 1]
        begin = left % GROUP
        return np.repeat(some, GROUP, axis=1)[:, begin : begin + right - left]


def new_moments(shape: tuple[int, ...], *, compact: bool) -> tuple[Moment, Moment]:
    """The first and the second moment of a leaf, zero."""
    if compact:
        return Moment.compact(shape, _FIRST), Moment.compact(shape, _SECOND)
    return Moment.zeros(shape), Moment.zeros(shape)


def bytes_of_moments(shape: tuple[int, ...], *, compact: bool) -> int:
    """Bytes of both moments of a leaf."""
    size = int(np.prod(shape, dtype=np.int64))
    if not compact:
        return 2 * np.dtype(np.float32).itemsize * size
    units = int(np.prod(_units_shape(shape), dtype=np.int64))
    each = sum(unit.itemsize for unit in _UNITS)
    return (_FIRST.itemsize + _SECOND.itemsize) * size + each * units


def decode(codes: np.ndarray, units: np.ndarray, out: np.ndarray) -> None:
    """What codes stand for: `m`, or `w`.

    Args:
        codes: int8 or uint8.
        units: Of each code; or broadcast.
        out: float32, of the shape of `codes`; written.
    """
    np.copyto(out, codes)
    if codes.dtype == _FIRST:
        steps = np.abs(out)
        steps += 2 * BEND
        out *= steps
        missing = codes == NO_FIRST
    else:
        missing = codes == NO_SECOND
    with np.errstate(over="ignore"):
        out *= widened(units)
    if missing.any():
        out[missing] = np.nan


def encode(
    x: np.ndarray,
    axis: int,
    codes: np.ndarray,
    units: np.ndarray,
    where: "np.ndarray | bool" = True,
) -> None:
    """Codes and units of numbers, of whole groups.

    Args:
        x: float32 (a, b): `m` or `w`. Garbage afterwards.
        axis: Along which groups lie; they begin at its beginning.
        codes: int8 for `m`, uint8 for `w`; written.
        units: uint16 for `m`, float32 for `w`; written.
        where: Bool, broadcast to `codes` and `units`: elsewhere both stay as they are.
    """
    bits = x.view(np.int32) & _MAGNITUDE
    missing = None
    if bits.size and bits.max() >= INFINITE:
        missing = bits >= INFINITE
        bits[missing] = 0
    starts = np.arange(0, x.shape[axis], GROUP)
    largest = np.maximum.reduceat(bits, starts, axis=axis).view(np.float32)
    new_units, inverse = units_for(largest, first=codes.dtype == _FIRST)
    inverse = np.repeat(inverse, GROUP, axis=axis)[: x.shape[0], : x.shape[1]]
    with np.errstate(all="ignore"):  # what is not finite gets its code below
        if codes.dtype == _FIRST:
            y = np.abs(x)
            y *= inverse
            y += BEND_SQUARED
            np.sqrt(y, out=y)
            y -= BEND
            np.copysign(y, x, out=y)
        else:
            y = x * inverse
        y += ROUNDER
    found = y.view(np.int32)
    if codes.dtype == _SECOND:
        found &= 0xFF
        np.maximum(found, np.minimum(bits, 1), out=found)
    if missing is not None:
        found[missing] = NO_FIRST if codes.dtype == _FIRST else NO_SECOND
    np.copyto(codes, found, where=where, casting="unsafe")
    np.copyto(units, new_units, where=where)


def units_for(largest: np.ndarray, *, first: bool) -> tuple[np.ndarray, np.ndarray]:
    """Units of groups with these largest magnitudes, as kept; and their reciprocals, float32."""
    if first:
        wide = np.where(largest < LEAST_FIRST, np.float32(0), largest * PER_FIRST)
        units = (_rounded(wide, 15) >> 15).astype(np.uint16)
    else:
        wide = np.where(largest > 0, np.maximum(largest * PER_SECOND, LEAST_UNIT), np.float32(0))
        units = _rounded(wide, 8).view(np.float32)
    wide = widened(units)
    return units, np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)


def _rounded(x: np.ndarray, zeros: int) -> np.ndarray:
    """The bits of float32 numbers, rounded so that they end in zeros: to nearest, ties to even."""
    bits = x.view(np.uint32)
    half = np.uint32((1 << zeros - 1) - 1)
    return (bits + half + (bits >> zeros & 1)) >> zeros << zeros


def widened(units: np.ndarray) -> np.ndarray:
    """Units in float32."""
    if units.dtype == np.float32:
        return units
    return (units.astype(np.uint32) << 15).view(np.float32)


def tiles_of_groups(segments: int, layout: Layout, limit: int) -> list[tuple[int, int, int, int]]:
    """Cuts segments into tiles of whole groups, of at most `limit` elements, or one group's.

    A tile is its first and last + 1 segment, and its first and last + 1 element in each.
    """
    rows, width, trailing = layout
    if not trailing:
        if width <= limit:
            k = limit // max(width, 1)
            return [(i, min(i + k, segments), 0, width) for i in range(0, segments, k)]
        edges = _edges(width, max(limit // GROUP, 1) * GROUP, GROUP)
        return [(i, i + 1, *pair) for i in range(segments) for pair in edges]
    height = max(min(GROUP, rows), 1)
    blocks = blocks_of(rows)
    count, together = segments // max(rows, 1) * blocks, max(limit // (height * max(width, 1)), 1)
    starts = [i // blocks * rows + i % blocks * GROUP for i in range(0, count, together)]
    edges = _edges(width, max(limit // height, 1), 1)
    return [
        (first, last, *pair)
        for first, last in zip(starts, [*starts[1:], segments], strict=True)
        for pair in edges
    ]


def _edges(width: int, limit: int, step: int) -> list[tuple[int, int]]:
    """Cuts a width into nearly equal parts of at most `limit`, at multiples of `step`."""
    part = -(-width // -(-width // limit))
    part = -(-part // step) * step
    return [(left, min(left + part, width)) for left in range(0, width, part)]


def blocks_of(elements: int) -> int:
    """Groups of codes that so many neighbours make."""
    return -(-elements // GROUP)


def _units_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, width, trailing = Layout.of(shape)
    segments = int(np.prod(shape, dtype=np.int64)) // max(width, 1)
    if trailing:
        return segments // max(rows, 1) * blocks_of(rows), width
    return segments, blocks_of(width)


def _regions(begin: int, end: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Cuts a range of elements into regions of segments, none much larger than a block."""
    while begin < end:
        segment, left = divmod(begin, width)
        if left or end - begin < width or width > _BLOCK:
            right = min(width, left + end - begin, left + _BLOCK)
            yield segment, segment + 1, left, right
            begin += right - left
        else:
            count = min((end - begin) // width, _BLOCK // width)
            yield segment, segment + count, 0, width
            begin += count * width
