"""The float32 masters of a leaf on the host, split in two for a bfloat16 leaf.

A bfloat16 leaf uploads its masters rounded to the nearest bfloat16, ties to even. A bfloat16 is the
upper 16 bits of a float32. The host keeps the rounded number and the master's lower 16 bits,
`rest`, as a signed number: `bits of master = (bits of rounded << 16) + rest`, because the upper
bits are rounded up exactly where the lower bits are negative.

There is one exception: a master exactly halfway between a bfloat16 that ends in 0 and the next one
is rounded down, and 32768 does not fit in int16. `rest` becomes 32767, so such a master (one in
131,072 numbers) changes once, in its last bit; both values have the same cast. (Rounding ties away
from zero would keep the bit, but jax rounds ties to even.) A NaN stays a NaN with its sign. All
other numbers are restored exactly; `tests/host/test_masters.py` tests all 2**32.

The spacing of float16 numbers is uneven, so `rest` does not work there: a float16 leaf keeps
float32 masters and a rounded copy for uploads.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from zenflow_jax._host.arrays import HostArray, Tile, aligned_zeros

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_INT16 = np.iinfo(np.int16)


@dataclasses.dataclass(frozen=True, eq=False)
class Masters(HostArray):
    """One leaf's masters. `values` are float32, or rounded for a bfloat16 leaf's uploads."""

    rest: np.ndarray | None = None  # bfloat16 leaf: int16, the masters' lower halves
    cast: np.ndarray | None = None  # float16 leaf: the rounded masters, for uploads

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: Any) -> "Masters":
        if dtype == _BFLOAT16:
            return cls(aligned_zeros(shape, dtype), rest=aligned_zeros(shape, np.int16))
        if dtype == np.float16:
            return cls(aligned_zeros(shape), cast=aligned_zeros(shape, dtype))
        return cls(aligned_zeros(shape))

    @property
    def to_upload(self) -> np.ndarray:
        """Returns the masters in the leaf's dtype, not copied: the next update overwrites them."""
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
        if rest is not None:  # already rounded
            np.copyto(rest, 0, where=where)
        if cast is not None:
            _round(x, out=cast, where=where)


def _split(
    x: np.ndarray, rounded: np.ndarray, rest: np.ndarray, where: "np.ndarray | bool"
) -> None:
    """Splits float32 masters into `rounded` (bfloat16) and `rest` (int16).

    Both keep their values where `where`, broadcast, is False.
    """
    _round(x, out=rounded, where=where)
    bits = x.view(np.int32)
    np.copyto(rest, bits, where=where, casting="same_kind")  # the lower 16
    halfway = rest == _INT16.min
    if where is not True:
        halfway &= where
    # Such values are rare. `np.nonzero` takes ten times as long for an array with several axes.
    places = np.unravel_index(np.flatnonzero(halfway), rest.shape)
    down = bits[places] >> 16 == rounded.view(np.int16)[places]
    rest[places] = np.where(down, _INT16.max, _INT16.min)


def _round(x: np.ndarray, *, out: np.ndarray, where: "np.ndarray | bool") -> None:
    with np.errstate(all="ignore"):  # large numbers become infinite, as on the device
        np.copyto(out, x, where=where, casting="same_kind")
