"""Reads a run's settings and start options from a file and a command line.

A TOML file without tables overrides the defaults of `Settings`, and options override the file;
the other options are never in a file. A mistake raises a `SettingsError`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from train import CONFIGS, Failure, command_of
from train.cli.arguments import option, read_arguments
from train.cli.settings import Settings, SettingsError, option_words

PROGRAM = command_of("finetune")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Several processes (docs/multi_host.md): all three options, or none under SLURM."""

    coordinator: str | None = option(None, "HOST:PORT of process 0, the same for all processes.")
    processes: int | None = option(None, "Number of processes.")
    process: int | None = option(None, "Number of this process, from 0.")


@dataclass(frozen=True, kw_only=True)
class Planning:
    """Planning: memory and speed of a run, without starting it (docs/planning.md)."""

    plan: bool = option(
        False,
        "Show memory and time of all ways, or of the one that --optimizer and --stream choose.",
    )
    device: Literal["h100", "h200", "a100", "l40s", "rtx4090", "rtx3090"] | None = option(
        None, "GPU to plan for. Default: this machine's, or h100."
    )
    host_memory: float | None = option(None, "Host memory in GB (10**9 bytes).", above=0)


class Command(NamedTuple):
    settings: Settings
    planning: Planning
    launch: Launch


def shipped() -> list[str]:
    """Returns the names of the configs that come with the scripts."""
    return sorted(path.stem for path in CONFIGS.glob("*.toml"))


def load_settings(path: str | Path) -> Settings:
    """Reads a TOML file of `Settings` fields, or a built-in file by its name.

    Whole numbers are accepted for floats.
    """
    path = CONFIGS / f"{path}.toml" if path in shipped() else Path(path)
    values = _read_toml(path)
    if unknown := sorted(values.keys() - {x.name for x in dataclasses.fields(Settings)}):
        raise SettingsError(f"{path}: unknown keys: {', '.join(unknown)}. Remove them.")
    words = ["=".join(option_words(key, value)) for key, value in values.items()]
    try:
        return read_arguments([Settings], words, program=PROGRAM, description=None)[0]
    except Failure as error:
        raise SettingsError(f"{path}: {error}") from None


def read_command_line(argv: Sequence[str], *, program: str) -> Command:
    """Reads the arguments `argv` of the command `program CONFIG.toml [--key value ...]`."""
    if argv and not argv[0].startswith("-"):
        config, overrides, settings = argv[0], list(argv[1:]), load_settings(argv[0])
        folder, name = Path(config).parent, Path(config).name
        # A run's own settings: its folder may have moved.
        if name == "settings.toml" and (folder / "checkpoints").is_dir():
            place = os.path.normpath(folder / "..")
            settings = dataclasses.replace(settings, output_dir=place)
    elif alone := [word for word in argv if word in ("-h", "--help")]:
        config, overrides, settings = f"({' | '.join(shipped())} | FILE.toml)", alone, Settings()
    else:
        raise SettingsError(
            f"the first argument must be a config file's path or name, but is "
            f"{argv[0] if argv else 'missing'}. Pass a path, or one of {', '.join(shipped())}, as "
            f"in `{program} quickstart`."
        )
    kinds = [Settings, Planning, Launch]
    does = "Plans the memory and speed of a run" if program == "zenflow-plan" else "Trains a model"
    options = {
        "program": f"{program} {config}",
        "description": f"{does}, with the settings of a TOML file and these options.",
        "defaults": vars(settings),
    }
    return Command(*read_arguments(kinds, overrides, **options))


def to_toml(values: Mapping[str, Any]) -> str:
    """Returns the text of a file that `load_settings` can read; None values are left out."""
    # JSON writes strings, finite numbers and booleans like TOML, except that it escapes characters
    # beyond U+FFFF as two surrogates, which TOML forbids, and does not escape U+007F.
    return "".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n".replace("\x7f", "\\u007f")
        for key, value in values.items()
        if value is not None
    )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        problem = f"{path}: the config file cannot be read: {error.strerror}."
        raise SettingsError(f"{problem} Pass a path, or one of {', '.join(shipped())}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        data = "" if path.suffix == ".toml" else " Pass data with --data, after a config's name."
        raise SettingsError(f"{path}: the config is not valid TOML: {error}.{data}") from None
