"""The compiled kernel: tiles of a leaf for the loops in `numba_loops.py`."""

import functools
import threading
from collections.abc import Callable

import ml_dtypes
import numpy as np

from zenflow_jax._host import numba_loops
from zenflow_jax._host.moments import Tile
from zenflow_jax._host.numpy_kernel import (
    GRADIENTS_PER_PASS,
    Step,
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
            together = _padded(addends[i : i + GRADIENTS_PER_PASS])
            numba_loops.accumulate(total, *together, first and i == 0)

    def adamw(self, step: Step) -> Callable[[Tile], None]:
        """The function that takes the step on one tile."""
        assert step.cast is None  # float16 takes the other kernel
        arrays = [_flat(x) for x in (step.p, step.rest)]
        arrays += [_flat(x) for x in (step.m, step.m_scales, step.v, step.v_scales)]
        channels = (step.active, step.m_debias, step.v_debias)
        _, rows, width, trailing = step.layout
        loop = numba_loops.adamw_trailing if trailing else numba_loops.adamw_leading
        sources = [(_readable(flat(g)), factor) for g, factor in step.gradients]
        early, late = [], sources
        if len(sources) > GRADIENTS_PER_PASS:
            early, late = sources[: 1 - GRADIENTS_PER_PASS], sources[1 - GRADIENTS_PER_PASS :]

        def advance(tile: Tile, gradients: Weighed, origin: int) -> None:
            of_tile = (*_padded(gradients), origin)
            scalars = (step.scale, *step.scalars)
            loop(*arrays, of_tile, channels, scalars, rows, width, tile)

        def add_up_and_advance(tile: Tile) -> None:
            first, last, left, right = tile
            i, j = first * width + left, (last - 1) * width + right
            total = self._scratch(j - i)
            # Of several rows cut to some of their lanes the rest is nobody's.
            whole = right - left == width
            starts = [i] if whole else range(i, j, width)
            size = j - i if whole else right - left
            for k in starts:
                pieces = [(g[k : k + size], factor) for g, factor in early]
                self.accumulate(total[k - i : k - i + size], pieces, first=True)
            advance(tile, [(_readable(total), np.float32(1)), *late], i)

        return add_up_and_advance if early else lambda tile: advance(tile, late, 0)

    def move(
        self,
        x: np.ndarray,
        rest: np.ndarray | None,
        rows: np.ndarray,
        channels: np.ndarray,
        *,
        inward: bool,
    ) -> Callable[[Tile], None]:
        """The function that moves one tile of `rows`; see `NumpyKernel.move`."""
        moved = _readable(flat(rows)) if inward else _flat(rows)
        arrays = _flat(x), _flat(rest), moved, channels
        return functools.partial(numba_loops.move, *arrays, inward or None, *x.shape[1:])

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


def _flat(x: np.ndarray | None) -> np.ndarray | None:
    return None if x is None else _bits(flat(x))


def _readable(x: np.ndarray) -> np.ndarray:
    """A view for Numba; always read-only, because to Numba that is a type of its own."""
    x = _bits(x).view()
    x.flags.writeable = False
    return x
