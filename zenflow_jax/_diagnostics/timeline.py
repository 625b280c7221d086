"""What a run did when: notes taken while it goes on, and the record that is made of them.

How the record is drawn and written is in `timeline_output.py`.
"""

import dataclasses
import time
from collections import deque
from typing import Literal, NamedTuple

Row = Literal["device", "mail", "host", "upload", "caller"]
#: In the order in which they are shown.
ROWS: tuple[Row, ...] = ("device", "mail", "host", "upload", "caller")

#: Kinds whose number is a window's; the others have a step's.
OF_WINDOWS = frozenset({"take in sums", "hand over", "update", "wait for uploads", "upload"})

# About nine spans a step, so some 400 steps; 1 MB.
_CAPACITY = 4096


class Span(NamedTuple):
    """Something that took time.

    Attributes:
        row: Who did it: "device", "mail", "host", "upload" or "caller".
        kind: What it was; `Timeline` lists the kinds.
        start: When it began, in seconds of `time.perf_counter`.
        end: When it was over.
        number: Of the step, or of the window, that it was for.
    """

    row: Row
    kind: str
    start: float
    end: float
    number: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The last spans of a run, as `HostEngine.timeline` gives them.

    Rows and kinds of spans:

    * "device": "step" is from the end of the step before, or from when the engine was given the
      step if that was later, until the step's scalars were in host memory on all devices of this
      process. What `exchange` dispatched in between, such as the merge of an update, counts to the
      next step. "dispatch" comes before it where the device had nothing more to do: from the end of
      the step before, or from the return of the call before, until the engine was given the step.
      The loop prepares and dispatches the step in there, and the device begins with it at some
      moment in there that the host does not get to know.
    * "mail": "copy" is what was left of the transfer when the step was over, next to nothing where
      gradients leave during the step, or of the sums of a window, where the device adds them up,
      when its last step was over; "unread" is mail that waits for the worker.
    * "host": "take in" (of one step's mail), "take in sums" (of a window), "hand over", "update",
      and "wait for uploads" at its end. Pieces of an update that follow each other are one span.
    * "upload": "upload", from an update's first upload until the whole of it was on the devices.
    * "caller": "exchange" and "flush" are the calls, "state" is also `peek` and
      `master_params`; inside them "wait for device", for a step that the call cannot do without,
      and "wait for host", for what is left when that is done. If the device has no later step to do
      meanwhile, that is a stall.

    Ends are seen by a thread that has been waiting, so up to some 0.1 ms late; with a copy of mail
    that takes longer than a step, steps seem to end when the copy before theirs does.

    Attributes:
        spans: By their start.
    """

    spans: tuple[Span, ...]

    @property
    def steps(self) -> range:
        """The steps whose end is recorded; `timeline.steps[-8:]` are the last eight."""
        numbers = [span.number for span in self.spans if span.kind == "step"]
        return range(min(numbers), max(numbers) + 1) if numbers else range(0)

    def during(self, steps: range) -> "Timeline":
        """The spans, whole, that lie at least in part in the time of those steps.

        That time ends where the next step begins. If there is none, it ends where nothing goes on
        for a tenth of it, so that a flush long after the last step is not part of it.
        """
        start, end = self.bounds(steps)
        return Timeline(tuple(s for s in self.spans if s.end >= start and s.start <= end))

    def bounds(self, steps: range) -> tuple[float, float]:
        """When those steps began and were over, in seconds of `time.perf_counter`.

        Raises:
            ValueError: If none of them is recorded.
        """
        device = [span for span in self.spans if span.row == "device"]
        mine = [span for span in device if span.number in steps]
        if not mine:
            held = f"{self.steps[0]} to {self.steps[-1]}" if self.steps else "no step at all"
            raise ValueError(
                f"expected steps that are recorded ({held}), got {steps}. Only the last few "
                "hundred are kept, and none is there before the first `exchange`: take a part of "
                "`timeline.steps`."
            )
        start, end = min(span.start for span in mine), max(span.end for span in mine)
        later = [span.start for span in device if span.number > max(steps)]
        if later:
            return start, min(later)
        for span in self.spans:
            if span.start > end + 0.1 * (end - start):
                break
            end = max(end, span.end)
        return start, end


class _HostTime(NamedTuple):
    """What the worker is at, and how long it was at each thing before; never changed."""

    kind: str | None  # None: it waits for work
    number: int
    start: float
    spent: dict[str, float]  # seconds by kind


class Recorder:
    """Takes notes, about a microsecond each; the last ones are kept.

    Each method but the two readers belongs to one thread, so that nothing needs a lock: `append`
    and `copy` of a deque are single C calls, everything else that is read is replaced as a whole.
    `timeline` and `seconds` may be called from anywhere, a signal handler included.

    Args:
        capacity: Spans that are kept.
    """

    def __init__(self, capacity: int = _CAPACITY):
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._host = _HostTime(None, 0, 0.0, {})
        self._arrived: dict[int, float] = {}  # of mail that is not taken in yet
        self._step_end = 0.0  # of the last one
        self._returned = time.perf_counter()
        self._waits: list[tuple[str, float, float]] = []  # of the call that is not over
        self._mail_s = self._sums_s = self._upload_s = self._exchange_s = 0.0

    def called(self, kind: str, step: int, start: float) -> None:
        """The caller's: a call that began at `start` returns now."""
        now = self._returned = time.perf_counter()
        self._spans.append(Span("caller", kind, start, now, step))
        if self._waits:
            self._spans.extend([Span("caller", *wait, step) for wait in self._waits])
            self._waits.clear()
        if kind != "state":
            self._exchange_s += now - start

    def waited(self, start: float, device_done: float, end: float) -> None:
        """The caller's, in a call: it waited for the device, then for the host."""
        self._waits.append(("wait for device", start, device_done))
        self._waits.append(("wait for host", device_done, end))

    def given(self) -> tuple[float, float]:
        """The caller's: the engine gets a step. For `step_ended`: since when it can run, and now.

        No step can be dispatched before the call that it has its state from has returned.
        """
        return self._returned, time.perf_counter()

    def step_ended(self, step: int, given: tuple[float, float]) -> None:
        """The mail's: the step's scalars have arrived."""
        now, (returned, at) = time.perf_counter(), given
        begin = max(self._step_end, returned)
        if at > begin:
            self._spans.append(Span("device", "dispatch", begin, at, step))
        self._spans.append(Span("device", "step", max(begin, at), now, step))
        self._step_end = now

    def mail_arrived(self, step: int) -> None:
        """The mail's: the gradients have arrived too."""
        now = time.perf_counter()
        self._spans.append(Span("mail", "copy", self._step_end, now, step))
        self._mail_s += now - self._step_end
        self._arrived[step] = now

    def sums_arrived(self, step: int, start: float) -> None:
        """That of the sums: so have those of the window which that step closed at `start`."""
        now = time.perf_counter()
        self._spans.append(Span("mail", "copy", start, now, step))
        self._sums_s += now - start

    def works_at(self, kind: str | None, number: int = 0) -> None:
        """The worker's: what it is at from now on; None is waiting for work."""
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

    def uploaded(self, window: int, start: float) -> None:
        """The worker's: all uploads have arrived, the first of which was begun at `start`."""
        now = time.perf_counter()
        self._spans.append(Span("upload", "upload", start, now, window))
        self._upload_s += now - start

    def timeline(self) -> Timeline:
        """What is recorded, with what the worker is at."""
        host, spans = self._host, list(self._spans.copy())
        # It may have been recorded between the two.
        if host.kind is not None and all(
            (span.row, span.start) != ("host", host.start) for span in spans
        ):
            end = time.perf_counter()
            spans.append(Span("host", host.kind, host.start, end, host.number))
        return Timeline(tuple(sorted(spans, key=lambda span: span.start)))

    def seconds(self) -> dict[str, float]:
        """The fields of `EngineStats` that are known here."""
        kind, _, start, spent = self._host
        if kind is not None:
            spent = spent | {kind: spent.get(kind, 0.0) + time.perf_counter() - start}
        return {
            "exchange_s": self._exchange_s,
            "work_s": sum(spent.values(), 0.0),
            "sum_s": spent.get("take in", 0.0) + spent.get("take in sums", 0.0),
            "hand_over_s": spent.get("hand over", 0.0),
            "update_s": spent.get("update", 0.0),
            "upload_s": self._upload_s,
            "mail_s": self._mail_s + self._sums_s,
        }
