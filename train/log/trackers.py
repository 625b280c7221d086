"""Sends the figures of a run to TensorBoard, Trackio or Weights & Biases, as `--report-to` says."""

from __future__ import annotations

import importlib
import math
import platform
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from train.cli.settings import SettingsError

PROJECT = "zenflow_jax"
PACKAGES = {"tensorboard": "tensorboardX", "trackio": "trackio", "wandb": "wandb"}
BOARD_EVERY_S = 30.0  # as often as TensorBoard reads


class Reporter(Protocol):
    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Takes finite figures by name, such as `train/loss`."""
        ...

    def finish(self) -> None: ...


def check_reporter(kind: str) -> None:
    """Refuses one whose package is not installed, before anything is done for the run."""
    try:
        if kind != "none":
            importlib.import_module(PACKAGES[kind])
    except ImportError as error:
        raise SettingsError(
            f"`report_to`: expected an installed package, got none for {kind} ({error}): "
            f'pip install "{PACKAGES[kind]}".'
        ) from error


def reporter(kind: str, folder: Path, *, done: int, config: Mapping[str, Any]) -> Reporter | None:
    """Receives the figures of the run in `folder`; those of `done` steps are reported already."""
    if kind == "none":
        return None
    if kind == "tensorboard":
        return _Board(folder, done)
    options: dict[str, Any] = {"name": folder.name, "config": dict(config), "resume": "allow"}
    if kind == "wandb":
        # A run of the same name elsewhere is another one.
        number = zlib.crc32(str(folder.absolute()).encode())
        options |= {"dir": str(folder), "id": f"{folder.name}-{number:08x}"}
    return importlib.import_module(kind).init(project=PROJECT, **options)


def finite(label: str, figures: Mapping[str, float | None]) -> dict[str, float]:
    """Returns the figures that can be drawn, with the label in their names."""
    return {
        f"{label}/{name}": value
        for name, value in figures.items()
        if name != "step" and value is not None and math.isfinite(value)
    }


class _Board:
    """TensorBoard's file, whose readers forget what they know of the steps after `done`.

    On a full disk tensorboardX's `SummaryWriter` waits for ever; its `EventsWriter` stays open.
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
