"""Sends a run's metrics to TensorBoard, Trackio or Weights & Biases (`--report-to`)."""

from __future__ import annotations

import importlib
import math
import platform
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.cli.settings import SettingsError

PROJECT = "zenflow_jax"
PACKAGES = {"tensorboard": "tensorboardX", "trackio": "trackio", "wandb": "wandb"}
BOARD_EVERY_S = 30.0  # how often TensorBoard reads the file


# An object with `log(figures, step)`, for finite values by name (`train/loss`), and `finish()`.
Reporter = Any


def check_reporter(kind: str) -> None:
    """Raises an error before the run starts if the tracker's package is not installed."""
    try:
        if kind != "none":
            importlib.import_module(PACKAGES[kind])
    except ImportError as error:
        raise SettingsError(
            f"`report_to`: the package for {kind} is not installed ({error}). Install it: "
            f'pip install "{PACKAGES[kind]}".'
        ) from error


def reporter(kind: str, folder: Path, *, done: int, config: Mapping[str, Any]) -> Reporter | None:
    """Returns the tracker for the run in `folder`, which already has the first `done` steps."""
    if kind == "none":
        return None
    if kind == "tensorboard":
        return _Board(folder, done)
    options: dict[str, Any] = {"name": folder.name, "config": dict(config), "resume": "allow"}
    if kind == "wandb":
        # A run with the same name in another folder is a different run.
        number = zlib.crc32(str(folder.absolute()).encode())
        options |= {"dir": str(folder), "id": f"{folder.name}-{number:08x}"}
    return importlib.import_module(kind).init(project=PROJECT, **options)


def finite(label: str, figures: Mapping[str, float | None]) -> dict[str, float]:
    """Returns the finite values, with the label in their names."""
    return {
        f"{label}/{name}": value
        for name, value in figures.items()
        if name != "step" and value is not None and math.isfinite(value)
    }


class _Board:
    """Writes TensorBoard's file; readers discard earlier records of steps after `done`.

    On a full disk, tensorboardX's `SummaryWriter` blocks forever; its `EventsWriter` never closes.
    """

    def __init__(self, folder: Path, done: int):
        proto = importlib.import_module("tensorboardX.proto.event_pb2")
        self._summary = importlib.import_module("tensorboardX.summary")
        self._event = proto.Event
        name = f"events.out.tfevents.{int(time.time())}.{platform.node()}"
        writer = importlib.import_module("tensorboardX.record_writer").RecordWriter
        self._file = writer(str(folder / name))
        self._write(file_version="brain.Event:2")
        if done:
            start = proto.SessionLog(status=proto.SessionLog.START)
            self._write(step=done + 1, session_log=start)
        self._flushed = time.monotonic()

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._write(step=step, summary=self._summary.scalar(name, value))
        if time.monotonic() > self._flushed + BOARD_EVERY_S:
            self._file.flush()
            self._flushed = time.monotonic()

    def finish(self) -> None:
        self._file.close()

    def _write(self, **event: Any) -> None:
        self._file.write(self._event(wall_time=time.time(), **event).SerializeToString())
