"""The float32 masters of a leaf on the host; of a bfloat16 leaf what is uploaded is half of each.

Such a leaf uploads its masters rounded to the nearest bfloat16, ties to even. A bfloat16 is the
upper 16 bits of a float32. Kept are the rounded one and the master's lower 16 bits, `rest`. Read as
a signed number they are the way back: `bits of master = (bits of rounded << 16) + rest`, because
the upper bits are rounded up just where the lower ones are negative.

But for one case: a master exactly halfway above a bfloat16 that ends in 0 is rounded down to it,
and 32768 is more than int16 has. It becomes 32767. So such a master, one of 131,072 numbers, moves
towards what it is rounded to, by its last bit, and what is uploaded is the cast of either. A NaN
stays one of its sign, with other bits. All other numbers come back bit for bit, infinite ones and
those that are rounded to them, too; `tests/test_masters.py` tries all 2**32. What has been read and
is written again does not move a second time.

The last bit could be kept if ties were rounded away from zero; but then parameters would not be
what jax casts their masters to. The numbers of float16 are unevenly far apart, so `rest` would not
do: such a leaf keeps float32 masters, and beside them what is uploaded.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from zenflow_jax._host.aligned import blank, copied

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_INT16 = np.iinfo(np.int16)
# Elements of a leaf that are worked on at once: the scratch stays in the cache.
_BLOCK = 128 * 1024


@dataclasses.dataclass(frozen=True, eq=False)
class Masters:
    """The masters of one leaf, and what is uploaded of them; arrays of one shape, C-contiguous."""

    values: np.ndarray  # float32; of a bfloat16 leaf the masters rounded, which are uploaded
    rest: np.ndarray | None = None  # of a bfloat16 leaf: int16, what `values` lack of the masters
    cast: np.ndarray | None = None  # of a float16 leaf: the masters rounded, which are uploaded

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: Any) -> "Masters":
        """Zeros of a leaf of this dtype: float32, bfloat16 or float16."""
        if dtype == _BFLOAT16:
            return cls(blank(shape, dtype), rest=blank(shape, np.int16))
        if dtype == np.float16:
            return cls(blank(shape), cast=blank(shape, dtype))
        return cls(blank(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def size(self) -> int:
        return self.values.size

    @property
    def arrays(self) -> list[np.ndarray]:
        """Those that there are."""
        return [x for x in (self.values, self.rest, self.cast) if x is not None]

    @property
    def to_upload(self) -> np.ndarray:
        """The masters in the leaf's dtype. Not a copy: the next update writes it."""
        return self.values if self.cast is None else self.cast

    def as_float32(self) -> np.ndarray:
        """All masters: new memory where they are split, else `values`, which updates write."""
        if self.rest is None:
            return self.values
        found = blank(self.shape)
        for rounded, rest, x in _blocks(self.values, self.rest, found):
            join(rounded, rest, out=x)
        return found

    def copy(self) -> "Masters":
        """The same in other memory."""
        rest, cast = (None if x is None else copied(x) for x in (self.rest, self.cast))
        return Masters(copied(self.values), rest, cast)

    def range(self, begin: int, end: int, scratch: np.ndarray) -> np.ndarray:
        """Some masters in their order, float32: a view, or written to the start of `scratch`."""
        values = self.values.reshape(-1)[begin:end]
        if self.rest is None:
            return values
        join(values, self.rest.reshape(-1)[begin:end], out=scratch[: end - begin])
        return scratch[: end - begin]

    def write(self, x: np.ndarray) -> None:
        """Sets all masters.

        Args:
            x: Of the same shape, float32 or in the leaf's dtype.
        """
        assert x.shape == self.shape
        if self.rest is None:
            np.copyto(self.values, x)
            if self.cast is not None:
                _round(self.values, out=self.cast)
        elif x.dtype == self.values.dtype:
            np.copyto(self.values, x)
            self.rest[...] = 0
        else:
            for rounded, rest, some in _blocks(self.values, self.rest, np.ascontiguousarray(x)):
                split(some, rounded, rest)


def join(rounded: np.ndarray, rest: np.ndarray, *, out: np.ndarray) -> None:
    """Puts masters together, in float32."""
    np.copyto(out, rounded)  # exact
    bits = out.view(np.int32)
    bits += rest


def split(
    x: np.ndarray,
    rounded: np.ndarray,
    rest: np.ndarray,
    where: "np.ndarray | bool" = True,
) -> None:
    """Takes masters apart.

    Args:
        x: float32.
        rounded: bfloat16; written.
        rest: int16; written.
        where: Bool, broadcast: elsewhere `rounded` and `rest` stay as they are.
    """
    _round(x, out=rounded, where=where)
    bits = x.view(np.int32)
    np.copyto(rest, bits, where=where, casting="same_kind")  # the lower 16
    halfway = rest == _INT16.min
    if where is not True:
        halfway &= where
    # Few; `np.nonzero` takes ten times as long where an array has axes.
    places = np.unravel_index(np.flatnonzero(halfway), rest.shape)
    down = bits[places] >> 16 == rounded.view(np.int16)[places]
    rest[places] = np.where(down, _INT16.max, _INT16.min)


def _round(x: np.ndarray, *, out: np.ndarray, where: "np.ndarray | bool" = True) -> None:
    with np.errstate(all="ignore"):  # what is too large becomes infinite, as on the device
        np.copyto(out, x, where=where, casting="same_kind")


def _blocks(*arrays: np.ndarray) -> Iterator[list[np.ndarray]]:
    flat = [x.reshape(-1) for x in arrays]
    for i in range(0, flat[0].size, _BLOCK):
        yield [x[i : i + _BLOCK] for x in flat]
