"""What a run shows while it goes on and what it leaves behind.

    metrics.csv           one row for every `log_every` steps, written as they come
    events.out.tfevents.* the same for TensorBoard, and the validation loss
    settings.toml         the settings in full; the command takes it as a config file
    loss.png              the loss curve
    summary.json          the figures of the summary table

All of it lies in a folder that the run has to itself (`new_run_folder`).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tensorboardX
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from train.meter import Row


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of a run."""

    optimizer: str
    device: str
    devices: int  # of all processes
    processes: int
    parameters: int
    steps: int
    tokens_per_s: float  # after the first step, which compiles
    bytes_per_parameter_and_step: float  # to the host and back, all processes together
    wait_share: float  # of `train_s`, 0 to 1; of process 0
    host_s: float  # in which the host update of process 0 worked, beside the device or not
    train_s: float  # after the first step, with the last update of the host
    total_s: float  # with reading the text, compilation and validation
    validation_loss_before: float  # nats per byte
    validation_loss_after: float


def new_run_folder(parent: Path, label: str) -> Path:
    """Makes the folder `parent/NNN-label`; `NNN` follows the highest number in there.

    Raises:
        OSError: If `parent` cannot be made, or is no folder, or cannot be written.
    """
    parent.mkdir(parents=True, exist_ok=True)
    numbers = [int(n) for p in parent.iterdir() if (n := p.name.partition("-")[0]).isdecimal()]
    number = max(numbers, default=0) + 1
    while True:
        folder = parent / f"{number:03d}-{label}"
        try:
            folder.mkdir()
        except FileExistsError:  # by a run that started at the same moment
            number += 1
        else:
            return folder


class RunLog:
    """Metrics of a run, to the screen, the CSV file and TensorBoard. Use with `with`.

    Args:
        folder: Where the files go.
        steps: Length of the run.
        console: Where to show it: a progress bar on a terminal, a line per row elsewhere.
        progress: Whether a terminal gets the bar; without it, lines as well.
    """

    def __init__(self, folder: Path, *, steps: int, console: Console, progress: bool):
        self._console = console
        self._as_lines = not (progress and console.is_terminal)
        self._csv_file = open(folder / "metrics.csv", "w", newline="", encoding="utf-8")
        self._csv = csv.writer(self._csv_file)
        self._csv.writerow(Row._fields)
        self._board = tensorboardX.SummaryWriter(str(folder))
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=self._as_lines,
        )
        self._task = self._bar.add_task("train", total=steps, figures="compiling")
        self._steps = steps

    def __enter__(self) -> RunLog:
        self._bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self._bar.stop()
        self._board.close()
        self._csv_file.close()

    def add(self, row: Row) -> None:
        """Shows and writes the figures of one interval."""
        self._csv.writerow(row)
        self._csv_file.flush()  # so that a run can be followed, and one that dies leaves a record
        for name, value in zip(Row._fields[1:], row[1:], strict=True):
            self._board.add_scalar(f"train/{name}", value, row.step)
        figures = (
            f"loss {row.loss:.3f}  {row.tokens_per_s:,.0f} tokens/s  "
            f"waited for host {row.wait_share:.1%}"
        )
        self._bar.update(self._task, completed=row.step, figures=figures)
        if self._as_lines:
            self._line(f"step {row.step:>{len(str(self._steps))}}/{self._steps}  {figures}")

    def validation(self, step: int, loss: float) -> None:
        """Shows and writes the validation loss of the parameters after `step` steps."""
        self._board.add_scalar("validation/loss", loss, step)
        self._line(f"validation loss after {step} steps: {loss:.3f} nats per byte")

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


class NoLog:
    """In place of a `RunLog` where another process of the run reports."""

    def __enter__(self) -> NoLog:
        return self

    def __exit__(self, *exception) -> None:
        pass

    def add(self, row: Row) -> None:
        pass

    def validation(self, step: int, loss: float) -> None:
        pass


def write_summary(folder: Path, summary: Summary) -> None:
    """Writes `summary.json`."""
    text = json.dumps(asdict(summary), indent=2) + "\n"
    (folder / "summary.json").write_text(text, encoding="utf-8")


def write_picture(folder: Path, rows: Sequence[Row], summary: Summary) -> None:
    """Writes `loss.png`: the loss over the steps, and the summary beside it."""
    # A Figure without pyplot draws with Agg: no display is needed and no global state is left.
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes, beside = figure.subplots(1, 2, width_ratios=(5, 3))
    axes.set(
        title=f"{summary.optimizer}, {summary.parameters / 1e6:.1f} M parameters",
        xlabel="step",
        ylabel="loss, nats per byte",
    )
    axes.plot([row.step for row in rows], [row.loss for row in rows], ".-", label="training")
    axes.plot(
        [0, summary.steps],
        [summary.validation_loss_before, summary.validation_loss_after],
        "o",
        label="validation",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    beside.axis("off")
    figures = _figures(summary)
    table = beside.table(
        [[name, value] for name, value in figures.items()],
        colWidths=[0.78, 0.22],
        cellLoc="left",
        loc="center",
    )
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    table.scale(1, 1.6)
    figure.savefig(folder / "loss.png", dpi=120)


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
    return {
        "parameters": f"{summary.parameters:,}",
        "steps": f"{summary.steps:,}",
        "tokens/s": f"{summary.tokens_per_s:,.0f}",
        "bytes moved per parameter and step": f"{summary.bytes_per_parameter_and_step:.2f}",
        f"share of time waiting for the host{first}": f"{summary.wait_share:.1%}",
        f"host seconds{first}": f"{summary.host_s:.1f}",
        "training seconds": f"{summary.train_s:.1f}",
        "seconds in all": f"{summary.total_s:.1f}",
        "validation loss before": f"{summary.validation_loss_before:.3f}",
        "validation loss after": f"{summary.validation_loss_after:.3f}",
    }
