"""Sends a run's metrics to Trackio or Weights & Biases (`--report-to`)."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.cli.settings import SettingsError

PROJECT = "zenflow_jax"

# An object with `log(figures, step)`, for finite values by name (`train/loss`), and `finish()`.
Reporter = Any


def check_reporter(kind: str) -> None:
    """Raises if the tracker's package is not installed, before the run starts."""
    try:
        if kind != "none":
            importlib.import_module(kind)
    except ImportError as error:
        raise SettingsError(
            f"`report_to`: the package for {kind} is not installed ({error}). Install it: "
            f'pip install "{kind}".'
        ) from error


def reporter(kind: str, folder: Path, *, config: Mapping[str, Any]) -> Reporter | None:
    """Returns the tracker for the run in `folder`, new or resumed."""
    if kind == "none":
        return None
    options: dict[str, Any] = {"name": folder.name, "config": dict(config), "resume": "allow"}
    if kind == "wandb":
        # A run with the same name in another folder is a different run.
        number = zlib.crc32(str(folder.absolute()).encode())
        options |= {"dir": str(folder), "id": f"{folder.name}-{number:08x}"}
    return importlib.import_module(kind).init(project=PROJECT, **options)
