"""The compiled kernel: tiles of a leaf for the loops in `numba_loops.py`."""

import functools
import threading
from collections.abc import Callable

import ml_dtypes
import numpy as np

from zenflow_jax._host import numba_loops, numba_moments
from zenflow_jax._host.numpy_kernel import (
    GRADIENTS_PER_PASS,
    Moving,
    MovingArray,
    Step,
    Tile,
    Weighed,
    flat,
)

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class NumbaKernel:
    """One pass over memory, compiled when a combination of dtypes is first met."""

    def __init__(self, tile: int):
        self.tile = tile
        self._local = threading.local()

    def accumulate(self, total: np.ndarray, gradients: Weighed, first: bool) -> None:
        addends = [(_readable(g), factor) for g, factor in gradients]
        for i in range(0, len(addends), GRADIENTS_PER_PASS):
            some = _padded(addends[i : i + GRADIENTS_PER_PASS])
            numba_loops.accumulate(total, *some, first and i == 0)

    def adamw(self, step: Step) -> Callable[[Tile], None]:
        """The function that takes the step on one tile."""
        assert step.cast is None  # float16 takes the other kernel
        p, m, v = (_bits(x).reshape(-1) for x in (step.p, step.m, step.v))
        rest = None if step.rest is None else step.rest.reshape(-1)
        per_channel = (step.active, step.m_scale, step.v_scale)
        width = step.p.shape[1]
        if step.m_units is None or step.v_units is None:
            loops, moments = numba_loops, (m, v)
        else:
            units_m, units_v = (x.reshape(-1) for x in (step.m_units, step.v_units))
            loops, moments = numba_moments, (m, units_m, v, units_v)
        if step.trailing:
            advance, sizes = loops.adamw_trailing, (step.rows, width)
        else:
            advance, sizes = loops.adamw_leading, (width,)
        more = (rest, *per_channel, (step.scale, *step.scalars), *sizes)
        gradients = [(_readable(g.reshape(-1)), factor) for g, factor in step.gradients]
        if len(gradients) <= GRADIENTS_PER_PASS:
            return functools.partial(advance, p, *moments, *_padded(gradients), 0, *more)
        early, late = (
            gradients[: 1 - GRADIENTS_PER_PASS],
            gradients[1 - GRADIENTS_PER_PASS :],
        )

        def add_up_and_advance(tile: Tile) -> None:
            first, last, left, right = tile
            i, j = first * width + left, (last - 1) * width + right
            total = self._scratch(j - i)
            # Of several rows cut to some of their lanes the rest is nobody's.
            whole = right - left == width
            starts = [i] if whole else range(i, j, width)
            size = j - i if whole else right - left
            for k in starts:
                some = [(g[k : k + size], factor) for g, factor in early]
                self.accumulate(total[k - i : k - i + size], some, first=True)
            gs = _padded([(_readable(total), np.float32(1)), *late])
            advance(p, *moments, *gs, i, *more, tile)

        return add_up_and_advance

    def move(self, moving: Moving) -> Callable[[Tile], None]:
        """The function that moves one tile: some channels (leading), or some rows (trailing)."""
        _, height, n, tail = moving.arrays[0].x.shape
        size = tail if height == 1 else height
        moves = [self._move(x, moving, n, size, leading=height == 1) for x in moving.arrays]

        def work(tile: Tile) -> None:
            for move in moves:
                move(tile)

        return work

    def _move(
        self, array: MovingArray, moving: Moving, n: int, size: int, *, leading: bool
    ) -> Callable[[Tile], None]:
        x = _bits(flat(array.x))
        rows = _readable(flat(array.rows)) if moving.inward else flat(array.rows)
        if array.units is not None:
            way, layout = "put" if moving.inward else "take", "leading" if leading else "trailing"
            move = getattr(numba_moments, f"{way}_{layout}")
            units = array.units.reshape(-1)
            return functools.partial(move, x, units, rows, moving.channels, n, size)
        rest = None if array.rest is None else flat(array.rest)
        inward = moving.inward or None  # another type than True's, so that Numba compiles each way
        move = numba_loops.move_leading if leading else numba_loops.move_trailing
        return functools.partial(move, x, rest, rows, moving.channels, inward, n, size)

    def _scratch(self, size: int) -> np.ndarray:
        """A float32 array that belongs to the calling thread; its contents are garbage."""
        if getattr(self._local, "size", 0) < size:
            self._local.size, self._local.scratch = size, np.empty(size, np.float32)
        return self._local.scratch[:size]


def _padded(gradients: Weighed) -> tuple[tuple[np.ndarray | None, ...], tuple[np.float32, ...]]:
    """Gradients and their factors as the compiled loops take them."""
    none = GRADIENTS_PER_PASS - len(gradients)
    gs = (*(g for g, _ in gradients), *[None] * none)
    return gs, (*(factor for _, factor in gradients), *[np.float32(0)] * none)


def _bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint16) if x.dtype == _BFLOAT16 else x


def _readable(x: np.ndarray) -> np.ndarray:
    """A view for Numba; always read-only, because to Numba that is a type of its own."""
    x = _bits(x).view()
    x.flags.writeable = False
    return x
