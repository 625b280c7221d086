"""Draws a `Timeline`."""

import os
from typing import TYPE_CHECKING

from zenflow_jax._diagnostics.timeline import ROWS, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN = 12  # number of steps in a picture by default
# In the order of the legend. Pale colours mark spans without work: unknown, or waiting.
_COLOURS = {
    "step": "#3b75af",
    "dispatch": "#c3d7ea",
    "forward": "#7fb2dc",
    "loss": "#1f4e79",
    "backward": "#3b75af",
    "fetch": "#57a639",
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
    "calls": "#7f7f7f",
    "flush": "#505050",
    "state": "#b5a642",
    "wait for device": "#d9d9d9",
    "wait for host": "#d62728",
}
_LABELS = {"dispatch": "loop, or the step", "copy": "mail under way", "unread": "mail unread"}


def plot_timeline(
    timeline: Timeline, path: str | os.PathLike[str] | None = None, *, steps: range | None = None
) -> "Figure":
    """Draws some steps: device, mail, host, upload and caller on one time axis.

    Red marks the caller's waits for the host: they are stalls if the device's row is empty at that
    time. docs/timeline.md explains the rest.

    Args:
        timeline: A `HostEngine.timeline`.
        path: Path of a file to write as well; its suffix sets the format: .png, .svg or .pdf.
        steps: The steps to draw; None draws the last twelve.

    Returns:
        The figure, which matplotlib can show and save.

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
            "matplotlib is not installed. Install the extra `plot`, or read `timeline.spans`."
        ) from error

    # Does not use pyplot, which needs a display and leaves global state.
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    _draw(figure, timeline, timeline.steps[-_SHOWN:] if steps is None else steps)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _draw(figure: "Figure", timeline: Timeline, steps: range) -> None:
    start, end = timeline.bounds(steps)
    spans = timeline.during(steps).spans
    axes = figure.add_subplot()
    shown = [step for step in timeline.steps if step in steps]
    axes.set(
        title=f"steps {shown[0]} to {shown[-1]}" if len(shown) > 1 else f"step {shown[0]}",
        xlabel="ms",
        xlim=(0, 1e3 * (end - start)),
        ylim=(len(ROWS) - 0.5, -0.5),  # the first row on top
    )
    axes.set_yticks(range(len(ROWS)), ROWS)
    for kind, colour in _COLOURS.items():
        of_kind = [span for span in spans if span.kind == kind]
        if not of_kind:
            continue
        # Waits are drawn over their call, whose edges stay visible.
        height = 0.5 if kind in ("wait for device", "wait for host") else 0.72
        axes.broken_barh(
            [(1e3 * (span.start - start), 1e3 * (span.end - span.start)) for span in of_kind],
            (ROWS.index(of_kind[0].row) - height / 2, height),
            facecolors=colour,
            # The edge keeps the shortest spans visible and separates steps.
            edgecolors="white" if kind == "step" else colour,
            linewidth=0.6,
            label=_LABELS.get(kind, kind),
        )
    for span in spans:
        if span.kind == "step":
            axes.axvline(1e3 * (span.end - start), color="0.85", linewidth=0.6, zorder=0)
    figure.legend(loc="outside lower center", ncols=7, frameon=False, fontsize=9)
