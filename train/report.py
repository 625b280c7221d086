"""The results of a run, in its folder and on the screen.

settings.toml         all settings, as a config file, with copies of the files that it names
                      (deepspeed.json, chat_template.jinja)
metrics.csv, validation.csv, events.out.tfevents.*   (`run_log.py`)
loss.png              curves of the loss and of the task's metrics
summary.json          figures of the summary table
checkpoints/          what the run can go on from (`checkpoints.py`)
model.safetensors     trained weights in float32; or model/, a folder like the one that was read
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

import zenflow_jax
from train.command_line import TRACE
from train.meter import Row
from train.whole import replace_text
from zenflow_jax import planning

# Steps that a start must have made for its timings to be worth advice.
LEAST_STEPS = 100

Validations = Sequence[tuple[int, Mapping[str, float]]]


class Machine(NamedTuple):
    """What a run has used."""

    device: str
    devices: int  # of all processes
    processes: int


class Costs(NamedTuple):
    """What the steps of a run have taken of time and of the bus."""

    tokens_per_s: float  # after the first step, which compiles
    bytes_per_parameter_and_step: float  # to the host and back, all processes together
    wait_share: float  # of `train_s`, 0 to 1; of process 0
    host_s: float  # that the host update of process 0 worked, hidden or not
    train_s: float  # after the first step, with the last update of the host
    total_s: float  # with reading the text, compilation and validation


class Schedule(NamedTuple):
    """How zenflow's schedule went; None for adamw."""

    windows: int | None = None  # with the warm-up's, of one step each, and the last, cut short
    mean_window_length: float | None = None  # of these, in steps
    reselections: int | None = None  # the first selection included
    kept_share: float | None = None  # at the end; None also where select_interval is not "auto"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of a run; in `summary.json` those of the named tuples stand among the others."""

    optimizer: str
    machine: Machine
    parameters: int
    target: str  # what a loss is a mean over: token, byte, label
    steps: int
    skipped: int  # steps whose gradient was not finite
    best_step: int | None  # with keep_best the step whose weights the model has; else None
    resumed_at: int  # 0 in one piece; otherwise rates and seconds are of the steps after this one
    costs: Costs
    validation_before: dict[str, float]  # `loss` in nats per token or label, and the task's metrics
    validation_after: dict[str, float]
    schedule: Schedule


_GROUPS = {"machine": Machine, "costs": Costs, "schedule": Schedule}


def write_summary(folder: Path, summary: Summary) -> None:
    """Writes `summary.json`, the last of a run's files: it says that all of them are written."""
    figures: dict[str, Any] = {}
    for name, value in vars(summary).items():
        figures |= value._asdict() if name in _GROUPS else {name: value}
    replace_text(folder / "summary.json", json.dumps(figures, indent=2) + "\n")


def read_summary(folder: Path) -> Summary | None:
    """Reads `summary.json`; None if there is none, or if it is damaged."""
    try:
        figures = dict(json.loads((folder / "summary.json").read_text(encoding="utf-8")))
        groups = {
            name: group(*(figures.pop(field) for field in group._fields))
            for name, group in _GROUPS.items()
        }
        return Summary(**figures, **groups)
    except (FileNotFoundError, ValueError, TypeError, KeyError):  # no UTF-8 or JSON; other keys
        return None


def write_picture(
    folder: Path, rows: Sequence[Row], validations: Validations, summary: Summary
) -> None:
    """Writes `loss.png`: the loss over the steps, below it the task's metrics."""
    # With several sets of data `matched/loss`.
    panel_of = {name: int(not name.endswith("loss")) for name in summary.validation_after}
    count = 1 + max(panel_of.values())
    # A Figure without pyplot needs no display and leaves no global state.
    figure = Figure(figsize=(8, 2.5 + 1.5 * count), layout="constrained")
    panels = figure.subplots(count, sharex=True, squeeze=False, height_ratios=[2, 1][:count])[:, 0]
    panels[0].plot([row.step for row in rows], [row.loss for row in rows], ".-", label="training")
    for name, panel in panel_of.items():
        values = [figures[name] for _, figures in validations]
        label = f"validation {name}".replace("/", " ")
        panels[panel].plot([step for step, _ in validations], values, "o-", label=label)
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    parameters = f"{summary.parameters / 1e6:.1f} M parameters"
    panels[0].set(
        title=f"{summary.optimizer}, {parameters}", ylabel=f"loss, nats per {summary.target}"
    )
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(folder / "loss.png", dpi=120)


def write_timeline(path: Path, timeline: zenflow_jax.Timeline, console: Console) -> None:
    """Writes the last steps as a picture or a trace; an error is said, and does not end the run."""
    write = zenflow_jax.save_trace if path.suffix == TRACE else zenflow_jax.plot_timeline
    if timeline.steps:
        try:
            write(timeline, path)
            line = f"timeline of the last steps: {path}"
        except OSError as error:
            line = f"expected to write the timeline to {path}, got: {error}"
        console.print(line, highlight=False, soft_wrap=True)


def summary_table(summary: Summary) -> Table:
    """The figures of a run as a table for the terminal."""
    device, devices, processes = summary.machine
    first = ""
    if devices > 1:
        device = f"{devices} x {device}"
    if processes > 1:
        device, first = f"{device}, {processes} processes", ", process 0"
    costs, schedule = summary.costs, summary.schedule
    table = Table("figure", "value", title=f"{summary.optimizer} on {device}")
    table.columns[1].justify = "right"
    figures: list[tuple[str, float | None, str]] = [
        ("parameters", summary.parameters, ","),
        ("steps", summary.steps, ","),
        ("of them before this start", summary.resumed_at or None, ","),
        ("steps skipped, gradient not finite", summary.skipped, ","),
        ("tokens/s", costs.tokens_per_s, ",.0f"),
        ("bytes moved per parameter and step", costs.bytes_per_parameter_and_step, ".2f"),
        (f"share of time waiting for the host{first}", costs.wait_share, ".1%"),
        (f"host seconds{first}", costs.host_s, ".1f"),
        ("windows", schedule.windows, ","),
        ("mean window length, steps", schedule.mean_window_length, ".2f"),
        ("times that channels were selected", schedule.reselections, ","),
        ("share of the best channels' score kept", schedule.kept_share, ".1%"),
        ("training seconds", costs.train_s, ".1f"),
        ("seconds in all", costs.total_s, ".1f"),
    ]
    for when, values in (
        ("before", summary.validation_before),
        ("after", summary.validation_after),
    ):
        figures += [(f"validation {name} {when}", x, ".3f") for name, x in values.items()]
    for name, value, form in figures:
        if value is not None:
            table.add_row(name, format(value, form))
    return table


def hidden_share(
    opt_state: Any, stats: zenflow_jax.EngineStats, seconds: float, host_state: str
) -> planning.Hiding | None:
    """The host's load in the timed steps; None after few, and on a CPU, which shares its cores."""
    if stats.steps < LEAST_STEPS or jax.devices()[0].platform == "cpu":
        return None
    of_all = seconds * stats.steps / (stats.steps - 1)
    return planning.hiding(opt_state, stats, of_all, host_state=host_state)
