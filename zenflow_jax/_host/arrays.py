"""A leaf's float32 numbers on the host, stored in full or in fewer bytes.

Arrays are C-contiguous, `(entries, n, width)`: `entries` of the stack axes, `n` channels in each,
whose elements are neighbours. Arrays are aligned so that jax on CPUs shares their memory. The dtype
of `HostArray.values` tells the format; `numba_loops.py` converts.

**float32**: the numbers themselves.

**bfloat16**: masters, split in two for a bfloat16 leaf, which uploads its masters rounded to the
nearest bfloat16, ties to even. A bfloat16 is the upper 16 bits of a float32. The host keeps the
rounded number and the master's lower 16 bits, `rest`, as a signed number:
`bits of master = (bits of rounded << 16) + rest`, because the upper bits are rounded up exactly
where the lower bits are negative. There is one exception, because 65,537 numbers round to the same
bfloat16: a master exactly halfway between a bfloat16 that ends in 0 and the next one is rounded
down, and 32768 does not fit in int16. `rest` becomes 32767, so such a master (one in 131,072
numbers) changes once, in its last bit; both values have the same cast. A NaN stays a NaN with its
sign. All other numbers are restored exactly.

**int8, uint8**: a first and a second moment, compact, in codes with scales (`codes.py`).
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

from zenflow_jax._host.codes import BUCKET

#: The alignment that jax needs (0.10.0 to 0.12.0.1), in bytes. NumPy aligns only to 16.
ALIGNMENT = 64

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT32, _FIRST, _SECOND = map(np.dtype, (np.float32, np.int8, np.uint8))
#: For each format, the dtype of `HostArray.extra`.
_EXTRA = {BFLOAT16: np.dtype(np.int16), _FIRST: BFLOAT16, _SECOND: _FLOAT32}

#: The first channel and the last + 1; then, in each channel, the first element and the last + 1.
Tile = tuple[int, int, int, int]


def aligned_zeros(shape: Sequence[int], dtype: np.typing.DTypeLike = np.float32) -> np.ndarray:
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


def bits(x: np.ndarray) -> np.ndarray:
    """Returns a flat view as compiled loops take it: Numba has no bfloat16."""
    return flat(x).view(np.uint16) if x.dtype == BFLOAT16 else flat(x)


def cut_tiles(shape: tuple[int, ...], limit: int) -> list[Tile]:
    """Returns tiles of whole buckets, with at most `limit` elements or one bucket."""
    entries, n, width = shape
    step = min(max(limit // BUCKET, 1) * BUCKET, width)
    together = max(limit // step, 1)
    return [
        (first, min(first + together, entries * n), left, min(left + step, width))
        for first in range(0, entries * n, together)
        for left in range(0, width, step)
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class HostArray:
    """Numbers for a leaf, or for some of its channels, `(entries, n, width)`."""

    values: np.ndarray  # the numbers if float32; what a bfloat16 leaf uploads; codes
    # `rest`, or scales, one for each bucket: the channel axis is the second in both arrays.
    extra: np.ndarray | None = None

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> "HostArray":
        """Makes zeros in the format that `dtype` stands for."""
        return cls(*(aligned_zeros(*array) for array in _arrays(shape, np.dtype(dtype))))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def size(self) -> int:
        return self.values.size

    @property
    def arrays(self) -> list[np.ndarray]:
        return [self.values] if self.extra is None else [self.values, self.extra]

    def copy(self) -> "HostArray":
        return HostArray(*map(copied, self.arrays))

    def read_part(
        self, channels: np.ndarray, left: int, right: int, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Copies elements `left` to `right` of some channels, `(channels, elements)`, to `out`.

        Channels are counted over all entries; `left` is the first element of a bucket.
        """
        x = np.empty((len(channels), right - left), np.float32) if out is None else out
        if self.extra is None:
            # The default mode would first fill a temporary buffer.
            np.take(self._rows[:, left:right], channels, axis=0, out=x, mode="clip")
        else:
            self._convert(x, channels, left, None)
        return x

    def write_part(self, channels: np.ndarray, left: int, x: np.ndarray) -> None:
        """Overwrites elements from `left` on with float32 numbers; inverts `read_part`."""
        if self.extra is None:
            self._rows[:, left : left + x.shape[1]][channels] = x
        else:
            x = np.ascontiguousarray(x).view()
            x.flags.writeable = False  # always, because Numba types read-only arrays separately
            self._convert(x, channels, left, True)

    @property
    def _rows(self) -> np.ndarray:
        return flat(self.values).reshape(-1, self.shape[-1])

    def _convert(self, x: np.ndarray, channels: np.ndarray, left: int, encode: bool | None) -> None:
        # Imported here, so that a process that only plans or evaluates does not wait for Numba.
        from zenflow_jax._host.numba_loops import convert

        convert(*map(bits, self.arrays), x, channels, self.shape[-1], left, encode)

    def as_float32(self) -> np.ndarray:
        """Returns all numbers. If they are float32, this is `values`, which updates overwrite."""
        if self.extra is None:
            return self.values
        channels = np.arange(math.prod(self.shape[:-1]))
        return self.read_part(channels, 0, self.shape[-1]).reshape(self.shape)

    def chunks(self, limit: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the numbers in C order, in chunks of about `limit`, each with its first index."""
        channels, width = math.prod(self.shape[:-1]), self.shape[-1]
        together = max(limit // width, 1)
        for first in range(0, channels, together):
            last = min(first + together, channels)
            if self.extra is None:
                yield first * width, flat(self.values)[first * width : last * width]
            else:
                yield first * width, flat(self.read_part(np.arange(first, last), 0, width))

    def write(self, x: np.ndarray) -> None:
        """Sets all numbers; `x` has the same size, in float32 or the dtype of `values`."""
        x = x.reshape(self.shape)
        if self.extra is None or x.dtype == self.values.dtype:
            np.copyto(self.values, x)
            if self.extra is not None:
                self.extra[...] = 0  # already rounded
        else:
            self.write_part(np.arange(math.prod(self.shape[:-1])), 0, x.reshape(self._rows.shape))


def new_moments(shape: tuple[int, ...], *, compact: bool) -> tuple[HostArray, HostArray]:
    first, second = (_FIRST, _SECOND) if compact else (_FLOAT32, _FLOAT32)
    return HostArray.zeros(shape, first), HostArray.zeros(shape, second)


def bytes_of(shape: tuple[int, ...], dtype: np.dtype, *, compact: bool) -> int:
    """Returns the bytes of a leaf's masters and moments; `dtype` is the leaf's."""
    kinds = (dtype, _FIRST, _SECOND) if compact else (dtype, _FLOAT32, _FLOAT32)
    arrays = [array for kind in kinds for array in _arrays(shape, kind)]
    return sum(math.prod(each) * kind.itemsize for each, kind in arrays)


def _arrays(shape: tuple[int, ...], dtype: np.dtype) -> list[tuple[tuple[int, ...], np.dtype]]:
    """Returns shape and dtype of a format's arrays: `HostArray.values`, and `extra` if any."""
    *channels, width = shape
    size = width if dtype == BFLOAT16 else -(-width // BUCKET)
    extra = [((*channels, size), _EXTRA[dtype])] if dtype in _EXTRA else []
    return [(shape, dtype), *extra]
