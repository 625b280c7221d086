"""The readable kernel: AdamW in NumPy, on copies of tiles that fit in the cache.

`adam.py` uses it on request (`host_kernel="numpy"`). Its twin, `numba_loops.py`, gives
bit-identical results in one pass over memory, and converts formats for both. `Step` is the input
to both.

Letters: `p, m, v, g` master, moments and gradient of a tile, in float32.
"""

from typing import NamedTuple

import numpy as np

from zenflow_jax._host.arrays import HostArray, Tile, flat
from zenflow_jax._spec.scalars import AdamScalars

#: Number of gradients that a compiled step sums in one pass: enough for twice the default window.
#: Numba takes a second to compile each number of gradients and set of dtypes on first use.
GRADIENTS_PER_PASS = 8

#: Gradients in float32 or bfloat16, each with its factor.
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

    masters: HostArray
    mu: HostArray
    nu: HostArray
    sums: Sums | None  # over earlier gradients, if these were summed; flat
    gradients: Weighted  # flat
    active: np.ndarray  # (entries * n,) bool
    m_debias: np.ndarray  # (entries * n,) float32, reciprocals of the bias corrections
    v_debias: np.ndarray
    scale: np.float32
    scalars: AdamScalars  # of np.float32


class NumpyKernel:
    def __init__(self, tile: int):
        self.tile = tile

    def accumulate(self, sums: Sums, gradients: Weighted, first: bool) -> None:
        with np.errstate(all="ignore"):  # the device decides which steps are finite
            for i, (g, factor) in enumerate(gradients):
                x = g.astype(np.float32) * factor
                for total, addend in zip(sums, (x, x * x), strict=True):
                    np.copyto(total, addend if first and i == 0 else total + addend)

    def adamw(self, step: Step, tile: Tile) -> None:
        """Takes the step on one tile's active channels."""
        first, last, left, right = tile
        channels = first + np.flatnonzero(step.active[first:last])
        width = step.masters.shape[-1]

        def taken(x: np.ndarray) -> np.ndarray:
            return x.reshape(-1, width)[channels, left:right]

        arrays, s = (step.masters, step.mu, step.nu), step.scalars
        p, m, v = (x.read_part(channels, left, right) for x in arrays)
        sums = Sums(np.empty_like(p), np.empty_like(p))
        if step.sums is not None:
            sums = Sums(*map(taken, step.sums))
        gradients = [(taken(g), factor) for g, factor in step.gradients]
        self.accumulate(sums, gradients, first=step.sums is None)
        m_debias, v_debias = step.m_debias[channels, None], step.v_debias[channels, None]
        with np.errstate(all="ignore"):
            m = m * s.b1 + (sums.gradients * step.scale) * s.one_minus_b1
            v = v * s.b2 + (sums.squares * step.scale) * s.one_minus_b2
            direction = (m * m_debias) / (np.sqrt(v * v_debias) + s.eps) + p * s.weight_decay
            p = p - direction * s.learning_rate
        for x, numbers in zip(arrays, (p, m, v), strict=True):
            x.write_part(channels, left, numbers)
