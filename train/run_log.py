"""What a run shows and writes while it goes on.

    metrics.csv           one row for every `log_every` steps, written as they come; what is not
                          known, as with adamw of windows, is blank
    validation.csv        the figures of every validation
    events.out.tfevents.* both for TensorBoard

A run that goes on from a checkpoint drops the rows that came after it, and writes them again.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import math
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.record_writer import RecordWriter

from train.meter import Row
from train.run_folder import naming
from train.schedule import ScheduleRow
from train.whole import made_whole

# TensorBoard looks every 30 s.
BOARD_EVERY_S = 30.0


class RunLog:
    """Metrics of a run, to the screen, the CSV files and TensorBoard. Use with `with`.

    Args:
        folder: Where the files go.
        steps: Length of the run.
        console: Where to show it: a progress bar on a terminal, a line per row elsewhere.
        progress: Whether a terminal gets the bar; without it, lines as well.
        rows: Those that the run has already, if it goes on: what `read_rows` gave.
        validations: Likewise, the steps and figures of validations.

    Raises:
        OSError: If a file cannot be written, here and in every call; it names the file.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        console: Console,
        progress: bool,
        rows: Sequence[tuple[Row, ScheduleRow]] = (),
        validations: Sequence[tuple[int, Mapping[str, float]]] = (),
    ):
        self._console = console
        self._as_lines = not (progress and console.is_terminal)
        self._csv_file = _begin(
            folder / "metrics.csv",
            [Row._fields + ScheduleRow._fields, *(row + schedule for row, schedule in rows)],
        )
        lines = [_VALIDATION, *(line for v in validations for line in _lines(*v))]
        self._validation_file = _begin(folder / "validation.csv", lines)
        self._board = _Board(folder, purge=rows[-1][0].step + 1 if rows else None)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=self._as_lines,
        )
        done = rows[-1][0].step if rows else 0
        self._task = self._bar.add_task("train", total=steps, completed=done, figures="compiling")
        self._steps = steps
        self._made = time.monotonic()
        self._begun = (done, self._made)  # a step, and when it was done

    def __enter__(self) -> RunLog:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        self._bar.stop()
        with contextlib.ExitStack() as closing:
            if kind is not None:
                # What is unwritten because the disk is full fails here again, and would hide the
                # error that says so.
                closing.enter_context(contextlib.suppress(OSError))
            for file in (self._csv_file, self._validation_file):
                closing.enter_context(naming(file.name))
                closing.callback(file.close)
            closing.callback(self._board.close)

    def begin(self, step: int) -> None:
        """The first step of this start is done, and all is compiled that it needs."""
        self._begun = step, time.monotonic()
        seconds = self._begun[1] - self._made
        self.say(f"step {step:>{len(str(self._steps))}}/{self._steps}  compiled, {seconds:.1f} s")

    def say(self, line: str) -> None:
        """Shows a line: where there is no bar that moves, a sign of life."""
        if self._as_lines:
            self._line(line)

    def add(self, row: Row, schedule: ScheduleRow) -> None:
        """Shows and writes the figures of one interval."""
        # At once, so that a run can be followed, and one that dies leaves a record.
        _write(self._csv_file, [row + schedule])
        for group, figures in (("train", row), ("schedule", schedule)):
            self._board.add(group, figures._asdict(), row.step)
        figures = f"loss {row.loss:.3f}"
        if row.tokens_per_s:  # of the first step, which compiles, there is none
            figures += f"  {row.tokens_per_s:,.0f} tokens/s  waited for host {row.wait_share:.1%}"
        if row.skipped:
            figures += f"  {row.skipped} skipped"
        self._bar.update(self._task, completed=row.step, figures=figures)
        self.say(
            f"step {row.step:>{len(str(self._steps))}}/{self._steps}  {figures}"
            f"{self._time_left(row.step)}"
        )

    def validation(self, step: int, figures: Mapping[str, float]) -> None:
        """Shows and writes the figures of the parameters after `step` steps."""
        _write(self._validation_file, _lines(step, figures))
        self._board.add("validation", figures, step)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        self._line(f"validation after {step} steps: {shown}")

    def _time_left(self, step: int) -> str:
        """By the steps of this start that are done, with their validations and checkpoints."""
        first, since = self._begun
        if not first < step < self._steps:
            return ""
        seconds = (time.monotonic() - since) * (self._steps - step) / (step - first)
        return f"  {datetime.timedelta(seconds=round(seconds))} left"

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


class NoLog:
    """In place of a `RunLog` where another process of the run reports."""

    def __enter__(self) -> NoLog:
        return self

    def __exit__(self, *exception) -> None:
        pass

    def begin(self, step: int) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def add(self, row: Row, schedule: ScheduleRow) -> None:
        pass

    def validation(self, step: int, figures: Mapping[str, float]) -> None:
        pass


def read_rows(
    folder: Path, *, until: int, say: Callable[[str], None]
) -> list[tuple[Row, ScheduleRow]]:
    """The rows of `metrics.csv` up to that step; of a damaged file, those before the damage.

    Args:
        folder: Of the run.
        until: The last step of interest.
        say: Shows a line to the user: that rows are missing.
    """
    path = folder / "metrics.csv"
    rows: list[tuple[Row, ScheduleRow]] = []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                # A run that was killed can have left a part of its last line.
                if None in line.values() or int(line["step"]) > until:
                    break
                rows.append((_read(Row, line), _read(ScheduleRow, line)))
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, csv.Error):
        last = rows[-1][0].step if rows else 0
        say(f"{path} is damaged: its rows of the steps from {last + 1} to {until} are lost")
    return rows


# How each column is read; blank is None.
_KINDS: Mapping[str, Callable[[str], Any]] = dict.fromkeys(("step", "skipped", "reselections"), int)


def _read(kind: Any, line: Mapping[str, str]) -> Any:
    return kind(*(_KINDS.get(n, float)(line[n]) if line[n] else None for n in kind._fields))


_VALIDATION = ("step", "figure", "value")


def _lines(step: int, figures: Mapping[str, float]) -> list[tuple[int, str, float]]:
    return [(step, name, value) for name, value in figures.items()]


def _begin(path: Path, lines: Iterable[Sequence[Any]]) -> TextIO:
    """A CSV file with these lines in it, open for the next ones."""
    # Whole before it has its name: a run that is killed in between still has the old one.
    with naming(path), made_whole(path) as part:
        with open(part, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(lines)
    return open(path, "a", newline="", encoding="utf-8")


def _write(file: TextIO, lines: Iterable[Sequence[Any]]) -> None:
    with naming(file.name):
        csv.writer(file).writerows(lines)
        file.flush()


class _Board:
    """TensorBoard's file.

    tensorboardX's own `SummaryWriter` writes on a thread, behind a queue of ten: where the disk is
    full the thread ends with a traceback, and the tenth call after that waits for ever. Its
    `EventsWriter` does not close the file where the rest cannot be written, and Python 3.13 says so
    at its end, behind the message that counts.

    Args:
        folder: Where the file goes.
        purge: TensorBoard is told to forget what it knows of this step and all later ones.
    """

    def __init__(self, folder: Path, *, purge: int | None):
        self._folder = folder
        name = f"events.out.tfevents.{int(time.time())}.{platform.node()}"
        with naming(folder):
            self._file = RecordWriter(str(folder / name))
            self._write(file_version="brain.Event:2")
            if purge is not None:
                self._write(step=purge, session_log=SessionLog(status=SessionLog.START))
        self._flushed = time.monotonic()

    def add(self, group: str, figures: Mapping[str, float | None], step: int) -> None:
        # It draws no point for what is no number.
        known = {n: x for n, x in figures.items() if x is not None and math.isfinite(x)}
        known.pop("step", None)
        with naming(self._folder):
            for name, value in known.items():
                self._write(step=step, summary=summary.scalar(f"{group}/{name}", value))
            if time.monotonic() > self._flushed + BOARD_EVERY_S:
                self._file.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        with naming(self._folder):
            self._file.close()

    def _write(self, **said: Any) -> None:
        self._file.write(Event(wall_time=time.time(), **said).SerializeToString())
