"""The folder of a run, and the record of its settings in there."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from train import models, processes
from train.command_line import to_toml
from train.run_description import DEEPSPEED
from train.run_lock import LOCK
from train.settings import Settings, SettingsError
from train.whole import replace_text

# What a run writes over.
WRITTEN = {
    DEEPSPEED,
    "loss.png",
    "metrics.csv",
    models.CHAT_TEMPLATE,
    models.FOLDER,
    models.WEIGHTS,
    "settings.toml",
    "summary.json",
    "validation.csv",
}


def make_run_folder(settings: Settings, *, fresh: bool) -> Path:
    """The folder of the run below `output_dir`, the same for every process.

    A new one with the next number, or the one named by `run`, which may hold an earlier start.

    Raises:
        SettingsError: If it cannot be made, if it holds a run and `fresh` is asked for, if it holds
            one that has ended and whose checkpoints are gone, or files of no run that this one
            would write over.
    """
    if not processes.is_first():
        return Path(processes.from_first(""))
    parent = Path(settings.output_dir)
    try:
        if settings.run is None:
            folder, names = new_run_folder(parent, settings.optimizer), set()
        else:
            folder = parent / settings.run
            folder.mkdir(parents=True, exist_ok=True)
            names = {p.name for p in folder.iterdir()}
    except OSError as error:
        raise SettingsError(
            f"`output_dir`: expected a folder that can be made and written, got "
            f"{settings.output_dir} ({error.strerror}). Name another one with --output-dir."
        ) from error
    # Every start has made a lock, which a copy of a run may lack.
    is_run = bool(names & {LOCK, "checkpoints"})
    names.discard(LOCK)
    if not is_run and names & WRITTEN:
        raise SettingsError(
            f"`run`: expected a new folder or one of a run, got {folder}, which is neither and has "
            f"a {min(names & WRITTEN)}. Name another --run."
        )
    if fresh and names:
        raise SettingsError(
            f"`--fresh`: expected {folder} to be new or empty, got a folder with "
            f"{', '.join(sorted(names)[:4])}. Remove it, name another --run, or leave --fresh out "
            "to go on with what is in there."
        )
    written = names & {models.WEIGHTS, models.FOLDER}
    if written and "checkpoints" not in names:
        raise SettingsError(
            f"`run`: expected a folder with checkpoints to go on from, or a new one, got {folder} "
            f"with a {written.pop()} and no checkpoints. Name another --run, or remove the folder."
        )
    processes.from_first(str(folder))
    return folder


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


def write_settings(folder: Path, settings: Settings) -> None:
    """Writes `settings.toml`; of a run that goes on, over those of its last start.

    With a DeepSpeed config or a chat template also a copy of that, which the file names: who goes
    on with `settings.toml` goes on with what was in force, whatever became of the original.
    """
    if settings.deepspeed is not None:
        copy = folder / DEEPSPEED
        replace_text(copy, Path(settings.deepspeed).read_text(encoding="utf-8"))
        settings = dataclasses.replace(settings, deepspeed=str(copy))
    for name, text in models.texts_of(settings).items():
        replace_text(folder / name, text)
        settings = dataclasses.replace(settings, chat_template=str(folder / name))
    replace_text(folder / "settings.toml", to_toml(settings))


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """An error of the file system has a name, this one if it had none.

    Those of `open` have the file's; those of a write to an open file have none.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
