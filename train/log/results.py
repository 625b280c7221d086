"""Shows a run's results, and writes them to its folder.

settings.toml         all settings, as a config file, with a copy of a chat template that it names
metrics.csv           one row per `log_every` steps, written at once; unknown values are blank
validation.csv        the metrics of every validation
loss.png              curves of the losses
timeline.png          where the last steps' time went (docs/timeline.md), with zenflow and offload
summary.json          the run's figures, and the engine's statistics. Except for steps and
                      parameters, they cover only this start; with several processes, they are
                      from process 0. `best_step` is the step of the saved weights, null without
                      keep_best
checkpoints/          the run's checkpoints, to resume from (`checkpoints/checkpoints.py`)
model.safetensors     trained weights in float32; or model/, a folder like the original
"""

from __future__ import annotations

import csv
import datetime
import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import zenflow_jax
from elves.atomic import atomic_path
from train.distributed import processes
from train.log.meter import Row

Validations = Sequence[tuple[int, Mapping[str, float]]]


class RunLog:
    """Sends metrics to the screen and, in the first process, to the CSV files.

    `rows` and `validations` are from earlier starts, up to the checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        console: Console,
        rows: Sequence[Row] = (),
        validations: Validations = (),
    ):
        self._steps, self._console = steps, console
        self._metrics, self._validations = folder / "metrics.csv", folder / "validation.csv"
        # Atomic, so that a run that is killed here keeps the old files.
        lines = [("step", "figure", "value"), *(line for v in validations for line in _lines(*v))]
        for path, old in ((self._metrics, [Row._fields, *rows]), (self._validations, lines)):
            if processes.is_first():
                with atomic_path(path) as part:
                    _append(part, old)
        self._begun = (rows[-1].step if rows else 0), time.monotonic()  # a step, and its time

    def begin(self, step: int) -> None:
        """Records that this start's first step is compiled and finished."""
        self._begun = step, time.monotonic()

    def add(self, row: Row) -> None:
        _append(self._metrics, [row])
        figures = f"loss {row.loss:.3f}"
        if row.tokens_per_s:
            figures += f"  {row.tokens_per_s:,.0f} tokens/s  waited for host {row.wait_share:.1%}"
        if row.skipped:
            figures += f"  {row.skipped} skipped"
        # Based on the steps of this start, including validations and checkpoints.
        first, since = self._begun
        if first < row.step < self._steps:
            per_step = (time.monotonic() - since) / (row.step - first)
            left = datetime.timedelta(seconds=round(per_step * (self._steps - row.step)))
            figures += f"  {left} left"
        counted = f"step {row.step:>{len(str(self._steps))}}/{self._steps}"
        show(self._console, f"{counted}  {figures}")

    def validation(self, step: int, figures: Mapping[str, float]) -> None:
        _append(self._validations, _lines(step, figures))
        values = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        show(self._console, f"validation after {step} steps: {values}")


def show(console: Console, line: str) -> None:
    """Shows a line, with escapes for characters that the terminal lacks; brackets are allowed."""
    line = line.encode(console.encoding, "backslashreplace").decode(console.encoding)
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _lines(step: int, figures: Mapping[str, float]) -> list[tuple[int, str, float]]:
    return [(step, name, value) for name, value in figures.items()]


def _append(path: Path, lines: Iterable[Sequence[Any]]) -> None:
    """Writes at once, so that a run can be followed, and a killed run leaves a record."""
    if not processes.is_first():
        return
    with open(path, "a", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(lines)


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
