"""Records when programs and copies end, on a thread for each row of the timeline."""

import queue
import threading
import time
import weakref
from typing import Any

import jax

from zenflow_jax._diagnostics.timeline import Recorder, Row


class Watch:
    """Adds spans to a recorder. Does not keep arrays alive; misses arrays that are freed early."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._queues: dict[Row, queue.SimpleQueue[Any]] = {
            row: queue.SimpleQueue() for row in ("device", "mail", "upload")
        }
        for row, events in self._queues.items():
            threading.Thread(
                target=self._run, args=(row, events), name="zenflow-watch", daemon=True
            ).start()

    def add(self, row: Row, kind: str, step: int, result: Any) -> None:
        """Watches a program or copy that was just dispatched, which ends with its last array."""
        if arrays := jax.tree.leaves(result):
            event = kind, step, weakref.ref(arrays[-1]), time.perf_counter()
            self._queues[row].put(event)

    def close(self) -> None:
        for events in self._queues.values():
            events.put(None)

    def _run(self, row: Row, events: "queue.SimpleQueue[Any]") -> None:
        end = 0.0
        while (event := events.get()) is not None:
            kind, step, known, dispatched = event
            if (array := known()) is None:
                continue
            try:
                array.block_until_ready()
            except RuntimeError:  # donated or failed; the caller's error gives the reason
                continue
            finally:
                del array
            end = self._recorder.add(row, kind, max(dispatched, end), step)
