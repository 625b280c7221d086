"""Records what a run did when: a recorder while it goes on, and the timeline made of it.

`timeline_output.py` draws and writes the timeline.
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

#: Kinds whose number is a window's; the others have a step's.
OF_WINDOWS = frozenset(
    {"take in sums", "hand over", "update", "wait for uploads", "wait for save", "upload"}
)

_Method = TypeVar("_Method", bound=Callable[..., Any])

# About nine spans a step, so some 400 steps; 1 MB.
_CAPACITY = 4096


class Span(NamedTuple):
    """Something that took time.

    Attributes:
        row: Who did it: "device", "mail", "host", "upload" or "caller".
        kind: What it was; docs/timeline.md lists the kinds.
        start: When it began, in seconds of `time.perf_counter`.
        end: When it was over.
        number: The number of its step, or of its window.

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
    """The last spans of a run, as `HostEngine.timeline` gives them.

    docs/timeline.md says what each row and kind of span means, and how exact they are.

    Attributes:
        spans: All spans, by their start.

    Examples:
        >>> spans = [Span("device", "step", t - 1.0, t + 0.0, t) for t in (1, 2, 3)]
        >>> timeline = Timeline(tuple(spans))
        >>> timeline.bounds(timeline.steps[-2:])
        (1.0, 3.0)
    """

    spans: tuple[Span, ...]

    @property
    def steps(self) -> range:
        """The steps whose end is recorded. Slice them for the last few."""
        numbers = [span.number for span in self.spans if span.kind == "step"]
        return range(min(numbers), max(numbers) + 1) if numbers else range(0)

    def during(self, steps: range) -> "Timeline":
        """The spans that overlap the time of those steps, uncut.

        It ends where the next step begins, or after the last one where nothing goes on for long.
        """
        start, end = self.bounds(steps)
        return Timeline(tuple(s for s in self.spans if s.end >= start and s.start <= end))

    def bounds(self, steps: range) -> tuple[float, float]:
        """When those steps began and were over, in seconds of `time.perf_counter`.

        Raises:
            ValueError: If none of them is recorded.
        """
        device = [span for span in self.spans if span.row == "device"]
        asked = [span for span in device if span.number in steps]
        if not asked:
            held = f"{self.steps[0]} to {self.steps[-1]}" if self.steps else "none"
            raise ValueError(
                f"expected steps that are recorded ({held}), got {steps}. Take a part of "
                "`timeline.steps`."
            )
        start, end = min(span.start for span in asked), max(span.end for span in asked)
        later = [span.start for span in device if span.number > max(steps)]
        if later:
            return start, min(later)
        for span in self.spans:
            if span.start > end + 0.1 * (end - start):
                break
            end = max(end, span.end)
        return start, end


class Recorder:
    """Records spans, about a microsecond each; keeps the last `capacity`, and the sums of all.

    Each method but `timeline` and `seconds` belongs to one thread, so that nothing needs a lock:
    `append` and `copy` are single C calls, each sum is one thread's, all else is replaced whole.
    """

    def __init__(self, capacity: int = _CAPACITY):
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._seconds: dict[tuple[Row, str, int], float] = {}  # of each thread
        self._work: Span | None = None  # the worker's, not over; None while it waits for work
        self._arrived: dict[int, float] = {}  # when each mail arrived that is not taken in yet
        self._step_end = 0.0  # of the last step
        self._returned = time.perf_counter()
        self._waits: list[tuple[str, float, float]] = []  # in the call that is not over

    def add(
        self, row: Row, kind: str, start: float, number: int, end: float | None = None
    ) -> float:
        """Any thread's: adds a span that ends now, or at `end`, which is returned."""
        end = time.perf_counter() if end is None else end
        self._spans.append(Span(row, kind, start, end, number))
        key = row, kind, threading.get_ident()
        self._seconds[key] = self._seconds.get(key, 0.0) + end - start
        return end

    def called(self, kind: str, step: int, start: float) -> None:
        """The caller's: the call that began at `start` returns now."""
        self._returned = self.add("caller", kind, start, step)
        for wait, begin, end in self._waits:
            self.add("caller", wait, begin, step, end)
        self._waits.clear()

    def waited(self, start: float, device_done: float, end: float) -> None:
        """The caller's, inside a call: it waited for the device, then for the host."""
        self._waits.append(("wait for device", start, device_done))
        self._waits.append(("wait for host", device_done, end))

    def step_taken(self) -> tuple[float, float]:
        """The caller's: the engine gets a step, which was dispatched between the two times."""
        return self._returned, time.perf_counter()

    def step_ended(self, step: int, taken: tuple[float, float]) -> None:
        """The mail thread's: the step's scalars have arrived."""
        now, (returned, at) = time.perf_counter(), taken
        begin = max(self._step_end, returned)
        if at > begin:
            self.add("device", "dispatch", begin, step, at)
        self._step_end = self.add("device", "step", max(begin, at), step, now)

    def mail_arrived(self, step: int) -> None:
        """The mail thread's: the gradients have arrived too."""
        self._arrived[step] = self.add("mail", "copy", self._step_end, step)

    def works_at(self, kind: str | None, number: int = 0) -> None:
        """The worker's: what it does from now on; None while it waits for work."""
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
        """The worker's: what it does in the block, in the middle of something else."""
        before = self._work
        assert before is not None
        self.works_at(kind, before.number)
        try:
            yield
        finally:
            self.works_at(before.kind, before.number)

    def timeline(self) -> Timeline:
        """All that is recorded, and the worker's present work."""
        work, spans = self._work, list(self._spans.copy())
        # Unless it was recorded between the two reads.
        if work is not None and all((x.row, x.start) != ("host", work.start) for x in spans):
            spans.append(work._replace(end=time.perf_counter()))
        return Timeline(tuple(sorted(spans, key=lambda span: span.start)))

    def seconds(self) -> dict[str, Any]:
        """The fields of `EngineStats` that the recorder knows."""
        work, rows = self._work, {row: {} for row in ROWS}
        for (row, kind, _), s in self._seconds.copy().items():
            rows[row][kind] = rows[row].get(kind, 0.0) + s
        host, caller = rows["host"], rows["caller"]
        if work is not None:
            host[work.kind] = host.get(work.kind, 0.0) + time.perf_counter() - work.start
        rows["mail"].pop("unread", None)  # it is nobody's work
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
