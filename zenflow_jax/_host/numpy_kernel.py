"""The portable kernel: AdamW in NumPy calls on tiles that fit the cache.

`adam.py` runs it where Numba is not wanted and for float16, which Numba lacks. `numba_loops.py` is
its twin and gives the same bits. Here too is what both kernels take: a step or rows that move, and
a tile of them.

Letters: `p, m, v, g` master, moments and gradient, each `(segments, width)`. Of a split master `p`
is the rounded one, and `rest` what it lacks (`masters.py`). Compact moments are codes, with their
units; of a second moment they are the root's (`moments.py`).
"""

import functools
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from zenflow_jax._host.masters import join, split
from zenflow_jax._host.moments import GROUP, Layout, Moment, decode, encode
from zenflow_jax._plan.scalars import AdamScalars

# The kernel leaves inactive channels out, run by run, if runs of active ones have at least this
# many elements on average. Below it the calls cost more than computing all and masking.
_LONG_RUN = 8 * 1024

#: Gradients that a compiled step adds up on its way: those of a window of the default length. Numba
#: compiles each number of them, and each set of dtypes, when it first meets it, in half a second.
GRADIENTS_PER_PASS = 4

#: Gradients in float32, bfloat16 or float16, each with its factor.
Weighed = list[tuple[np.ndarray, np.float32]]
Tile = tuple[int, int, int, int]  # first and last + 1 segment, first and last + 1 element in each


class Step(NamedTuple):
    """One AdamW step of one leaf, as the kernels see it.

    A segment is a contiguous piece of `width` elements: a channel in the leading layout, a row of
    all channels in the trailing one.
    """

    p: np.ndarray  # (segments, width) float32, or bfloat16 where masters are split
    rest: np.ndarray | None  # (segments, width) int16; None where they are not
    cast: np.ndarray | None  # (segments, width) float16: gets the new masters, rounded
    m: np.ndarray  # (segments, width) float32, or codes
    v: np.ndarray
    m_units: np.ndarray | None  # as in `Moment`; None where moments are float32
    v_units: np.ndarray | None
    gradients: Weighed  # (segments, width)
    active: np.ndarray  # (entries * n,) bool
    m_scale: np.ndarray  # (entries * n,) float32, reciprocals of the bias corrections
    v_scale: np.ndarray  # the same; where moments are compact, their roots
    rows: int  # segments of a stack entry in the trailing layout
    trailing: bool
    scale: np.float32
    scalars: AdamScalars  # of np.float32


class MovingArray(NamedTuple):
    """One of a leaf's arrays, and rows of it."""

    x: np.ndarray  # (entries, rows, n, tail) float32, bfloat16 of split masters, or codes
    rest: np.ndarray | None  # int16, like x: of split masters
    units: np.ndarray | None  # of codes
    rows: np.ndarray  # (entries, rows, k, tail) float32


class Moving(NamedTuple):
    """Some channels of a leaf's arrays that are copied out, or in."""

    arrays: list[MovingArray]
    channels: np.ndarray  # int32 (entries, k)
    inward: bool


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

    def move(self, moving: Moving) -> Callable[[Tile], None]:
        """The function that moves the rows, all of them at once."""

        def work(_: Tile) -> None:
            for x, rest, units, rows in moving.arrays:
                if units is not None:
                    _move_codes(Moment(x, units), moving.channels, rows, inward=moving.inward)
                    continue
                for i, (index, some) in enumerate(zip(moving.channels, rows, strict=True)):
                    if rest is not None:
                        _move_split(x[i], rest[i], index, some, inward=moving.inward)
                    elif moving.inward:
                        x[i][:, index] = some
                    else:
                        # The default mode would fill a buffer of its own first.
                        np.take(x[i], index, axis=1, out=some, mode="clip")

        return work

    def _work(self, step: Step, tile: Tile) -> None:
        first, last, left, right = tile
        columns = slice(left, right)
        if not step.trailing:
            channels = slice(first, last)
            active = step.active[channels]
            edges = np.flatnonzero(np.diff(active, prepend=False, append=False))
            if active.sum() * (right - left) >= len(edges) // 2 * _LONG_RUN:
                for a, b in edges.reshape(-1, 2) + first:
                    self._update(step, slice(a, b), columns, slice(a, b), masked=False)
            else:
                self._update(step, channels, columns, channels, masked=True)
            return
        n = step.p.shape[1]
        for entry in range(first // step.rows, -(-last // step.rows)):
            segments = slice(max(first, entry * step.rows), min(last, (entry + 1) * step.rows))
            channels = slice(entry * n + left, entry * n + right)
            active = step.active[channels]
            if active.any():
                self._update(step, segments, columns, channels, masked=not active.all())

    def _update(
        self, step: Step, segments: slice, columns: slice, channels: slice, *, masked: bool
    ) -> None:
        def by_channel(x: np.ndarray) -> np.ndarray:
            return x[channels][None, :] if step.trailing else x[channels][:, None]

        p, m, v = (x[segments, columns] for x in (step.p, step.m, step.v))
        x, y, old_p, *spare = self._scratch(6, p.shape)
        rest = None if step.rest is None else step.rest[segments, columns]
        if rest is None:
            old_p = p
        else:
            join(p, rest, out=old_p)
        new_p, new_m, new_v = spare if masked else (old_p, m, v)
        layout = Layout(step.rows, step.p.shape[1], step.trailing)
        coded = []
        if step.m_units is not None and step.v_units is not None:
            here = layout.units(segments, columns)
            new_m, new_v = spare[1:]
            coded = [(m, step.m_units[here], new_m), (v, step.v_units[here], new_v)]
            for codes, units, new in coded:
                decode(codes, layout.spread(units, p.shape), out=new)
            new_v *= new_v
            m, v = new_m, new_v
        s = step.scalars
        with np.errstate(all="ignore"):
            for i, (g, factor) in enumerate(step.gradients):
                _widen_into(y if i else x, g[segments, columns], factor)
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
            if coded:  # the root is taken once, for the step and for the codes
                np.sqrt(new_v, out=new_v)
                np.multiply(new_v, by_channel(step.v_scale), out=x)
            else:
                np.multiply(new_v, by_channel(step.v_scale), out=x)
                np.sqrt(x, out=x)
            x += s.eps
            np.multiply(new_m, by_channel(step.m_scale), out=y)
            y /= x
            np.multiply(old_p, s.weight_decay, out=x)
            y += x
            y *= s.learning_rate
            np.subtract(old_p, y, out=new_p)
            where = by_channel(step.active) if masked else True
            for codes, units, new in coded:
                encode(new, layout.axis, codes, units, where)
            if masked and not coded:
                for old, new in ((m, new_m), (v, new_v)):
                    np.copyto(old, new, where=where)
            if rest is not None:
                split(new_p, p, rest, where)
            elif masked:
                np.copyto(p, new_p, where=where)
            if step.cast is not None:
                np.copyto(step.cast[segments, columns], new_p, where=where, casting="same_kind")

    def _scratch(self, count: int, shape: tuple[int, ...]) -> list[np.ndarray]:
        """`count` arrays of float32 that belong to the calling thread; contents are garbage."""
        if not hasattr(self._local, "scratch"):
            self._local.scratch = np.empty((6, max(self.tile, GROUP)), np.float32)
        size = int(np.prod(shape))
        return [x[:size].reshape(shape) for x in self._local.scratch[:count]]


def _move_split(
    x: np.ndarray, rest: np.ndarray, index: np.ndarray, some: np.ndarray, *, inward: bool
) -> None:
    """Moves rows of split masters of one stack entry."""
    if not inward:
        join(x[:, index], rest[:, index], out=some)
        return
    rounded, steps = np.empty(some.shape, x.dtype), np.empty(some.shape, rest.dtype)
    split(some, rounded, steps)
    x[:, index], rest[:, index] = rounded, steps


def _move_codes(moment: Moment, channels: np.ndarray, rows: np.ndarray, *, inward: bool) -> None:
    """Moves channels of a compact moment."""
    assert moment.units is not None
    some = Moment.compact(rows.shape, moment.values.dtype)
    assert some.units is not None
    units, mine = (_by_channel(x) for x in (moment, some))
    pairs = [(moment.values, some.values), (units, mine)]
    if inward:
        some.write(rows)
    for i, index in enumerate(channels):
        for whole, its in pairs:
            if inward:
                whole[i][:, index] = its[i]
            else:
                its[i] = whole[i][:, index]
    if not inward:
        some.range(0, rows.size, flat(rows))


def _by_channel(moment: Moment) -> np.ndarray:
    """Its units as `(entries, blocks of rows, n, groups of codes)`."""
    assert moment.units is not None
    entries, _, n, tail = moment.shape
    shape = (entries, -1, n, 1) if tail == 1 else (entries, 1, n, -1)
    return moment.units.reshape(shape)


def _widen_into(x: np.ndarray, g: np.ndarray, factor: np.float32) -> None:
    if g.dtype == np.float32:
        np.multiply(g, factor, out=x)
    else:
        np.copyto(x, g)  # exact, releases the GIL, and beats shifting bits
        x *= factor


def flat(x: np.ndarray) -> np.ndarray:
    assert x.flags.c_contiguous  # else `reshape` would copy, and writes be lost
    return x.reshape(-1)
