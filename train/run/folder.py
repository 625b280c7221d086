"""Manages a run's folder: its name, its lock and its settings."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from elves.atomic import write_text_atomically
from train.cli.command_line import to_toml
from train.cli.settings import Settings, SettingsError
from train.distributed import processes
from train.huggingface.chat_template import TEMPLATE
from train.run import models

# A file that names the process that holds the lock. It is kept when the run ends.
LOCK = "lock"

# The files that a run overwrites.
WRITTEN = {TEMPLATE, models.FOLDER, models.WEIGHTS, "loss.png", "timeline.png"}
WRITTEN |= {"metrics.csv", "settings.toml", "summary.json", "validation.csv"}


def make_run_folder(settings: Settings) -> Path:
    """Returns the run's folder, which is the same in every process.

    A named run may have been started before; without a name, the folder is new.
    """
    output_dir, run = settings.output_dir, settings.run
    if not processes.is_first():
        return Path(processes.from_first(""))
    parent = Path(output_dir)
    try:
        folder = new_run_folder(parent, settings.optimizer) if run is None else parent / run
        folder.mkdir(parents=True, exist_ok=True)
        names = {p.name for p in folder.iterdir()}
    except OSError as error:
        problem = f"cannot write to {output_dir} ({error.strerror})"
        raise SettingsError(f"`output_dir`: {problem}. Pass another --output-dir.") from error
    # A run that ended before its first checkpoint has left the lock file, and may start over.
    written = names & ({models.WEIGHTS, models.FOLDER} if LOCK in names else WRITTEN)
    if written and "checkpoints" not in names:
        raise SettingsError(
            f"`run`: {folder} contains {min(written)}, but no checkpoints to resume from. Pass "
            "a new --run."
        )
    processes.from_first(str(folder))
    return folder


def new_run_folder(parent: Path, label: str) -> Path:
    """Makes the folder `parent/NNN-label` with the next number after those in `parent`."""
    parent.mkdir(parents=True, exist_ok=True)
    numbers = [int(n) for p in parent.iterdir() if (n := p.name.partition("-")[0]).isdecimal()]
    number = max(numbers, default=0) + 1
    while True:
        folder = parent / f"{number:03d}-{label}"
        with contextlib.suppress(FileExistsError):  # another run started at the same time
            folder.mkdir()
            return folder
        number += 1


def write_settings(folder: Path, values: Mapping[str, Any], texts: Mapping[str, str]) -> None:
    """Writes `settings.toml`, and copies of the `texts`."""
    copies: dict[str, str] = {}
    for name, text in texts.items():
        write_text_atomically(folder / name, text)
        copies["chat_template"] = str(folder / name)
    write_text_atomically(folder / "settings.toml", to_toml({**values, **copies}))


@contextlib.contextmanager
def run_lock(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Locks the run's folder against a second start; the lock ends with the process."""
    if not processes.is_first():
        yield
        return
    with open(folder / LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise SettingsError(
                f"`run`: {folder} is in use by another process: "
                f"{file.read().strip() or 'unknown'}. Stop it with SIGTERM, which saves a "
                "checkpoint, or pass another --run."
            ) from None
        except OSError:  # some file systems do not support locks
            say(f"the file system of {folder} does not support locks: do not start this run twice")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
