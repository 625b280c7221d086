"""Writes a run's results to its folder, and shows them on the screen.

settings.toml         all settings, as a config file, with a copy of a chat template that it names
metrics.csv, validation.csv   (`run_log.py`)
loss.png              curves of the losses
timeline.png          where the last steps' time went (docs/timeline.md), with zenflow and offload
summary.json          the values of the summary table, and the engine's statistics; `best_step` is
                      the step of the saved weights, null without keep_best
checkpoints/          the run's checkpoints, to resume from (`checkpoints/writing.py`)
model.safetensors     trained weights in float32; or model/, a folder like the original
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

import zenflow_jax
from train import command_of
from train.cli.settings import PAIRS
from train.log.meter import Row
from train.tasks.classification import by_index

Validations = Sequence[tuple[int, Mapping[str, float]]]

# The values of `summary.json` in the table: name, words, format. Except for steps and parameters,
# they cover only this start; with several processes, times are from process 0.
SHOWN = (
    ("parameters", "parameters", ","),
    ("steps", "steps", ","),
    ("resumed_at", "steps before this start", ","),
    ("skipped", "steps skipped (gradient not finite)", ","),
    ("tokens_per_s", "tokens/s", ",.0f"),
    ("wait_share", "share of time waiting for the host", ".1%"),
    ("train_s", "training seconds", ".1f"),
    ("total_s", "total seconds", ".1f"),
)


def completed_steps(folder: Path) -> int | None:
    """Returns the steps of a completed run; None if `summary.json` is missing or damaged."""
    try:
        return json.loads((folder / "summary.json").read_text(encoding="utf-8"))["steps"]
    except (FileNotFoundError, ValueError, TypeError, KeyError):  # not UTF-8, not JSON, no object
        return None


def write_pictures(
    folder: Path,
    rows: Sequence[Row],
    validations: Validations,
    timeline: Sequence[Any],
    *,
    title: str,
    target: str,
) -> None:
    """Writes `timeline.png`, and `loss.png`: the losses in nats per `target`."""
    from matplotlib.figure import Figure  # a third of the start-up time
    from matplotlib.ticker import MaxNLocator

    # A Figure without pyplot needs no display and no global state.
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    # A row is the mean over its steps, so it is drawn at their midpoint.
    steps = [0, *(row.step for row in rows)]
    middles = [(before + step + 1) / 2 for before, step in itertools.pairwise(steps)]
    axes.plot(middles, [row.loss for row in rows], ".-", label="training")
    # Points, because the values between them are unknown.
    axes.plot(
        [x for x, _ in validations], [y["loss"] for _, y in validations], "o", label="validation"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.set(title=title, ylabel=f"loss, nats per {target}", xlabel="step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(folder / "loss.png", dpi=120)
    if any(span.kind == "step" for span in timeline):
        zenflow_jax.plot_timeline(timeline, folder / "timeline.png")


def command_of_use(model: Path, task: str) -> str | None:
    """Returns the command that uses the model in this folder; None if there is none."""
    if task == PAIRS:
        return None
    prompts = {"language": "The beginning of a text", "alpaca": "An instruction"}
    prompt = {**prompts, "chat": "A question"}.get(task, "A text")
    return f'{command_of("generate")} --model {shlex.quote(str(model))} "{prompt}"'


def summary_table(figures: Mapping[str, Any]) -> Table:
    """Returns a run's figures as a table for the terminal."""
    devices = f"{figures['devices']} x {figures['device']}"
    table = Table("figure", "value", title=f"{figures['optimizer']} on {devices}")
    table.columns[1].justify = "right"
    for name, words, form in SHOWN:
        if figures[name] is not None:
            table.add_row(words, format(figures[name], form))
    if figures["classes"]:
        table.add_row("classes by index", by_index(figures["classes"]))
    for when in ("before", "after"):
        for name, value in figures[f"validation_{when}"].items():
            table.add_row(f"validation {name} {when}", format(value, ".3f"))
    return table
