"""A leaf's float32 numbers on the host, stored in full or in fewer bytes.

Arrays are C-contiguous, `(entries, rows, n, tail)`: `entries` of the stack axes, `n` channels in
each. Leading channels have one row, and a channel is a run of `tail` elements; trailing channels
have a `tail` of 1, and are the lanes of each row. Arrays are aligned so that jax on CPUs shares
their memory.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

#: The alignment that jax needs (0.10.0 to 0.12.0.1), in bytes. NumPy aligns only to 16.
ALIGNMENT = 64
#: Number of elements to convert at once, so that the scratch stays in the cache.
CHUNK = 128 * 1024
#: Number of neighbours in a channel that share a scale in compact moments; fewer at the end.
BUCKET = 32

#: The first segment and the last + 1; then, in each segment, the first element and the last + 1.
Tile = tuple[int, int, int, int]
_Array = TypeVar("_Array", bound="HostArray")


def aligned_zeros(shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Makes zeros, whose pages use memory only after a write."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + ALIGNMENT - 1, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def copied(x: np.ndarray) -> np.ndarray:
    copy = aligned_zeros(x.shape, x.dtype)
    np.copyto(copy, x)
    return copy


def flat(x: np.ndarray) -> np.ndarray:
    assert x.flags.c_contiguous  # otherwise `reshape` would copy, and writes would be lost
    return x.reshape(-1)


class Segments(NamedTuple):
    """An array's memory layout, as segments of `width` elements.

    Leading channels: a segment is a channel. Trailing channels: a segment is a row of all channels,
    and buckets have 32 rows.
    """

    number: int
    rows: int  # segments in an entry; with leading channels, in all entries
    width: int
    trailing: bool

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> "Segments":
        entries, rows, n, tail = shape
        assert rows == 1 or tail == 1
        if tail == 1:
            return cls(entries * rows, rows, n, True)
        return cls(entries * n, entries * n, tail, False)

    def tiles(self, limit: int, *, whole: bool = False) -> list[Tile]:
        """Returns tiles of whole buckets in one entry, with at most `limit` elements or one bucket.

        If `whole`, tiles consist of whole segments, whatever their size.
        """
        height, breadth = (BUCKET, 1) if self.trailing else (1, BUCKET)
        edges = [(0, self.width)] if whole else _cut(self.width, limit // height, breadth)
        sides = _cut(self.rows, limit // edges[0][1], height)
        return [
            (entry + top, entry + bottom, left, right)
            for entry in range(0, self.number, self.rows)
            for top, bottom in sides
            for left, right in edges
        ]

    def region(self, x: np.ndarray, tile: Tile) -> np.ndarray:
        """Returns a tile of an array with this layout, as a view `(segments, elements)`."""
        return flat(x).reshape(-1, self.width)[slice(*tile[:2]), slice(*tile[2:])]


def in_turn(work: Callable[[Tile], None], tiles: Sequence[Tile]) -> None:
    for tile in tiles:
        work(tile)


@dataclasses.dataclass(frozen=True, eq=False)
class HostArray(abc.ABC):
    """Numbers for a leaf, or for some of its channels. Subclasses add arrays, or None, as fields.

    In each array the third axis is the channel axis.
    """

    values: np.ndarray  # the numbers, if float32

    @abc.abstractmethod
    def like(self: _Array, shape: tuple[int, ...]) -> _Array:
        """Makes zeros of another shape, in the same format."""

    @abc.abstractmethod
    def read_tile(self, tile: Tile, scratch: np.ndarray) -> np.ndarray:
        """Returns a tile's numbers: a view if they are float32, else `scratch`, filled."""

    @abc.abstractmethod
    def write_tile(self, tile: Tile, x: np.ndarray, where: "np.ndarray | bool" = True) -> None:
        """Sets a tile's numbers where `where`, broadcast, is True."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def size(self) -> int:
        return self.values.size

    @property
    def segments(self) -> Segments:
        return Segments.of(self.shape)

    @property
    def arrays(self) -> list[np.ndarray]:
        return [x for x in vars(self).values() if x is not None]

    @property
    def plain(self) -> bool:
        """Returns whether `values` is the only array."""
        return len(self.arrays) == 1

    def copy(self: _Array) -> _Array:
        arrays = {name: copied(x) for name, x in vars(self).items() if x is not None}
        return dataclasses.replace(self, **arrays)

    def as_float32(self, run: Callable[..., None] = in_turn) -> np.ndarray:
        """Returns all numbers. If they are float32, this is `values`, which updates overwrite."""
        if self.values.dtype == np.float32:
            return self.values
        x, segments = np.empty(self.shape, np.float32), self.segments

        def read(tile: Tile) -> None:
            self.read_tile(tile, segments.region(x, tile))

        run(read, segments.tiles(CHUNK) if x.size else [])
        return x

    def chunks(self, limit: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the numbers in C order, in chunks of about `limit`, each with its first index."""
        for tile in self.segments.tiles(limit, whole=True):
            first, last, _, width = tile
            numbers = self.read_tile(tile, np.empty((last - first, width), np.float32))
            yield first * width, flat(numbers)

    def write(self, x: np.ndarray, run: Callable[..., None] = in_turn) -> None:
        """Sets all numbers; `x` has the same size, in float32 or the leaf's dtype."""
        x, segments = np.ascontiguousarray(x).reshape(self.shape), self.segments

        def write(tile: Tile) -> None:
            self.write_tile(tile, segments.region(x, tile))

        run(write, segments.tiles(CHUNK) if x.size else [])


def _cut(size: int, limit: int, step: int) -> list[tuple[int, int]]:
    """Cuts a size into ranges of at most `limit`, at multiples of `step`."""
    width = max(limit // step, 1) * step
    return [(i, min(i + width, size)) for i in range(0, size, width)]
