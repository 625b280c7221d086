"""Records a run's activities over time: the recorder, and the timeline made from it.

`timeline_plot.py` draws the timeline.
"""

import contextlib
import dataclasses
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

Row = Literal["device", "mail", "host", "upload", "caller"]
#: The rows, in the order in which they are shown.
ROWS: tuple[Row, ...] = ("device", "mail", "host", "upload", "caller")

_Method = TypeVar("_Method", bound=Callable[..., Any])

# Enough for about 400 steps, at nine spans per step; 1 MB.
_CAPACITY = 4096


class Span(NamedTuple):
    """A recorded interval of time.

    Attributes:
        row: The actor: "device", "mail", "host", "upload" or "caller".
        kind: The activity; docs/timeline.md lists the kinds.
        start: Start time, in seconds of `time.perf_counter`.
        end: End time.
        number: The window's number for "take in sums", "hand over", "update", "upload" and the
            worker's waits; the step's number for all other kinds.

    Examples:
        >>> span = Span("host", "update", start=1.0, end=1.25, number=3)
        >>> span.end - span.start
        0.25
    """

    row: Row
    kind: str
    start: float
    end: float
    number: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The last spans of a run, from `HostEngine.timeline`.

    docs/timeline.md explains each row and kind of span, and their accuracy.

    Attributes:
        spans: All spans, ordered by start.

    Examples:
        >>> spans = [Span("device", "step", t - 1.0, t + 0.0, t) for t in (1, 2, 3)]
        >>> timeline = Timeline(tuple(spans))
        >>> timeline.bounds(timeline.steps[-2:])
        (1.0, 3.0)
    """

    spans: tuple[Span, ...]

    @property
    def steps(self) -> range:
        """Returns the steps whose end is recorded. Slice this range to get the last few steps."""
        numbers = {
            span.number for span in self.spans if span.row == "device" and span.kind != "dispatch"
        }
        return range(min(numbers), max(numbers) + 1) if numbers else range(0)

    def during(self, steps: range) -> "Timeline":
        """Returns the spans that overlap the time of these steps, uncut.

        This time ends when the next step starts or, after the last step, at a long idle gap.
        """
        start, end = self.bounds(steps)
        return Timeline(tuple(s for s in self.spans if s.end >= start and s.start <= end))

    def bounds(self, steps: range) -> tuple[float, float]:
        """Returns the start and end of these steps, in seconds of `time.perf_counter`.

        Raises:
            ValueError: If none of these steps is recorded.
        """
        device = [span for span in self.spans if span.row == "device"]
        chosen = [span for span in device if span.number in steps]
        if not chosen:
            recorded = f"{self.steps[0]} to {self.steps[-1]}" if self.steps else "none"
            raise ValueError(
                f"No step in {steps} is recorded (recorded: {recorded}). Pass a part of "
                "`timeline.steps`."
            )
        start, end = min(span.start for span in chosen), max(span.end for span in chosen)
        later = [span.start for span in device if span.number > max(steps)]
        if later:
            return start, min(later)
        for span in self.spans:
            if span.start > end + 0.1 * (end - start):
                break
            end = max(end, span.end)
        return start, end


class Recorder:
    """Records spans, in about a microsecond each; keeps the last `capacity` spans and all sums.

    No lock is needed, because each method except `timeline` and `seconds` belongs to one thread:
    `append` and `copy` are single C calls, each sum belongs to one thread, and all other data is
    replaced whole.
    """

    def __init__(self, capacity: int = _CAPACITY):
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._seconds: dict[tuple[Row, str, int], float] = {}  # by thread
        self._work: Span | None = None  # the worker's open span; None while it waits for work
        self._arrived: dict[int, float] = {}  # arrival times of mail not yet taken in
        self._step_end = 0.0  # when the last step ended
        self._returned = time.perf_counter()
        self._waits: list[tuple[str, float, float]] = []  # in the current call

    def add(
        self, row: Row, kind: str, start: float, number: int, end: float | None = None
    ) -> float:
        """Adds a span that ends now or at `end`, and returns this time. For any thread."""
        end = time.perf_counter() if end is None else end
        self._spans.append(Span(row, kind, start, end, number))
        key = row, kind, threading.get_ident()
        self._seconds[key] = self._seconds.get(key, 0.0) + end - start
        return end

    def called(self, kind: str, step: int, start: float) -> None:
        """Records that the call that began at `start` returns now. For the caller."""
        self._returned = self.add("caller", kind, start, step)
        for wait, begin, end in self._waits:
            self.add("caller", wait, begin, step, end)
        self._waits.clear()

    def waited(self, start: float, device_done: float, end: float) -> None:
        """Records a wait for the device, then for the host. For the caller, inside a call."""
        self._waits.append(("wait for device", start, device_done))
        self._waits.append(("wait for host", device_done, end))

    def step_taken(self) -> tuple[float, float]:
        """Returns two times between which the engine's new step was dispatched. For the caller."""
        return self._returned, time.perf_counter()

    def step_ended(self, step: int, taken: tuple[float, float]) -> None:
        """Records that the step's scalars have arrived. For the mail thread."""
        now, (returned, at) = time.perf_counter(), taken
        begin = max(self._step_end, returned)
        if at > begin:
            self.add("device", "dispatch", begin, step, at)
        self._step_end = self.add("device", "step", max(begin, at), step, now)

    def mail_arrived(self, step: int) -> None:
        """Records that the gradients have also arrived. For the mail thread."""
        self._arrived[step] = self.add("mail", "copy", self._step_end, step)

    def works_at(self, kind: str | None, number: int = 0) -> None:
        """Starts a span of work; `kind` is None while waiting for work. For the worker."""
        last, now = self._work, time.perf_counter()
        if last is not None:
            if (last.kind, last.number) == (kind, number):
                return
            self.add("host", last.kind, last.start, last.number, now)
        self._work = None if kind is None else Span("host", kind, now, now, number)
        arrived = self._arrived.pop(number, None) if kind == "take in" else None
        if arrived is not None:
            self.add("mail", "unread", arrived, number, now)

    @contextlib.contextmanager
    def meanwhile(self, kind: str) -> Iterator[None]:
        """Records the block as an interruption of the current work. For the worker."""
        before = self._work
        assert before is not None
        self.works_at(kind, before.number)
        try:
            yield
        finally:
            self.works_at(before.kind, before.number)

    def timeline(self) -> Timeline:
        """Returns all recorded spans, and the worker's current work."""
        work, spans = self._work, list(self._spans.copy())
        # Skipped if it was recorded between the two reads.
        if work is not None and all((x.row, x.start) != ("host", work.start) for x in spans):
            spans.append(work._replace(end=time.perf_counter()))
        return Timeline(tuple(sorted(spans, key=lambda span: span.start)))

    def seconds(self) -> dict[str, Any]:
        """Returns the recorder's fields of `EngineStats`."""
        work, rows = self._work, {row: {} for row in ROWS}
        for (row, kind, _), s in self._seconds.copy().items():
            rows[row][kind] = rows[row].get(kind, 0.0) + s
        host, caller = rows["host"], rows["caller"]
        if work is not None:
            host[work.kind] = host.get(work.kind, 0.0) + time.perf_counter() - work.start
        rows["mail"].pop("unread", None)  # waiting is not work
        return {
            "exchange_s": caller.get("exchange", 0.0) + caller.get("flush", 0.0),
            "wait_s": caller.get("wait for host", 0.0),
            "work_s": sum(host.values(), 0.0) - host.get("wait for save", 0.0),
            "seconds": host | rows["mail"] | rows["upload"],
        }


def recorded(kind: str) -> Callable[[_Method], _Method]:
    """Records the calls of a method of `HostEngine` in its timeline."""

    def around(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **more: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(self, *args, **more)
            finally:
                self._worker.recorder.called(kind, self._progress.step, start)

        return call

    return around
