"""What a run leaves behind, and what it shows at its end.

    metrics.csv, validation.csv, events.out.tfevents.*   (`run_log.py`)
    settings.toml         the settings in full; the command takes it as a config file
    deepspeed.json        a copy of the DeepSpeed config, if there is one
    chat_template.jinja   a copy of the file of --chat-template, likewise
    loss.png              the curves of the loss and of the task's metrics; below them, for zenflow,
                          the length of its windows
    summary.json          the figures of the summary table
    checkpoints/          what the run can go on from (`checkpoints.py`)
    model.safetensors     the trained weights in float32; of a model that was read from a folder,
                          model/, such a folder

All of it lies in a folder that the run has to itself (`run_folder.py`), but for the file that
`--timeline` names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.console import Console
from rich.table import Table

import zenflow_jax
from train.meter import Row
from train.schedule import ScheduleRow
from train.settings import TRACE
from train.whole import replace_text


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of a run."""

    optimizer: str
    device: str
    devices: int  # of all processes
    processes: int
    parameters: int
    target: str  # what a loss is a mean over: token, byte, label
    steps: int
    skipped: int  # of them those whose gradient was not finite
    best_step: int | None  # with keep_best the step whose weights the model has; else None
    resumed_at: int  # 0 in one piece; otherwise rates and seconds are of the steps after this one
    tokens_per_s: float  # after the first step, which compiles
    bytes_per_parameter_and_step: float  # to the host and back, all processes together
    wait_share: float  # of `train_s`, 0 to 1; of process 0
    host_s: float  # in which the host update of process 0 worked, beside the device or not
    train_s: float  # after the first step, with the last update of the host
    total_s: float  # with reading the text, compilation and validation
    validation_before: dict[str, float]  # `loss` in nats per token or label, and the task's metrics
    validation_after: dict[str, float]
    # Of zenflow's schedule; None for adamw.
    windows: int | None  # with those of the warm-up, of one step each, and the last, cut short
    mean_window_length: float | None  # of these, in steps
    reselections: int | None  # the first selection included
    kept_share: float | None  # at the end; None also where select_interval is not "auto"


def write_summary(folder: Path, summary: Summary) -> None:
    """Writes `summary.json`, which is last of a run's files and so says that all are there."""
    replace_text(folder / "summary.json", json.dumps(asdict(summary), indent=2) + "\n")


def read_summary(folder: Path) -> Summary | None:
    """What `write_summary` wrote; None if it did not, or if that is damaged."""
    try:
        return Summary(**json.loads((folder / "summary.json").read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):  # no UTF-8 or JSON; other keys
        return None


def write_picture(
    folder: Path,
    rows: Sequence[tuple[Row, ScheduleRow]],
    validations: Sequence[tuple[int, Mapping[str, float]]],
    summary: Summary,
) -> None:
    """Writes `loss.png`: the loss over the steps, the summary beside it, the schedule below.

    Below are the task's own metrics, the length of the windows, with the intervals in which
    channels were selected, and the share of the score that is kept: each only where something is
    known of it.
    """
    steps = [row.step for row, _ in rows]
    schedule = [of_schedule for _, of_schedule in rows]
    loss = partial(_draw_loss, rows=rows, validations=validations, summary=summary)
    panels: list[tuple[float, Callable]] = [(3, loss)]
    if any(row.window_length is not None for row in schedule):
        panels.append((1.2, partial(_draw_windows, steps=steps, schedule=schedule)))
    # What is held by the channels that a run starts with, which nobody selected, is of no interest
    # and would set the scale.
    kept = [
        math.nan if not selections or row.kept_share is None else row.kept_share
        for row, selections in zip(schedule, _selections_before(schedule), strict=True)
    ]
    if not all(map(math.isnan, kept)):
        panels.append((1.2, partial(_draw_kept_share, steps=steps, kept=kept)))

    others = [n for n in summary.validation_after if n.rpartition("/")[2] != "loss"]
    if others:
        scores = partial(_draw_scores, validations=validations, names=others)
        panels.insert(1, (1.8, scores))

    heights = [height for height, _ in panels]
    # A Figure without pyplot draws with Agg: no display is needed and no global state is left.
    figure = Figure(figsize=(10, 1 + sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(panels), 2, width_ratios=(5, 3), height_ratios=heights)
    axes = None
    for place, (_, draw) in enumerate(panels):
        axes = figure.add_subplot(grid[place, 0], sharex=axes)
        draw(axes)
        axes.grid(alpha=0.3)
        axes.tick_params(labelbottom=place == len(panels) - 1)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels()
    _draw_table(figure.add_subplot(grid[:, 1]), summary)
    figure.savefig(folder / "loss.png", dpi=120)


def _draw_loss(
    axes: Axes,
    *,
    rows: Sequence[tuple[Row, ScheduleRow]],
    validations: Sequence[tuple[int, Mapping[str, float]]],
    summary: Summary,
) -> None:
    axes.set(
        title=f"{summary.optimizer}, {summary.parameters / 1e6:.1f} M parameters",
        ylabel=f"loss, nats per {summary.target}",
    )
    axes.plot([row.step for row, _ in rows], [row.loss for row, _ in rows], ".-", label="training")
    for name in [n for n in summary.validation_after if n.rpartition("/")[2] == "loss"]:
        losses = [figures[name] for _, figures in validations]
        # `loss`, or where there are several sets of data `matched/loss`.
        label = " ".join(["validation", *name.split("/")[:-1]])
        axes.plot([step for step, _ in validations], losses, "o-", label=label)
    axes.legend()


def _draw_scores(
    axes: Axes, *, validations: Sequence[tuple[int, Mapping[str, float]]], names: Sequence[str]
) -> None:
    """The task's own metrics: accuracy, F1, Matthews correlation."""
    for place, name in enumerate(names):
        values = [figures[name] for _, figures in validations]
        label = " ".join(name.split("/"))
        axes.plot(
            [step for step, _ in validations], values, "o-", color=f"C{4 + place}", label=label
        )
    axes.set_ylabel("validation")
    axes.legend(fontsize=8)


def _draw_windows(axes: Axes, *, steps: Sequence[int], schedule: Sequence[ScheduleRow]) -> None:
    lengths = [math.nan if row.window_length is None else row.window_length for row in schedule]
    # A row is about the steps before it, back to the row before or the start.
    axes.step([0, *steps], [lengths[0], *lengths], where="pre", color="C2")
    axes.set_ylabel("window,\nsteps")
    axes.set_ylim(0, 1.6 * max(row.window_length or 0 for row in schedule))  # room for the legend
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    before = _selections_before(schedule)
    anew = [s for s, row, b in zip(steps, schedule, before, strict=True) if row.reselections > b]
    height = axes.get_xaxis_transform()  # in shares of the panel's
    axes.plot(anew, [0.08] * len(anew), "|k", transform=height, label="channels selected")
    axes.legend(loc="upper right", fontsize=8, frameon=False)


def _draw_kept_share(axes: Axes, *, steps: Sequence[int], kept: Sequence[float]) -> None:
    axes.plot(steps, kept, ".-", color="C3")
    axes.set_ylabel("share of\nscore kept")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))


def _selections_before(schedule: Sequence[ScheduleRow]) -> list[int]:
    """How often channels had been selected before each interval."""
    return [0, *(row.reselections for row in schedule[:-1])]


def _draw_table(axes: Axes, summary: Summary) -> None:
    axes.axis("off")
    table = axes.table(
        [[name, value] for name, value in _figures(summary).items()],
        colWidths=[0.78, 0.22],
        cellLoc="left",
        loc="center",
    )
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    table.scale(1, 1.6)


def write_timeline(path: Path, timeline: zenflow_jax.Timeline, console: Console) -> None:
    """Writes what the last steps were made of, as a picture or a trace; no picture of no step.

    That it cannot be written is said, and no reason for a run to fail.
    """
    try:
        if path.suffix == TRACE:
            zenflow_jax.save_trace(timeline, path)
        elif timeline.steps:
            zenflow_jax.plot_timeline(timeline, path)
        else:
            return
        console.print(f"timeline of the last steps: {path}", highlight=False, soft_wrap=True)
    except OSError as error:
        console.print(
            f"expected to write the timeline to {path}, got: {error}", style="red", soft_wrap=True
        )


def summary_table(summary: Summary) -> Table:
    """The figures of a run as a table for the terminal."""
    table = Table("figure", "value", title=f"{summary.optimizer} on {_devices(summary)}")
    table.columns[1].justify = "right"
    for name, value in _figures(summary).items():
        table.add_row(name, value)
    return table


def _devices(summary: Summary) -> str:
    if summary.devices == 1:
        return summary.device
    several = f"{summary.devices} x {summary.device}"
    return f"{several}, {summary.processes} processes" if summary.processes > 1 else several


def _figures(summary: Summary) -> dict[str, str]:
    first = ", process 0" if summary.processes > 1 else ""
    of_schedule = {}
    if summary.windows is not None:
        of_schedule = {
            "windows": f"{summary.windows:,}",
            "mean window length, steps": f"{summary.mean_window_length:.2f}",
            "times that channels were selected": f"{summary.reselections:,}",
        }
    if summary.kept_share is not None:
        of_schedule["share of the best channels' score kept"] = f"{summary.kept_share:.1%}"
    return {
        "parameters": f"{summary.parameters:,}",
        "steps": f"{summary.steps:,}",
        **({"of them before this start": f"{summary.resumed_at:,}"} if summary.resumed_at else {}),
        "steps skipped, gradient not finite": f"{summary.skipped:,}",
        "tokens/s": f"{summary.tokens_per_s:,.0f}",
        "bytes moved per parameter and step": f"{summary.bytes_per_parameter_and_step:.2f}",
        f"share of time waiting for the host{first}": f"{summary.wait_share:.1%}",
        f"host seconds{first}": f"{summary.host_s:.1f}",
        **of_schedule,
        "training seconds": f"{summary.train_s:.1f}",
        "seconds in all": f"{summary.total_s:.1f}",
        **_validation("before", summary.validation_before),
        **_validation("after", summary.validation_after),
    }


def _validation(when: str, figures: Mapping[str, float]) -> dict[str, str]:
    return {f"validation {name} {when}": f"{value:.3f}" for name, value in figures.items()}
