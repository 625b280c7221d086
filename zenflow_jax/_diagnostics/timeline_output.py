"""A `Timeline` as a picture, and as a file for the trace viewers of browsers."""

import json
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from zenflow_jax._diagnostics.timeline import OF_WINDOWS, ROWS, Row, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: From this length on, the axis of a picture is in seconds: nobody reads "40000 ms".
_IN_SECONDS_S = 10.0
_SHOWN = 12  # steps that a picture shows unless told otherwise

_RED = "#d62728"
# In the order of the legend. Pale is what is not work: the unknown, and what lies waiting.
_COLOURS = {
    "step": "#3b75af",
    "dispatch": "#c3d7ea",
    "copy": "#2a9d8f",
    "unread": "#b9dfda",
    "take in": "#8d6cab",
    "take in sums": "#6b4a8c",
    "hand over": "#a0522d",
    "update": "#ef8a33",
    "wait for uploads": "#f6c9c9",
    "wait for save": "#d9d2e9",
    "upload": "#57a639",
    "exchange": "#7f7f7f",
    "flush": "#505050",
    "state": "#b5a642",
    "wait for device": "#d9d9d9",
    "wait for host": _RED,
}
_LABELS = {
    "step": "step (number)",
    "dispatch": "loop, or the step",
    "copy": "mail under way",
    "unread": "mail unread",
    "update": "update (window)",
}
_WAITS_IN_CALLS = ("wait for device", "wait for host")
# Spans narrower than this share of the picture have no room for their number.
_LEAST_NUMBERED = 0.012


def plot_timeline(
    timeline: Timeline, path: str | os.PathLike[str] | None = None, *, steps: range | None = None
) -> "Figure":
    """Draws some steps: device, mail, host, upload and caller on one time axis.

    Red is the caller that waits for the host. It is a stall if the device's row is blank meanwhile.
    docs/timeline.md explains the rest.

    Args:
        timeline: What `HostEngine.timeline` gave.
        path: A file to write as well, in the format that its suffix names: .png, .svg or .pdf.
        steps: The steps to draw; None draws the last twelve.

    Returns:
        The picture, which matplotlib shows and saves.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If none of the steps is recorded.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, zenflow_jax
        >>> params = jax.device_put({"w": jnp.ones((8, 4))}, jax.devices()[0])
        >>> tx = zenflow_jax.zenflow(1e-2, topk_ratio=0.25, update_interval=2)
        >>> opt_state = tx.init(params)
        >>> with zenflow_jax.HostEngine(params, opt_state) as engine:
        ...     for _ in range(4):
        ...         updates, opt_state = tx.update(params, opt_state, params)
        ...         params = optax.apply_updates(params, updates)
        ...         params, opt_state = engine.exchange(params, opt_state)
        ...     params, opt_state = engine.flush(params, opt_state)
        >>> timeline = engine.timeline
        >>> figure = zenflow_jax.plot_timeline(timeline, steps=timeline.steps[-2:])
        >>> figure.axes[0].get_title()
        'steps 3 to 4'
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "expected matplotlib, which draws the timeline, got none. Install it with `pip install "
            "matplotlib` (the extra `plot` of this library has it), or use "
            "`zenflow_jax.save_trace`, which needs nothing."
        ) from error

    steps = timeline.steps[-_SHOWN:] if steps is None else steps
    start, end = timeline.bounds(steps)
    timeline = timeline.during(steps)
    # Not by pyplot, which needs a display and leaves global state.
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    axes = figure.add_subplot()
    shown = [step for step in timeline.steps if step in steps]
    axes.set(
        title=f"steps {shown[0]} to {shown[-1]}" if len(shown) > 1 else f"step {shown[0]}",
        xlabel="ms",
        xlim=(0, 1e3 * (end - start)),
        ylim=(len(ROWS) - 0.5, -0.5),  # the first row on top
    )
    if end - start >= _IN_SECONDS_S:
        axes.set_xlabel("s")
        axes.xaxis.set_major_formatter(lambda ms, _: f"{ms / 1e3:g}")
    axes.set_yticks(range(len(ROWS)), ROWS)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for place, row in enumerate(ROWS):
        _draw_row(axes, place, [span for span in timeline.spans if span.row == row], start, end)
    for span in timeline.spans:
        if span.kind == "step":
            axes.axvline(1e3 * (span.end - start), color="0.85", linewidth=0.6, zorder=0)
    handles, kinds = axes.get_legend_handles_labels()
    found = dict(zip(kinds, handles, strict=True))
    ordered = [kind for kind in _COLOURS if kind in found]
    figure.legend(
        [found[kind] for kind in ordered],
        [_LABELS.get(kind, kind) for kind in ordered],
        loc="outside lower center",
        ncols=min(len(found), 7),
        frameon=False,
        fontsize=9,
    )
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def save_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Writes all of a timeline as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

    Args:
        timeline: What `HostEngine.timeline` gave, or a part of it: `timeline.during(steps)`.
        path: Path of the JSON file: name it .json.
    """
    begin = min((span.start for span in timeline.spans), default=0.0)
    events: list[dict[str, Any]] = [_name("process_name", "zenflow_jax", 0)]
    thread = 0
    for row in ROWS:
        for number, lane in enumerate(_lanes([s for s in timeline.spans if s.row == row])):
            thread += 1
            events.append(_name("thread_name", f"{row} {number + 1}" if number else row, thread))
            events.append(
                _metadata("thread_sort_index", thread, {"sort_index": thread}),
            )
            events.extend(_event(span, begin, thread) for span in lane)
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": events}, file)


def _draw_row(axes: "Axes", place: int, spans: Sequence[Span], start: float, end: float) -> None:
    lanes = _lanes(spans)
    for number, lane in enumerate(lanes):
        height = 0.72 / len(lanes)
        top = place - 0.36 + number * height
        for kind in dict.fromkeys(span.kind for span in lane):
            mine = [span for span in lane if span.kind == kind]
            # Waits are in front of their call, whose edges stay visible.
            inside = kind in _WAITS_IN_CALLS
            axes.broken_barh(
                [(1e3 * (s.start - start), 1e3 * (s.end - s.start)) for s in mine],
                (top + 0.15 * height, 0.7 * height) if inside else (top, height),
                facecolors=_COLOURS[kind],
                # The edge keeps the shortest spans visible, and steps apart.
                edgecolors="white" if kind == "step" else _COLOURS[kind],
                linewidth=0.6,
                label=kind,
                zorder=3 if inside else 2,
            )
        for span in lane:
            left, right = max(span.start, start), min(span.end, end)
            if span.kind in ("step", "update") and right - left > _LEAST_NUMBERED * (end - start):
                axes.text(
                    1e3 * ((left + right) / 2 - start),
                    top + height / 2,
                    str(span.number),
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=8,
                    zorder=4,
                )


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans by their start, in lanes; in a lane they follow or enclose each other."""
    lanes: list[tuple[list[Span], list[float]]] = [([], [])]
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        for lane in lanes:
            open_ends = lane[1]  # ends of the spans that it may be inside
            while open_ends and open_ends[-1] <= span.start:
                open_ends.pop()
            if not open_ends or span.end <= open_ends[-1]:
                break
        else:
            lane = ([], [])
            lanes.append(lane)
        lane[0].append(span)
        lane[1].append(span.end)
    return [spans for spans, _ in lanes]


def _event(span: Span, begin: float, thread: int) -> dict[str, Any]:
    # Whole nanoseconds, so that a span inside of another stays so when it is rounded.
    start, end = (round(1e9 * (moment - begin)) for moment in (span.start, span.end))
    return {
        "name": f"{span.kind} {span.number}",
        "cat": span.row,
        "ph": "X",
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "pid": 0,
        "tid": thread,
        "args": {"window" if span.kind in OF_WINDOWS else "step": span.number},
    }


def _name(kind: str, name: Row | str, thread: int) -> dict[str, Any]:
    return _metadata(kind, thread, {"name": name})


def _metadata(kind: str, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": thread, "args": args}
