"""Shows and writes the metrics of a run in progress.

    metrics.csv           one row per `log_every` steps, written immediately; unknown values
                          are blank
    validation.csv        the metrics of every validation

A resumed run writes the rows up to its checkpoint, from the checkpoint, and continues.
"""

from __future__ import annotations

import csv
import datetime
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from elves.atomic import atomic_path
from train.distributed import processes
from train.log.meter import Row


class RunLog:
    """Sends metrics to the screen and, in the first process, to the CSV files.

    `rows` and `validations` are from earlier starts.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        console: Console,
        rows: Sequence[Row] = (),
        validations: Sequence[tuple[int, Mapping[str, float]]] = (),
    ):
        self._steps, self._console = steps, console
        self._metrics, self._validations = folder / "metrics.csv", folder / "validation.csv"
        # Atomic, so that a run that is killed here keeps the old files.
        lines = [("step", "figure", "value"), *(line for v in validations for line in _lines(*v))]
        for path, old in ((self._metrics, [Row._fields, *rows]), (self._validations, lines)):
            if processes.is_first():
                with atomic_path(path) as part:
                    _append(part, old)
        self._made = time.monotonic()
        self._begun = (rows[-1].step if rows else 0), self._made  # a step, and its time

    def begin(self, step: int) -> None:
        """Records that this start's first step is compiled and finished."""
        self._begun = step, time.monotonic()
        line = f"{self._counted(step)}  compiled, {self._begun[1] - self._made:.1f} s"
        show(self._console, line)

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
        show(self._console, f"{self._counted(row.step)}  {figures}")

    def validation(self, step: int, figures: Mapping[str, float]) -> None:
        _append(self._validations, _lines(step, figures))
        values = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        show(self._console, f"validation after {step} steps: {values}")

    def _counted(self, step: int) -> str:
        return f"step {step:>{len(str(self._steps))}}/{self._steps}"


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
