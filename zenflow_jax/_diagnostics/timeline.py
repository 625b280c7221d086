"""Records a run's activities over time; `timeline_plot.py` draws them."""

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Span(NamedTuple):
    """An activity; docs/timeline.md lists all rows and kinds."""

    row: str  # the actor
    kind: str
    step: int  # for work on a window, the step that closed it
    start: float  # in seconds of `time.perf_counter`
    end: float


class Recorder:
    """Keeps the last spans, and the seconds of all spans by kind.

    No lock is needed: each kind has one thread, and `append` and `copy` are single C calls.
    """

    def __init__(self):
        # About 400 steps, at nine spans per step; 1 MB.
        self._spans: deque[Span] = deque(maxlen=4096)
        self.seconds: dict[str, float] = {}
        self._work: tuple[str | None, int, float] = None, 0, 0.0  # the worker's open span
        self._step, self._step_end, self.returned = 0, 0.0, time.perf_counter()

    def add(self, row: str, kind: str, step: int, start: float, end: float | None = None) -> float:
        """Adds a span that ends now or at `end`, and returns this time."""
        end = time.perf_counter() if end is None else end
        self._spans.append(Span(row, kind, step, start, end))
        self.seconds[kind] = self.seconds.get(kind, 0.0) + end - start
        return end

    def works_at(self, kind: str | None, step: int = 0) -> tuple[str | None, int]:
        """Ends the worker's span, returns its kind and step, and starts another unless None."""
        (last, of, start), now = self._work, time.perf_counter()
        if (last, of) != (kind, step):  # not an update's next piece
            self._work = kind, step, now
            if last is not None:
                self.add("host", last, of, start, now)
        return last, of

    def waited(self, start: float, device_done: float, end: float) -> None:
        """Records the caller's wait for the device, and then for the host."""
        self.add("caller", "wait for device", self._step, start, device_done)
        self.add("caller", "wait for host", self._step, device_done, end)

    def dispatched(self, step: int) -> tuple[float, float]:
        """Returns two times between which the loop has dispatched this step."""
        self._step = step
        return self.returned, time.perf_counter()

    def step_ended(self, step: int, dispatched: tuple[float, float]) -> float:
        """Records that the step's scalars have arrived, and returns this time."""
        begin, at = max(self._step_end, dispatched[0]), dispatched[1]
        if at > begin:
            begin = self.add("device", "dispatch", step, begin, at)
        self._step_end = self.add("device", "step", step, begin)
        return self._step_end

    def timeline(self) -> list[Span]:
        return sorted(self._spans.copy(), key=lambda span: span.start)


def recorded(kind: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Records the calls of a method of `HostEngine`."""

    def around(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def call(*args: P.args, **more: P.kwargs) -> T:
            engine: Any = args[0]
            start, recorder = time.perf_counter(), engine._worker.recorder
            try:
                return method(*args, **more)
            finally:
                recorder.returned = recorder.add("caller", kind, engine._progress.step, start)

        return call

    return around
