"""Records a run's activities over time, and draws them."""

import functools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# From top to bottom. Later kinds are drawn over earlier ones; pale ones do not work.
_COLOURS = {
    "device": {"step": "#3b75af", "dispatch": "#c3d7ea"},
    "mail": {"copy": "#2a9d8f", "unread": "#b9dfda"},
    "host": {
        "take in": "#8d6cab",
        "hand over": "#a0522d",
        "update": "#ef8a33",
        "wait for uploads": "#f6c9c9",
        "wait for save": "#d9d2e9",
    },
    "upload": {"upload": "#57a639"},
    "caller": {
        "exchange": "#7f7f7f",
        "flush": "#505050",
        "state": "#b5a642",
        "wait for device": "#d9d9d9",
        "wait for host": "#d62728",
    },
}


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
                recorder.returned = recorder.add("caller", kind, engine._progress.run.step, start)

        return call

    return around


def plot_timeline(
    timeline: Sequence[Span], path: str | os.PathLike[str] | None = None, *, steps: int = 12
) -> Any:
    """Draws the last steps: device, mail, host, upload and caller on one time axis.

    Red marks the caller's waits for the host: they are stalls if the device's row is empty at that
    time. docs/timeline.md explains the rest. This needs matplotlib (the extra `plot`).

    Args:
        timeline: A `HostEngine.timeline`, or a part of it with at least one step.
        path: Path of a file to write as well; its suffix sets the format: .png, .svg or .pdf.
        steps: The number of steps to draw.

    Returns:
        The matplotlib figure.

    Examples:
        >>> spans = [Span("device", "step", t, t - 1.0, t + 0.0) for t in (1, 2, 3)]
        >>> plot_timeline(spans, steps=2).axes[0].get_title()
        'steps 2 to 3'
    """
    from matplotlib.figure import Figure  # not pyplot, which needs a display and global state

    last = [span for span in timeline if span.kind == "step"][-steps:]
    if not last:
        raise ValueError("The timeline has no step. Call `exchange` before you draw it.")
    start = last[0].start
    shown = [span for span in timeline if span.end > start and span.start <= last[-1].end]
    end = max(span.end for span in shown)
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for place, (row, colours) in enumerate(_COLOURS.items()):
        for kind, colour in colours.items():
            spans = [span for span in shown if (span.row, span.kind) == (row, kind)]
            # Waits are drawn inside their call, whose edges stay visible.
            height = 0.5 if row == "caller" and kind.startswith("wait") else 0.72
            axes.broken_barh(
                [(1e3 * (x.start - start), 1e3 * (x.end - x.start)) for x in spans],
                (place - height / 2, height),
                facecolors=colour,
                # The edge keeps the shortest spans visible and separates steps.
                edgecolors="white" if kind == "step" else colour,
                linewidth=0.6,
                label=kind if spans else None,
            )
    for span in last:
        axes.axvline(1e3 * (span.end - start), color="0.85", linewidth=0.6, zorder=0)
    axes.set(title=f"steps {last[0].step} to {last[-1].step}", xlabel="ms")
    axes.set_xlim(0, 1e3 * (end - start))
    axes.set_yticks(range(len(_COLOURS)), _COLOURS)
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=7, frameon=False, fontsize=9)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
