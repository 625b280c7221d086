"""The host's half of a layerwise run: one thread, which takes AdamW steps in order."""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from zenflow_jax._checkpoint.saving import Snapshot
from zenflow_jax._diagnostics.stats import check_skipped_steps
from zenflow_jax._diagnostics.timeline import Recorder
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._spec.scalars import AdamScalars
from zenflow_jax.layerwise._blocks import Block

#: The weight of older steps in the running mean of a block's share of the squared norm.
_MEMORY = np.float32(0.9)


class TaskThread:
    """Runs tasks in order. Unlike a pool's thread it never keeps the interpreter from ending."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        arguments = {"target": _run_tasks, "args": (self._tasks,), "name": name, "daemon": True}
        self._thread = threading.Thread(**arguments)
        self._thread.start()
        weakref.finalize(self, self._tasks.put, None)

    def submit(self, task: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, task, args))
        return future

    def end(self) -> None:
        """Lets the thread end after its current tasks, without waiting."""
        self._tasks.put(None)

    def close(self) -> None:
        """Ends the thread after its current tasks."""
        self.end()
        self._thread.join()


def _run_tasks(tasks: "queue.SimpleQueue[Any]") -> None:
    while (item := tasks.get()) is not None:
        future, task, args = item
        try:
            future.set_result(task(*args))
        except BaseException as error:  # noqa: BLE001  the future holds it
            future.set_exception(error)
        del item, future, task, args  # frees arrays before the next task


class Host:
    """Owns the state of all blocks. Public methods are for the caller's thread.

    `counts` are from a saved state; they are empty in a new run.

    With `at_once`, a block is updated when its gradient arrives, and its clipping factor comes from
    a projected norm: the sum of squares so far in the step, divided by the share that these blocks
    had in earlier steps. Otherwise a step's updates begin when all sums of squares are known.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        scalars: AdamScalars,
        adam: HostAdam,
        *,
        at_once: bool,
        max_grad_norm: float | None,
        max_skipped: int | None,
        counts: Mapping[str, Any],
    ):
        self.blocks, self.recorder, self._in_a_row = blocks, Recorder(), 0
        self.counted = int(counts.get("counted", 0))
        self.skipped = int(counts.get("step", 0)) - self.counted
        sizes = np.array([block.nbytes for block in blocks], np.float32)
        self.shares = np.asarray(counts.get("shares", sizes / max(sizes.sum(), 1)), np.float32)
        self._scalars, self._adam = scalars, adam
        self.at_once, self._max_grad_norm = at_once, max_grad_norm
        self._max_skipped = max_skipped
        self._snapshots: list[Snapshot] = []
        self.failure: BaseException | None = None
        self.closed = False
        # The current step, on the thread: whether it counts, its factor, and sums of squares.
        self._counts, self._factor = True, 1.0
        self._arrived = 0.0  # when the device's last result arrived
        self._squares: dict[int, np.float32] = {}
        self._thread = TaskThread("zenflow-host")

    def decide(self, step: int, rate: jax.Array, numbers: Sequence[jax.Array]) -> Future[None]:
        """Decides whether a step counts; `numbers` are its loss or all sums of squares."""
        return self._thread.submit(self._run, self._decide, step, rate, numbers)

    def update(
        self, i: int, step: int, old: list[Any], gradient: list[Any], squares: jax.Array
    ) -> Future[list[Any]]:
        """Updates block `i`, and returns its new weights; empties both lists."""
        return self._thread.submit(self._run, self._update, i, step, old, gradient, squares)

    def result(self, future: "Future[Any]") -> Any:
        """Returns a task's result, or raises its error."""
        if not future.done():
            start = time.perf_counter()
            future.exception()
            now, step = time.perf_counter(), self.counted + self.skipped
            arrived = min(max(self._arrived, start), now)
            self.recorder.add("caller", "wait for device", start, step, arrived)
            self.recorder.add("caller", "wait for host", arrived, step, now)
        if future.exception() is not None:
            self.check()
        return future.result()

    def check(self) -> None:
        """Raises an error if the host is closed or a task has failed."""
        if self.closed:
            raise RuntimeError("The trainer is closed. Make a new trainer from its saved state.")
        if self.failure is None:
            return
        if isinstance(self.failure, FloatingPointError):
            raise FloatingPointError(str(self.failure)) from self.failure
        raise RuntimeError(
            f"An update on the host failed: {self.failure}. Resume from the last checkpoint."
        ) from self.failure

    def snapshot(self, copy_bytes: int) -> Snapshot:
        """Captures the state, which must be at rest, until it is saved."""
        blocks = {i: block for i, block in enumerate(self.blocks) if block.trains}
        snapshot = Snapshot(blocks, copy_bytes)
        self._snapshots = [*(x for x in self._snapshots if not x.done), snapshot]
        return snapshot

    def close(self) -> None:
        if not self.closed:
            self.closed = True  # ends a wait for a save
            self._thread.close()
            self._adam.close()

    def _run(self, task: Callable[..., Any], step: int, *args: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise RuntimeError("the trainer was closed before this update")
        try:
            return task(step, *args)
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self.recorder.works_at(None)

    def _decide(self, step: int, rate: jax.Array, numbers: Sequence[jax.Array]) -> None:
        total = np.float32(sum(map(np.asarray, numbers), np.float32(0)))
        self._arrived = time.perf_counter()
        self._counts, self._squares = bool(np.isfinite(total)), {}
        if not self._counts:
            self.skipped, self._in_a_row = self.skipped + 1, self._in_a_row + 1
            check_skipped_steps(self._in_a_row, step, self._max_skipped)
            return
        self.counted, self._in_a_row = self.counted + 1, 0
        self._now = self._scalars._replace(learning_rate=float(np.asarray(rate)))
        self._factor = 1.0 if self.at_once else self._factor_of(np.float32(total))

    def _update(
        self, i: int, step: int, old: list[Any], gradient: list[Any], squares: jax.Array
    ) -> list[Any]:
        block = self.blocks[i]
        if not self._counts:
            return old
        self.recorder.works_at("take in", step)
        jax.block_until_ready(gradient)
        self._arrived = time.perf_counter()
        if self.at_once:
            self._project(i, step, np.asarray(squares))
        for snapshot in self._snapshots:
            if not snapshot.done:
                self.recorder.works_at("wait for save", step)
                if not snapshot.before_write(i, lambda: self.closed):
                    raise RuntimeError("the trainer was closed during a save")
        self.recorder.works_at("update", step)
        block.update(gradient, self._factor, self._now, self.counted, self._adam)
        gradient.clear()
        old.clear()
        self.recorder.works_at("wait for uploads", step)
        return jax.block_until_ready(block.weights())

    def _project(self, i: int, step: int, squares: np.ndarray) -> None:
        """Sets the factor from a projected norm; updates the shares after a step's last block."""
        if not np.isfinite(squares):
            raise FloatingPointError(
                f"The gradient of {self.blocks[i].name} is not finite in step {step}, but this "
                "step has already updated other weights. Resume from the last checkpoint, with "
                'updates="after_backward", which skips such steps.'
            )
        self._squares[i] = np.float32(squares)
        total = sum(self._squares.values(), np.float32(0))
        share = sum((self.shares[j] for j in self._squares), np.float32(0))
        self._factor = self._factor_of(total / max(share, np.float32(1e-6)))
        if len(self._squares) == sum(block.trains for block in self.blocks) and total > 0:
            new = [self._squares.get(j, np.float32(0)) / total for j in range(len(self.blocks))]
            self.shares = _MEMORY * self.shares + (1 - _MEMORY) * np.array(new, np.float32)

    def _factor_of(self, squares: np.float32) -> float:
        """Returns the clipping factor for a global norm, given as a sum of squares."""
        norm, limit = float(np.sqrt(squares)), self._max_grad_norm
        return 1.0 if limit is None or norm < limit else limit / norm
