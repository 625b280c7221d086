"""The compiled kernel: tiles of a leaf for the loops in `numba_loops.py`."""

import ml_dtypes
import numpy as np

from zenflow_jax._host import numba_loops
from zenflow_jax._host.arrays import Tile, flat
from zenflow_jax._host.numpy_kernel import GRADIENTS_PER_PASS, Step, Weighed

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class NumbaKernel:
    """One pass over memory, compiled when a combination of dtypes is first met."""

    def __init__(self, tile: int):
        self.tile = tile

    def accumulate(self, total: np.ndarray, gradients: Weighed, first: bool) -> None:
        for i in range(0, len(gradients), GRADIENTS_PER_PASS):
            together = _padded(gradients[i : i + GRADIENTS_PER_PASS])
            numba_loops.accumulate(total, *together, first and i == 0)

    def adamw(self, step: Step, tile: Tile) -> None:
        """Takes the step on one tile."""
        p, m, v = step.masters, step.mu, step.nu
        assert p.cast is None  # float16 takes the other kernel
        arrays = [_flat(x) for x in (p.values, p.rest, m.values, m.scales, v.values, v.scales)]
        channels = (step.active, step.m_debias, step.v_debias)
        _, rows, width, trailing = p.segments
        loop = numba_loops.adamw_trailing if trailing else numba_loops.adamw_leading
        scalars = (step.scale, *step.scalars)
        loop(*arrays, _padded(step.gradients), channels, scalars, rows, width, tile)


def _padded(gradients: Weighed) -> tuple[tuple[np.ndarray | None, ...], tuple[np.float32, ...]]:
    """Gradients and their factors as the compiled loops take them."""
    none = GRADIENTS_PER_PASS - len(gradients)
    assert none >= 0, "the others are added up before"
    gs = (*(_readable(g) for g, _ in gradients), *[None] * none)
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
