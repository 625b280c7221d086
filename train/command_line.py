"""The settings of a run and the options of a start, read from a file and a command line.

A TOML file without tables overrides the defaults of `Settings`, options override the file; those of
`Launch`, `Start` and `Planning` are never in a file. A mistake is a `SettingsError`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from train import CONFIGS, Failure, command_of
from train.arguments import did_you_mean, read_arguments
from train.settings import Settings, SettingsError, flag_of, impossible, option_words

SETTINGS = [field.name for field in dataclasses.fields(Settings)]

PROGRAM = command_of("finetune")

# The endings of files.
PICTURES, JSON = (".png", ".svg", ".pdf"), ".json"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Which process of a run this is: all three, or none where it is alone or under SLURM."""

    coordinator: str | None = None
    """HOST:PORT at which process 0 will listen and the others reach it; the same for all."""
    processes: int | None = None
    """The number of processes."""
    process: int | None = None
    """The number of this one, counted from 0."""

    def __post_init__(self):
        values = dataclasses.asdict(self)
        given = " and ".join(f"--{name}" for name, value in values.items() if value is not None)
        if not given:
            return
        if None in values.values():
            every = ", ".join(f"--{name}" for name in values)
            raise SettingsError(f"expected {every} together, got {given} alone.")
        host, _, port = self.coordinator.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 2**16):
            raise SettingsError(
                f"`--coordinator`: expected HOST:PORT, got {self.coordinator}. Name the machine of "
                "process 0 and a free port, such as 10.0.0.1:29500."
            )
        if not 0 <= self.process < self.processes:
            raise SettingsError(
                f"`--process`: expected a number from 0 to one below --processes, got "
                f"{self.process} with --processes {self.processes}."
            )


@dataclass(frozen=True, kw_only=True)
class Start:
    """Options of this start alone, not of the run."""

    fresh: bool = False
    """Refuse to go on with a run or to write over one: the folder of --run must be empty or new."""
    timeline: str | None = None
    """File for a timeline of the last steps, written at the end or when the run is stopped.
    .png, .svg or .pdf: a picture of twelve. .json: all that are kept, for ui.perfetto.dev.
    How to read it is in docs/timeline.md."""

    export: tuple[str, str] | None = None
    """Train nothing: write the weights of a checkpoint of --run (its step, or best) to that folder.
    """

    def __post_init__(self):
        if self.export is not None and self.export[0] != "best" and not self.export[0].isdecimal():
            raise SettingsError(
                f"`--export`: expected the step of a checkpoint or best, got {self.export[0]}."
            )
        _check_file("timeline", self.timeline, (*PICTURES, JSON))


@dataclass(frozen=True, kw_only=True)
class Planning:
    """Plans a run without starting it: docs/planning.md."""

    plan: bool = False
    """Train nothing: say what the run would need of device and host, whether its host work would
    hide, and what to do. Reads the model's config.json, no weights and no data."""
    plan_json: str | None = None
    """Write the plan to that file as well, as JSON."""
    device: Literal["h100", "h200", "a100", "l40s", "rtx4090", "rtx3090"] | None = None
    """The GPU that is planned for. Left out: the one that is here, else h100."""
    host_memory: float | None = None
    """GB (10**9 bytes) of host memory beside the devices.
    Left out: what is here if the GPU is, else what is usual."""
    host_bandwidth: float | Literal["here"] | None = None
    """GB/s that host updates get out of the host's memory. here: measured in two seconds.
    Left out: measured if the GPU is here, else what is usual beside it."""
    force: bool = False
    """Start a run although it cannot have room on this machine."""

    def __post_init__(self):
        for name in ("host_memory", "host_bandwidth"):
            value = getattr(self, name)
            if isinstance(value, float) and not (math.isfinite(value) and value > 0):
                raise SettingsError(impossible(name, "a finite number above 0", value))
        if self.plan_json is not None and not self.plan:
            raise SettingsError("`--plan-json`: expected --plan too, got it alone.")
        _check_file("plan_json", self.plan_json, (JSON,))


@dataclass(frozen=True, kw_only=True)
class Command:
    """Fine-tunes a model, or says what that would take: a config file, and what differs from it."""

    settings: tyro.conf.OmitArgPrefixes[Settings]
    launch: tyro.conf.OmitArgPrefixes[Launch]
    start: tyro.conf.OmitArgPrefixes[Start]
    planning: tyro.conf.OmitArgPrefixes[Planning]


def shipped() -> list[str]:
    """The names of the configs that come with the scripts."""
    return sorted(path.stem for path in CONFIGS.glob("*.toml"))


def load_settings(path: str | Path) -> Settings:
    """Reads a TOML file of fields of `Settings`, or a shipped one by its name.

    A whole number does for a float.
    """
    path = CONFIGS / f"{path}.toml" if path in shipped() else Path(path)
    words = []
    for key, value in _read_toml(path).items():
        if key not in SETTINGS:
            raise SettingsError(
                f"{path}: expected only known keys, got `{key}`.{did_you_mean(key, SETTINGS)} "
                f"(The keys are: {', '.join(SETTINGS)}.)"
            )
        if not isinstance(value, str | int | float):
            raise SettingsError(f"{path}: `{key}`: expected a single value, got {value}.")
        words.append("=".join(option_words(key, value)))
    try:
        return read_arguments(Settings, words, program=PROGRAM)
    except Failure as error:
        raise SettingsError(f"{path}: {error}") from None


def read_command_line(argv: Sequence[str], *, program: str) -> Command:
    """Reads the command `program CONFIG.toml [--key value ...]` from its arguments `argv`."""
    if argv and not argv[0].startswith("-"):
        config, overrides, settings = argv[0], list(argv[1:]), load_settings(argv[0])
    elif "-h" in argv or "--help" in argv:
        config, overrides, settings = "CONFIG.toml", ["--help"], Settings()
    else:
        raise SettingsError(
            f"expected a config file as the first argument, by its path or name, got "
            f"{argv[0] if argv else 'nothing'}. For example: {program} quickstart"
        )
    default = Command(settings=settings, launch=Launch(), start=Start(), planning=Planning())
    return read_arguments(Command, overrides, program=f"{program} {config}", default=default)


def to_toml(settings: Settings) -> str:
    """The text of a file that `load_settings` reads back; settings that are None are left out."""
    values = dataclasses.asdict(settings)
    # JSON writes strings, finite numbers and booleans just as TOML does.
    return "".join(
        f"{key} = {json.dumps(value)}\n" for key, value in values.items() if value is not None
    )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        near = did_you_mean(path.stem, [file.stem for file in path.parent.glob("*.toml")])
        raise SettingsError(
            f"{path}: expected a config file, got: {error.strerror}.{near} (Those that come with "
            f"zenflow_jax have names: {', '.join(shipped())}.)"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: expected TOML, got what cannot be read: {error}.") from None


def _check_file(name: str, file: str | None, endings: tuple[str, ...]) -> None:
    if file is None:
        return
    path = Path(file)
    if path.suffix not in endings or not path.parent.is_dir() or path.is_dir():
        raise SettingsError(
            f"`{flag_of(name)}`: expected a file that ends in {', '.join(endings)}, got {file}."
        )
