"""Runs AdamW on deferred channels in NumPy arrays, and copies channels in and out.

Two kernels give bit-identical results with any number of threads and any tile size: "numba" makes
one pass over memory in compiled loops, and "numpy" is the same in a few lines.

Arrays are `(entries, n, width)` (see `arrays.py`, which defines the formats of masters and
moments), or `(entries, n)` with one number per channel.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import numpy as np

from zenflow_jax._host.arrays import HostArray, Tile, bits, cut_tiles, flat
from zenflow_jax._host.numpy_kernel import GRADIENTS_PER_PASS, NumpyKernel, Step, Sums, Weighted
from zenflow_jax._spec.checks import check_int_or_none, check_one_of
from zenflow_jax._spec.scalars import AdamScalars, WindowStep

# Maximum number of elements that a thread takes at once. Numba streams through memory and evicts
# the interpreter's data; reloading it costs up to 50 us per tile, 3% of the time at half this size.
_NUMBA_TILE = 2 * 1024 * 1024
# The NumPy kernel's tile stays in a core's L2 cache.
_NUMPY_TILE = 128 * 1024
# Smaller leaves get smaller tiles, so that every thread has work. This is the minimum size.
_LEAST_TILE = 64 * 1024
# Elements between two yields of `adamw`, unless the threads need more to stay busy.
_CHUNK = 2 * 1024 * 1024

#: Gradients of one shape (float32 or bfloat16; may be read-only), each with its factor.
WeightedGradients = Sequence[tuple[np.ndarray, float]]


class HostAdam:
    """Sums gradients, takes AdamW steps and moves channels, a leaf at a time, on several threads.

    Must be used from one thread only, which waits inside each call. While a call (or a chunk of
    `adamw`) runs, no other thread may use the arrays that it writes. `threads` defaults to all
    cores but one; `tile` is the number of elements that a thread takes at once.
    """

    def __init__(
        self, kernel: str = "numba", threads: int | None = None, *, tile: int | None = None
    ):
        check_one_of("host_kernel", kernel, ("numba", "numpy"))
        most = max(1, len(os.sched_getaffinity(0)) - 1)
        self.threads = threads = check_int_or_none("threads", threads, 1) or most
        if kernel == "numba":
            self._kernel = NumbaKernel(tile or _NUMBA_TILE)
        else:
            self._kernel = NumpyKernel(tile or _NUMPY_TILE)
        # Two threads must not enter Numba's own parallel layer. This pool runs only serial
        # functions that release the GIL.
        self._pool = ThreadPoolExecutor(threads, "zenflow-adam") if threads > 1 else None

    def accumulate(self, sums: Sums, gradients: WeightedGradients, *, first: bool) -> None:
        """Adds gradients, each multiplied by its factor, and their squares to `sums`, in order.

        If `first`, overwrites `sums`.
        """
        size = sums.gradients.size
        assert all(g.shape == sums.gradients.shape for g, _ in gradients)
        totals = sums.flat
        addends = [(flat(g), np.float32(factor)) for g, factor in gradients]

        def work(tile: Tile) -> None:
            part = slice(tile[2], tile[3])
            share = [(g[part], factor) for g, factor in addends]
            self._kernel.accumulate(Sums(*(x[part] for x in totals)), share, first)

        self._run(work, cut_tiles((1, 1, size), self._limit(size)))

    def adamw(
        self,
        masters: HostArray,
        mu: HostArray,
        nu: HostArray,
        steps: np.ndarray,
        gradients: WeightedGradients,
        scale: float,
        active: np.ndarray,
        hyperparameters: WindowStep,
        sums: Sums | None = None,
    ) -> Iterator[None]:
        """Takes an AdamW step on the active channels, with `scale` times the sums over `gradients`.

        The first moment gets the sum of gradients, the second the sum of their squares. Accepts at
        most `GRADIENTS_PER_PASS` gradients; passing `sums` over the first of them, from
        `accumulate`, is bit-identical. `steps` (int32) and `active` have shape `(entries, n)`.
        Inactive channels stay unchanged.

        This is a generator, so that the caller can do other work between chunks of a few
        milliseconds. It reads `steps` and `active`, and writes `steps`, when it starts.
        """
        assert (mu.extra is None) == (nu.extra is None)
        assert mu.shape == nu.shape == masters.shape
        assert all(x.flags.writeable for x in (*masters.arrays, *mu.arrays, *nu.arrays))
        assert gradients or sums is not None
        assert all(g.shape == masters.shape for g, _ in gradients)
        assert steps.dtype == np.int32
        assert steps.shape == active.shape == masters.shape[:2]
        active = active.copy()  # The caller may select again during the step.
        if masters.size == 0 or not active.any():
            return
        steps += active * np.int32(hyperparameters.advance)
        step = Step(
            masters=masters,
            mu=mu,
            nu=nu,
            sums=None if sums is None else sums.flat,
            gradients=[(flat(g), np.float32(factor)) for g, factor in gradients],
            active=active.reshape(-1),
            m_debias=_debias(steps, hyperparameters.b1),
            v_debias=_debias(steps, hyperparameters.b2),
            scale=np.float32(scale),
            scalars=AdamScalars(*map(np.float32, hyperparameters.scalars)),
        )
        limit = self._limit(masters.size)
        tiles = cut_tiles(masters.shape, limit)
        tiles = [tile for tile in tiles if step.active[tile[0] : tile[1]].any()]
        chunk = max(_CHUNK // limit, 2 * self.threads if self.threads > 1 else 1)
        for i in range(0, len(tiles), chunk):
            self._run(partial(self._kernel.adamw, step), tiles[i : i + chunk])
            yield

    def take(self, arrays: Sequence[HostArray], channels: np.ndarray) -> list[np.ndarray]:
        """Copies `channels` `(entries, k)` into new float32 arrays `(entries, k, width)`."""
        taken = [np.empty((*channels.shape, x.shape[-1]), np.float32) for x in arrays]
        for x, rows in zip(arrays, taken, strict=True):
            self._move(x, channels, rows, inward=False)
        return taken

    def put(
        self, arrays: Sequence[HostArray], channels: np.ndarray, rows: Sequence[np.ndarray]
    ) -> None:
        """Overwrites channels with `rows`, as `take` returns them."""
        for x, numbers in zip(arrays, rows, strict=True):
            self._move(x, channels, numbers, inward=True)

    def close(self) -> None:
        """Ends the threads. Safe to call twice."""
        if self._pool is not None:
            self._pool.shutdown()

    def _move(self, x: HostArray, channels: np.ndarray, rows: np.ndarray, *, inward: bool) -> None:
        """Copies `channels` from `x` to `rows`, or in the other direction if `inward`."""
        entries, n, width = x.shape
        assert rows.shape == (entries, channels.shape[1], width)
        if channels.size == 0:
            return
        if not 0 <= channels.min() <= channels.max() < n:
            raise ValueError(
                f"Channels {channels.min()} to {channels.max()} exceed the range 0 to {n - 1}: the "
                "optimizer state is damaged. Resume from a checkpoint."
            )
        numbers = (channels + n * np.arange(entries)[:, None]).reshape(-1)  # over all entries
        rows = rows.reshape(-1, width)

        def work(tile: Tile) -> None:
            part = slice(tile[0], tile[1])
            if inward:
                x.write_part(numbers[part], 0, rows[part])
            else:
                x.read_part(numbers[part], 0, width, out=rows[part])

        together = max(_LEAST_TILE // max(width, 1), 1)
        starts = range(0, numbers.size, together)
        self._run(work, [(i, i + together, 0, width) for i in starts])

    def _limit(self, size: int) -> int:
        return min(self._kernel.tile, max(_LEAST_TILE, size // (2 * self.threads)))

    def _run(self, work: Callable[[Tile], None], tiles: list[Tile]) -> None:
        if self._pool is None or len(tiles) == 1:
            for tile in tiles:
                work(tile)
            return
        todo = deque(tiles)

        def share() -> None:
            while todo:
                try:
                    tile = todo.popleft()
                except IndexError:  # another thread has just taken the last one
                    return
                work(tile)

        # One task per thread: a task per tile would cost 45 us more per tile.
        futures = [self._pool.submit(share) for _ in range(min(self.threads, len(tiles)))]
        wait(futures)  # waits for all, because no thread may still write after an exception
        for future in futures:
            future.result()


def _debias(steps: np.ndarray, beta: float) -> np.ndarray:
    """Returns `1 / (1 - beta**steps)`, computed in float64; inf where no step was taken."""
    with np.errstate(divide="ignore"):
        return (1 / (1 - np.float64(beta) ** steps.reshape(-1))).astype(np.float32)


class NumbaKernel:
    """One pass over memory, compiled at the first use of each combination of dtypes."""

    def __init__(self, tile: int):
        # Imported here, so that a process that only plans or evaluates does not wait for Numba.
        from zenflow_jax._host import numba_loops

        self.tile, self._loops = tile, numba_loops

    def accumulate(self, sums: Sums, gradients: Weighted, first: bool) -> None:
        for i in range(0, len(gradients), GRADIENTS_PER_PASS):
            together = _padded(gradients[i : i + GRADIENTS_PER_PASS])
            self._loops.accumulate(*sums, True if first and i == 0 else None, *together)

    def adamw(self, step: Step, tile: Tile) -> None:
        """Takes the step on one tile."""
        arrays = [
            None if array is None else bits(array)
            for x in (step.masters, step.mu, step.nu)
            for array in (x.values, x.extra)
        ]
        gradients = (None if step.sums is None else tuple(step.sums), *_padded(step.gradients))
        channels = (step.active, step.m_debias, step.v_debias)
        inputs = gradients, channels, (step.scale, *step.scalars)
        self._loops.adamw(*arrays, inputs, step.masters.shape[-1], tile)


def _padded(gradients: Weighted) -> tuple[tuple[np.ndarray | None, ...], tuple[np.float32, ...]]:
    """Pads gradients and factors to the number that the compiled loops expect."""
    none = GRADIENTS_PER_PASS - len(gradients)
    assert none >= 0, "earlier gradients are already summed"
    views = [bits(g).view() for g, _ in gradients]
    for x in views:
        x.flags.writeable = False  # always, because Numba types read-only arrays separately
    return (*views, *[None] * none), (*(f for _, f in gradients), *[np.float32(0)] * none)
