"""The float32 masters of a leaf on the host; of a bfloat16 leaf what is uploaded is half of each.

Such a leaf uploads its masters rounded to the nearest bfloat16, ties to even. A bfloat16 is the
upper 16 bits of a float32. Kept are the rounded one and the master's lower 16 bits, `rest`. Read as
a signed number they are the way back: `bits of master = (bits of rounded << 16) + rest`, because
the upper bits are rounded up just where the lower ones are negative.

But for one case: a master exactly halfway above a bfloat16 that ends in 0 is rounded down to it,
and 32768 is more than int16 has. It becomes 32767: such a master, one of 131,072 numbers, moves by
its last bit, once, and what is uploaded is the cast of either. (Ties away from zero would keep the
bit, but jax casts to even.) A NaN stays one of its sign. All other numbers come back bit for bit;
`tests/host/test_masters.py` tries all 2**32.

The numbers of float16 are unevenly far apart, so `rest` would not do: such a leaf keeps float32
masters and a rounded copy, which is uploaded.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from zenflow_jax._host.arrays import HostArray, Tile, blank

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_INT16 = np.iinfo(np.int16)


@dataclasses.dataclass(frozen=True, eq=False)
class Masters(HostArray):
    """The masters of one leaf. `values` are float32; of a bfloat16 leaf rounded, for uploads."""

    rest: np.ndarray | None = None  # of a bfloat16 leaf: int16, the masters' lower halves
    cast: np.ndarray | None = None  # of a float16 leaf: the masters rounded, for uploads

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: Any) -> "Masters":
        if dtype == _BFLOAT16:
            return cls(blank(shape, dtype), rest=blank(shape, np.int16))
        if dtype == np.float16:
            return cls(blank(shape), cast=blank(shape, dtype))
        return cls(blank(shape))

    @property
    def to_upload(self) -> np.ndarray:
        """The masters in the leaf's dtype. Not a copy: the next update writes it."""
        return self.values if self.cast is None else self.cast

    def like(self, shape: tuple[int, ...]) -> "Masters":
        return Masters.zeros(shape, self.to_upload.dtype)

    def read_tile(self, tile: Tile, scratch: np.ndarray) -> np.ndarray:
        values = self.segments.region(self.values, tile)
        if self.rest is None:
            return values
        np.copyto(scratch, values)  # exact
        bits = scratch.view(np.int32)
        bits += self.segments.region(self.rest, tile)
        return scratch

    def write_tile(self, tile: Tile, x: np.ndarray, where: "np.ndarray | bool" = True) -> None:
        values, rest, cast = (
            None if a is None else self.segments.region(a, tile)
            for a in (self.values, self.rest, self.cast)
        )
        assert values is not None
        if rest is not None and x.dtype == np.float32:
            _split(x, values, rest, where)
            return
        np.copyto(values, x, where=where)
        if rest is not None:  # rounded already
            np.copyto(rest, 0, where=where)
        if cast is not None:
            _round(x, out=cast, where=where)


def _split(
    x: np.ndarray, rounded: np.ndarray, rest: np.ndarray, where: "np.ndarray | bool"
) -> None:
    """Takes float32 masters apart, into `rounded` (bfloat16) and `rest` (int16).

    Where `where`, broadcast, is False both stay as they are.
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


def _round(x: np.ndarray, *, out: np.ndarray, where: "np.ndarray | bool") -> None:
    with np.errstate(all="ignore"):  # what is too large becomes infinite, as on the device
        np.copyto(out, x, where=where, casting="same_kind")
