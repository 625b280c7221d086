"""The portable kernel: AdamW in NumPy calls on tiles that fit in the cache.

`adam.py` uses it on request and for float16. Its twin, `numba_loops.py`, gives bit-identical
results. `Step` is the input to both kernels.

Letters: `p, m, v, g` master, moments and gradient of a tile, in float32.
"""

import threading
from typing import NamedTuple

import numpy as np

from zenflow_jax._host.arrays import BUCKET, Tile, flat
from zenflow_jax._host.masters import Masters
from zenflow_jax._host.moments import Moment
from zenflow_jax._spec.scalars import AdamScalars

#: Number of gradients that a compiled step sums in one pass: enough for twice the default window.
#: Numba takes a second to compile each number of gradients and set of dtypes on first use.
GRADIENTS_PER_PASS = 8

#: Gradients in float32, bfloat16 or float16, each with its factor.
Weighted = list[tuple[np.ndarray, np.float32]]


class Sums(NamedTuple):
    """Float32 sums over gradients, each multiplied by its factor."""

    gradients: np.ndarray
    squares: np.ndarray

    @property
    def flat(self) -> "Sums":
        return Sums(*map(flat, self))


class Step(NamedTuple):
    """One leaf's AdamW step, as the kernels see it."""

    masters: Masters
    mu: Moment
    nu: Moment
    sums: Sums | None  # over earlier gradients, if these were summed; flat
    gradients: Weighted  # flat
    active: np.ndarray  # (entries * n,) bool
    m_debias: np.ndarray  # (entries * n,) float32, reciprocals of the bias corrections
    v_debias: np.ndarray
    scale: np.float32
    scalars: AdamScalars  # of np.float32


class NumpyKernel:
    """The kernel in NumPy calls with `out=`, so that only a thread's first step allocates."""

    def __init__(self, tile: int):
        self.tile = tile
        self._local = threading.local()

    def accumulate(self, sums: Sums, gradients: Weighted, first: bool) -> None:
        (scratch,) = self._scratch(1, sums.gradients.shape)
        with np.errstate(all="ignore"):  # the device decides which steps are finite
            for i, (g, factor) in enumerate(gradients):
                _add(sums, g, factor, scratch, first and i == 0)

    def adamw(self, step: Step, tile: Tile) -> None:
        """Takes the step on one tile."""
        first, last, left, right = tile
        channels, segments = slice(first, last), step.masters.segments
        if segments.trailing:
            start = first // segments.rows * segments.width
            channels = slice(start + left, start + right)

        def by_channel(x: np.ndarray) -> np.ndarray:
            return x[channels][None, :] if segments.trailing else x[channels][:, None]

        where, arrays = by_channel(step.active), (step.masters, step.mu, step.nu)
        masked = not where.all()
        if not where.any():
            return
        x, squares, y, *scratch = self._scratch(6, (last - first, right - left))
        old = [a.read_tile(tile, s) for a, s in zip(arrays, scratch, strict=True)]
        new = scratch if masked else old
        (p, m, v), (new_p, new_m, new_v), s = old, new, step.scalars
        with np.errstate(all="ignore"):
            if step.sums is not None:
                np.copyto(x, segments.region(step.sums.gradients, tile))
                np.copyto(squares, segments.region(step.sums.squares, tile))
            for i, (g, factor) in enumerate(step.gradients):
                first_one = step.sums is None and i == 0
                _add(Sums(x, squares), segments.region(g, tile), factor, y, first_one)
            x *= step.scale
            squares *= step.scale
            np.multiply(x, s.one_minus_b1, out=y)
            np.multiply(m, s.b1, out=new_m)
            new_m += y
            squares *= s.one_minus_b2
            np.multiply(v, s.b2, out=new_v)
            new_v += squares
            np.multiply(new_v, by_channel(step.v_debias), out=x)
            np.sqrt(x, out=x)
            x += s.eps
            np.multiply(new_m, by_channel(step.m_debias), out=y)
            y /= x
            np.multiply(p, s.weight_decay, out=x)
            y += x
            y *= s.learning_rate
            np.subtract(p, y, out=new_p)
        for a, numbers in zip(arrays, new, strict=True):
            if masked or not a.plain:
                a.write_tile(tile, numbers, where if masked else True)

    def _scratch(self, count: int, shape: tuple[int, ...]) -> list[np.ndarray]:
        """Returns `count` uninitialized float32 arrays for the calling thread."""
        if not hasattr(self._local, "scratch"):
            self._local.scratch = np.empty((6, max(self.tile, BUCKET)), np.float32)
        size = int(np.prod(shape))
        return [x[:size].reshape(shape) for x in self._local.scratch[:count]]


def _add(sums: Sums, g: np.ndarray, factor: np.float32, scratch: np.ndarray, first: bool) -> None:
    """Adds `factor * g` and its square to the sums, or sets the sums to them if `first`."""
    x = sums.gradients if first else scratch
    if g.dtype == np.float32:
        np.multiply(g, factor, out=x)
    else:
        np.copyto(x, g)  # exact, releases the GIL, and is faster than shifting bits
        x *= factor
    if first:
        np.multiply(x, x, out=sums.squares)
        return
    np.add(sums.gradients, x, out=sums.gradients)
    x *= x
    np.add(sums.squares, x, out=sums.squares)
