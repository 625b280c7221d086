"""The portable kernel: AdamW in NumPy calls on tiles that fit the cache.

`adam.py` runs it where Numba is not wanted and for float16. `numba_loops.py` is its twin and gives
the same bits. Here too is what both kernels take: a step.

Letters: `p, m, v, g` master, moments and gradient, each `(segments, width)`. Of a split master `p`
is the rounded one, and `rest` what it lacks (`masters.py`). Of compact moments `m` and `v` are
codes, and `m_scales` and `v_scales` their scales (`moments.py`).
"""

import functools
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from zenflow_jax._host.masters import Masters, join, split
from zenflow_jax._host.moments import (
    BLOCK,
    Layout,
    Moment,
    Tile,
    as_matrix,
    decode,
    encode,
    spread,
)
from zenflow_jax._spec.scalars import AdamScalars

#: Gradients that a compiled step adds up on its way: those of a window of twice the default length.
#: Numba compiles each number of them, and each set of dtypes, when it first meets it, in a second.
GRADIENTS_PER_PASS = 8

#: Gradients in float32, bfloat16 or float16, each with its factor.
Weighed = list[tuple[np.ndarray, np.float32]]


class Step(NamedTuple):
    """One AdamW step of one leaf, as the kernels see it."""

    layout: Layout
    masters: Masters
    mu: Moment
    nu: Moment
    gradients: Weighed  # flat
    active: np.ndarray  # (entries * n,) bool
    m_debias: np.ndarray  # (entries * n,) float32, reciprocals of the bias corrections
    v_debias: np.ndarray
    scale: np.float32
    scalars: AdamScalars  # of np.float32


class NumpyKernel:
    """Tiles in the cache and `out=` everywhere: only the first step of a thread allocates."""

    def __init__(self, tile: int):
        self.tile = tile
        self._local = threading.local()

    def accumulate(self, total: np.ndarray, gradients: Weighed, first: bool) -> None:
        with np.errstate(all="ignore"):  # the device decides which steps are finite
            for i, (g, factor) in enumerate(gradients):
                if first and i == 0:
                    _widen_into(total, g, factor)
                else:
                    (x,) = self._scratch(1, total.shape)
                    _widen_into(x, g, factor)
                    total += x

    def adamw(self, step: Step) -> Callable[[Tile], None]:
        """The function that takes the step on one tile."""
        return functools.partial(self._work, step)

    def _work(self, step: Step, tile: Tile) -> None:
        first, last, left, right = tile
        channels = slice(first, last)
        if step.layout.trailing:
            start = first // step.layout.rows * step.layout.width
            channels = slice(start + left, start + right)
        active = step.active[channels]
        if active.any():
            self._update(step, tile, channels, masked=not active.all())

    def _update(self, step: Step, tile: Tile, channels: slice, *, masked: bool) -> None:
        layout, masters = step.layout, step.masters

        def by_channel(x: np.ndarray) -> np.ndarray:
            return x[channels][None, :] if layout.trailing else x[channels][:, None]

        def of_tile(x: np.ndarray) -> np.ndarray:
            return flat(x).reshape(-1, layout.width)[slice(*tile[:2]), slice(*tile[2:])]

        p, m, v = (of_tile(x.values) for x in (masters, step.mu, step.nu))
        where = by_channel(step.active) if masked else True
        x, y, old_p, *spare = self._scratch(6, p.shape)
        rest = None if masters.rest is None else of_tile(masters.rest)
        if rest is None:
            old_p = p
        else:
            join(p, rest, out=old_p)
        new_p, new_m, new_v = spare if masked else (old_p, m, v)
        coded = []
        if step.mu.scales is not None and step.nu.scales is not None:
            new_m, new_v = spare[1:]
            scales = [
                as_matrix(x, layout)[layout.scales(tile)] for x in (step.mu.scales, step.nu.scales)
            ]
            coded = list(zip((m, v), scales, (new_m, new_v), strict=True))
            for codes, of_codes, new in coded:
                decode(codes, spread(of_codes, layout.axis, p.shape), out=new)
            m, v = new_m, new_v
        s = step.scalars
        with np.errstate(all="ignore"):
            for i, (g, factor) in enumerate(step.gradients):
                _widen_into(y if i else x, of_tile(g), factor)
                if i:
                    x += y
            x *= step.scale
            np.multiply(x, s.one_minus_b1, out=y)
            np.multiply(m, s.b1, out=new_m)
            new_m += y
            np.multiply(x, x, out=x)
            x *= s.one_minus_b2
            np.multiply(v, s.b2, out=new_v)
            new_v += x
            np.multiply(new_v, by_channel(step.v_debias), out=x)
            np.sqrt(x, out=x)
            x += s.eps
            np.multiply(new_m, by_channel(step.m_debias), out=y)
            y /= x
            np.multiply(old_p, s.weight_decay, out=x)
            y += x
            y *= s.learning_rate
            np.subtract(old_p, y, out=new_p)
        for codes, scales, new in coded:
            encode(new, layout.axis, codes, scales, where)
        if masked and not coded:
            for old, new in ((m, new_m), (v, new_v)):
                np.copyto(old, new, where=where)
        if rest is not None:
            split(new_p, p, rest, where)
        elif masked:
            np.copyto(p, new_p, where=where)
        if masters.cast is not None:
            with np.errstate(all="ignore"):
                np.copyto(of_tile(masters.cast), new_p, where=where, casting="same_kind")

    def _scratch(self, count: int, shape: tuple[int, ...]) -> list[np.ndarray]:
        """`count` arrays of float32 that belong to the calling thread; contents are garbage."""
        if not hasattr(self._local, "scratch"):
            self._local.scratch = np.empty((6, max(self.tile, BLOCK)), np.float32)
        size = int(np.prod(shape))
        return [x[:size].reshape(shape) for x in self._local.scratch[:count]]


def move(
    x: np.ndarray,
    rest: np.ndarray | None,
    rows: np.ndarray,
    channels: np.ndarray,
    inward: bool,
    piece: Tile,
) -> None:
    """Moves a piece of the `rows` of channels from `x`, or to it if `inward`.

    `x` (and `rest`, where masters are split) are `(entries, rows, n, tail)`; `rows` are `(entries,
    rows, k, tail)`, float32 of split masters, else of the dtype of `x`. A piece is one entry, and
    some places among its `channels`.
    """
    entry, _, left, right = piece
    index, moved, whole = channels[entry, left:right], rows[entry][:, left:right], x[entry]
    if rest is None and inward:
        whole[:, index] = moved
    elif rest is None:
        # The default mode would fill a buffer of its own first.
        np.take(whole, index, axis=1, out=moved, mode="clip")
    elif inward:
        rounded, steps = np.empty(moved.shape, x.dtype), np.empty(moved.shape, rest.dtype)
        split(np.ascontiguousarray(moved), rounded, steps)
        whole[:, index], rest[entry][:, index] = rounded, steps
    else:
        masters = np.empty(moved.shape, np.float32)
        join(whole[:, index], rest[entry][:, index], out=masters)
        moved[...] = masters


def _widen_into(x: np.ndarray, g: np.ndarray, factor: np.float32) -> None:
    if g.dtype == np.float32:
        np.multiply(g, factor, out=x)
    else:
        np.copyto(x, g)  # exact, releases the GIL, and beats shifting bits
        x *= factor


def flat(x: np.ndarray) -> np.ndarray:
    assert x.flags.c_contiguous  # else `reshape` would copy, and writes be lost
    return x.reshape(-1)
