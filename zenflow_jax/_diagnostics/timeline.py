"""Records what a run did when: a recorder while it goes on, and the timeline made of it.

`timeline_output.py` draws and writes the timeline.
"""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

Row = Literal["device", "mail", "host", "upload", "caller"]
#: The rows, in the order in which they are shown.
ROWS: tuple[Row, ...] = ("device", "mail", "host", "upload", "caller")

#: Kinds whose number is a window's; the others have a step's.
OF_WINDOWS = frozenset(
    {"take in sums", "hand over", "update", "wait for uploads", "wait for save", "upload"}
)

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


class _HostTime(NamedTuple):
    """What the worker does, and how long it did each thing before; never changed."""

    kind: str | None  # None: it waits for work
    number: int
    start: float
    spent: dict[str, float]  # seconds by kind


class Recorder:
    """Records spans, about a microsecond each; keeps the last `capacity`.

    Each method but the two readers belongs to one thread, so that nothing needs a lock: `append`
    and `copy` of a deque are single C calls, and everything else is replaced as a whole. Any thread
    may call `timeline` and `seconds`, and so may a signal handler.
    """

    def __init__(self, capacity: int = _CAPACITY):
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._host = _HostTime(None, 0, 0.0, {})
        self._arrived: dict[int, float] = {}  # when each mail arrived that is not taken in yet
        self._step_end = 0.0  # of the last step
        self._returned = time.perf_counter()
        self._waits: list[tuple[str, float, float]] = []  # in the call that is not over
        self._mail_s = self._sums_s = self._upload_s = self._exchange_s = self._wait_s = 0.0

    def called(self, kind: str, step: int, start: float) -> None:
        """The caller's: the call that began at `start` returns now."""
        now = self._returned = time.perf_counter()
        self._spans.append(Span("caller", kind, start, now, step))
        if self._waits:
            self._spans.extend([Span("caller", *wait, step) for wait in self._waits])
            self._waits.clear()
        if kind != "state":
            self._exchange_s += now - start

    def waited(self, start: float, device_done: float, end: float) -> None:
        """The caller's, inside a call: it waited for the device, then for the host."""
        self._waits.append(("wait for device", start, device_done))
        self._waits.append(("wait for host", device_done, end))
        self._wait_s += end - device_done

    def step_taken(self) -> tuple[float, float]:
        """The caller's: the engine gets a step, which was dispatched between the two times."""
        return self._returned, time.perf_counter()

    def step_ended(self, step: int, taken: tuple[float, float]) -> None:
        """The mail thread's: the step's scalars have arrived."""
        now, (returned, at) = time.perf_counter(), taken
        begin = max(self._step_end, returned)
        if at > begin:
            self._spans.append(Span("device", "dispatch", begin, at, step))
        self._spans.append(Span("device", "step", max(begin, at), now, step))
        self._step_end = now

    def mail_arrived(self, step: int) -> None:
        """The mail thread's: the gradients have arrived too."""
        now = time.perf_counter()
        self._spans.append(Span("mail", "copy", self._step_end, now, step))
        self._mail_s += now - self._step_end
        self._arrived[step] = now

    def sums_arrived(self, step: int, start: float) -> None:
        """The sums thread's: the sums of the window have arrived that `step` ended at `start`."""
        now = time.perf_counter()
        self._spans.append(Span("mail", "copy", start, now, step))
        self._sums_s += now - start

    def works_at(self, kind: str | None, number: int = 0) -> None:
        """The worker's: what it does from now on; None while it waits for work."""
        last = self._host
        if (last.kind, last.number) == (kind, number):
            return
        now, spent = time.perf_counter(), last.spent
        if last.kind is not None:
            self._spans.append(Span("host", last.kind, last.start, now, last.number))
            spent = spent | {last.kind: spent.get(last.kind, 0.0) + now - last.start}
        self._host = _HostTime(kind, number, now, spent)
        arrived = self._arrived.pop(number, None) if kind == "take in" else None
        if arrived is not None:
            self._spans.append(Span("mail", "unread", arrived, now, number))

    @contextlib.contextmanager
    def meanwhile(self, kind: str) -> Iterator[None]:
        """The worker's: what it does in the block, in the middle of something else."""
        before = self._host
        self.works_at(kind, before.number)
        try:
            yield
        finally:
            self.works_at(before.kind, before.number)

    def uploaded(self, window: int, start: float) -> None:
        """The worker's: an update's uploads have all arrived; the first one began at `start`."""
        now = time.perf_counter()
        self._spans.append(Span("upload", "upload", start, now, window))
        self._upload_s += now - start

    def timeline(self) -> Timeline:
        """All that is recorded, and what the worker does now."""
        host, spans = self._host, list(self._spans.copy())
        # Unless it was recorded between the two reads.
        if host.kind is not None and all(
            (span.row, span.start) != ("host", host.start) for span in spans
        ):
            end = time.perf_counter()
            spans.append(Span("host", host.kind, host.start, end, host.number))
        return Timeline(tuple(sorted(spans, key=lambda span: span.start)))

    def seconds(self) -> dict[str, Any]:
        """The fields of `EngineStats` that the recorder knows."""
        kind, _, start, spent = self._host
        if kind is not None:
            spent = spent | {kind: spent.get(kind, 0.0) + time.perf_counter() - start}
        others = {"copy": self._mail_s + self._sums_s, "upload": self._upload_s}
        return {
            "exchange_s": self._exchange_s,
            "wait_s": self._wait_s,
            "work_s": sum(spent.values(), 0.0) - spent.get("wait for save", 0.0),
            "seconds": {**spent, **{kind: s for kind, s in others.items() if s}},
        }
