"""Records when programs and copies end, on a thread that waits for their results."""

import queue
import threading
import time
import weakref
from typing import Any

import jax

from zenflow_jax._diagnostics.timeline import Recorder, Row


class Watch:
    """Adds spans to a recorder. It keeps no array alive, and misses those that are freed early."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="zenflow-watch", daemon=True).start()

    def add(self, row: Row, kind: str, step: int, result: Any) -> None:
        """Watches something that was dispatched just now: its last array is its end."""
        arrays = jax.tree.leaves(result)
        if arrays:
            self._events.put((row, kind, step, weakref.ref(arrays[-1]), time.perf_counter()))

    def close(self) -> None:
        self._events.put(None)

    def _run(self) -> None:
        ends: dict[Row, float] = {}
        while (event := self._events.get()) is not None:
            row, kind, step, known, dispatched = event
            array = known()
            if array is None:
                continue
            try:
                array.block_until_ready()
            except RuntimeError:  # donated, or failed: the caller's error says why
                continue
            finally:
                del array
            start = max(dispatched, ends.get(row, dispatched))
            ends[row] = self._recorder.add(row, kind, start, step)
