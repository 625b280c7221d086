"""The settings of a training run: a flat TOML file, read once into a frozen dataclass.

    configs/quickstart.toml      what the file says goes over the defaults of `Settings`
    --learning-rate 1e-3         what the command line says goes over the file
    --process 1                  `Launch`: which of several processes this is; never in a file
    --fresh                      `Start`: how the run is to begin; never in a file

Nothing is guessed: an unknown key, a wrong type or an impossible value is a `SettingsError`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import tomllib
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro


class SettingsError(ValueError):
    """A mistake in the settings; the message is meant to be shown as it is, without traceback."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of `train.finetune`; every one can be a key of the TOML file."""

    seed: int = 0
    """Fixes the split, the initial weights and the order of the batches."""

    # Data.
    corpus_megabytes: float = 4.0
    """How much text is taken from the standard library, training and validation together."""
    validation_share: float = 0.1
    """Share of that text (by whole files) that is kept for validation."""
    sequence_length: int = 128
    """Bytes in one sequence."""
    batch_size: int = 8
    """Sequences in one step, all devices together."""

    # Model.
    width: int = 256
    """Size of the residual stream."""
    layers: int = 4
    """Number of transformer blocks."""
    heads: int = 4
    """Attention heads; width / heads must be an even whole number."""
    ffn: int = 640
    """Inner width of the SwiGLU layers."""

    # Training.
    steps: int = 400
    """Optimizer steps."""
    optimizer: Literal["zenflow", "adamw"] = "zenflow"
    """zenflow_jax.zenflow with a HostEngine, or optax.adamw with float32 master weights."""
    learning_rate: float = 1e-3
    """Peak of the schedule: linear warm-up, then a cosine down to a tenth of the peak."""
    warmup_steps: int = 0
    """Steps of the linear warm-up of the learning rate."""
    weight_decay: float = 0.01
    """Decay of the matrices; the scales of the norms do not decay."""
    max_grad_norm: float | None = None
    """Clip the global gradient norm to this. Left out: no clipping."""

    # zenflow; without meaning for adamw.
    topk_ratio: float = 0.1
    """Share of the channels that is updated on the device at every step."""
    # Lines end where sentences do: `--help` breaks them there.
    update_interval: int | Literal["auto"] = 4
    """Steps in a window, after which the host updates the deferred channels.
    auto: as many as pile up what weighs as much as one important step (zenflow_jax.AutoWindow)."""
    auto_window_max_interval: int = 8
    """With update_interval auto: steps that a window has at most."""
    auto_window_share: float = 0.99
    """With update_interval auto: share of the leaves in which so much must have piled up."""
    select_interval: int | Literal["auto", "epoch"] | None = None
    """Steps between two selections, a multiple of update_interval if that is a number.
    Left out: 16 windows, of the longest if they adapt.
    auto: when the selected channels are no longer those that matter (zenflow_jax.AutoSelect).
    epoch: at the end of each pass over the text; a shorter run selects only at its start."""
    auto_select_keep: float = 0.9
    """With select_interval auto: share of the best channels' score that need not be bettered."""
    auto_select_max_windows: int = 64
    """With select_interval auto: windows between two selections at most."""
    full_warm_up_rounds: int = 0
    """Steps at the start in which every channel is updated at every step."""
    full_warm_up_share: float | None = None
    """The same as a share of the steps, rounded up; the paper recommends 0.05.
    Left out: full_warm_up_rounds counts, which must be 0 otherwise."""
    overlap_step: bool = True
    """Let the host update run beside the next window."""
    host_kernel: Literal["numba", "numpy"] = "numba"
    """What computes the host update."""
    threads: int | None = None
    """Threads of the host update. Left out: the library chooses."""

    # Devices.
    mesh: str | None = None
    """All devices of all processes as axis=size pairs of the axes data, fsdp and tensor, such as
    data=2,fsdp=4 for eight (train/sharding.py). Left out: one device."""

    # Reporting.
    log_every: int = 10
    """Steps between two rows of the metrics."""
    eval_batches: int = 20
    """Validation batches before and after the training."""
    output_dir: str = "runs/quickstart"
    """Each run has a folder in here and never touches those of other runs."""
    progress: bool = True
    """Show a progress bar where the output is a terminal; plain lines otherwise."""
    run: str | None = None
    """Name of the run's folder in output_dir. Left out: a new numbered one.
    If it holds checkpoints, the run goes on from the newest that is whole."""

    # Checkpoints.
    save_every: int = 100
    """Steps between two checkpoints, written beside the training.
    0: only at the end, and when SIGTERM or SIGINT (Ctrl-C) asks the run to stop."""
    keep: int = 2
    """How many of the newest checkpoints are kept."""
    keep_best: bool = False
    """Also keep the one with the smallest validation loss, which is then found at every save."""

    def __post_init__(self):
        # What zenflow itself judges by the same name (its ratio and intervals) is left to it.
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise SettingsError(_impossible(name, "a finite number above 0", value))
        for name in _AT_LEAST_ZERO:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise SettingsError(_impossible(name, "a finite number of at least 0", value))
        if not self.seed < 2**32:
            raise SettingsError(_impossible("seed", "a number below 2**32", self.seed))
        if not 0 < self.validation_share < 1:
            wanted = "a share between 0 and 1 (0.1 for a tenth)"
            raise SettingsError(_impossible("validation_share", wanted, self.validation_share))
        if not 0 < self.auto_window_share <= 1:
            wanted = "a share above 0 and up to 1 (0.99 for all but one leaf in a hundred)"
            raise SettingsError(_impossible("auto_window_share", wanted, self.auto_window_share))
        if not 0 <= self.auto_select_keep <= 1:
            wanted = "a share from 0 to 1 (0.9 for nine tenths of the score)"
            raise SettingsError(_impossible("auto_select_keep", wanted, self.auto_select_keep))
        share = self.full_warm_up_share
        if share is not None and not 0 <= share < 1:
            wanted = "a share of the steps from 0 to below 1 (0.05 for a twentieth)"
            raise SettingsError(_impossible("full_warm_up_share", wanted, share))
        if share is not None and self.full_warm_up_rounds:
            raise SettingsError(
                "`full_warm_up_share`: expected it or `full_warm_up_rounds`, got both: "
                f"{share} and {self.full_warm_up_rounds}. Take one out of the config file, or pass "
                "--full-warm-up-rounds 0 or --full-warm-up-share None."
            )
        if self.run is not None and (self.run in ("", ".", "..") or not _NAME.fullmatch(self.run)):
            wanted = "the name of a folder in output_dir (letters, digits, . _ -)"
            raise SettingsError(_impossible("run", wanted, repr(self.run)))
        pairs = 2 * self.heads
        if self.width % pairs:
            wanted = (
                f"a multiple of {pairs} (each of the {self.heads} heads turns pairs of numbers), "
                f"such as {math.ceil(self.width / pairs) * pairs}"
            )
            raise SettingsError(_impossible("width", wanted, self.width))

    @property
    def warm_up_rounds(self) -> int:
        """Steps of the full warm-up, in whichever way they were given."""
        if self.full_warm_up_share is None:
            return self.full_warm_up_rounds
        # Rounded first, as 0.07 * 100 is 7.000000000000001.
        return math.ceil(round(self.full_warm_up_share * self.steps, 6))


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Which process of a run this is: all three, or none for a run of one process and under SLURM,
    which knows."""

    coordinator: str | None = None
    """HOST:PORT at which process 0 will listen and the others reach it; the same for all."""
    processes: int | None = None
    """How many there are."""
    process: int | None = None
    """Which of them this is, counted from 0."""

    def __post_init__(self):
        flags = {f"--{field.name}": getattr(self, field.name) for field in dataclasses.fields(self)}
        missing = [flag for flag, value in flags.items() if value is None]
        if len(missing) == len(flags):
            return
        if missing:
            given = " and ".join(flag for flag, value in flags.items() if value is not None)
            raise SettingsError(
                f"expected {', '.join(flags)} together or none of them, got {given} alone. Add "
                f"{' and '.join(missing)}, or leave all out for a run of one process."
            )
        host, _, port = self.coordinator.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 2**16):
            raise SettingsError(
                f"`--coordinator`: expected HOST:PORT, got {self.coordinator}. Name the machine of "
                "process 0 and a port that is free on it, such as 10.0.0.1:29500."
            )
        if not 0 <= self.process < self.processes:
            raise SettingsError(
                f"`--process`: expected a number from 0 to one below --processes, got "
                f"{self.process} with --processes {self.processes}. Processes are counted from 0."
            )


@dataclass(frozen=True, kw_only=True)
class Start:
    """How the run is to begin."""

    fresh: bool = False
    """Refuse to go on with a run or to write over one: the folder of --run must be empty or new."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a command line says."""

    settings: tyro.conf.OmitArgPrefixes[Settings]
    launch: tyro.conf.OmitArgPrefixes[Launch]
    start: tyro.conf.OmitArgPrefixes[Start]


_ABOVE_ZERO = (
    "corpus_megabytes sequence_length batch_size width layers heads ffn steps learning_rate "
    "auto_window_max_interval auto_select_max_windows max_grad_norm threads log_every eval_batches "
    "keep"
).split()

_AT_LEAST_ZERO = "seed warmup_steps weight_decay save_every".split()

_NAME = re.compile(r"[\w.-]+")


def _impossible(name: str, expected: str, got: object) -> str:
    flag = "--" + name.replace("_", "-")
    return f"`{name}`: expected {expected}, got {got}. Change it in the config file or pass {flag}."


def load_settings(path: str | Path) -> Settings:
    """Reads a settings file.

    Args:
        path: A TOML file without tables whose keys are fields of `Settings`; a key that is left
            out keeps its default.

    Raises:
        SettingsError: If the file is missing or not TOML, a key is unknown, a value has the wrong
            type (a whole number does for a float, nothing else is converted) or is impossible.
    """
    path = Path(path)
    hints = get_type_hints(Settings)
    values = {}
    for key, value in _read_toml(path).items():
        if key not in hints:
            raise SettingsError(_unknown_key(path, key, list(hints)))
        if not _fits(value, hints[key]):
            raise SettingsError(
                f"{path}: `{key}`: expected {_described(hints[key])}, got {value!r} "
                f"({_TOML_NAMES.get(type(value), type(value).__name__)}). "
                f"{_remedy(value, hints[key])}"
            )
        is_float = float in (hints[key], *get_args(hints[key]))
        values[key] = float(value) if is_float else value
    try:
        return Settings(**values)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


def read_command_line(argv: Sequence[str], *, program: str) -> Command:
    """What the command `program CONFIG.toml [--key value ...]` says.

    Args:
        argv: The arguments: the path of the file, then settings that go over it.
        program: How the command is called, for the help text.

    Raises:
        SettingsError: As `load_settings`, and if no file is named.
        SystemExit: By tyro, with code 2 after a mistake in the other arguments (reported on
            stderr) and with code 0 after `--help`.
    """
    wants_help = any(argument in ("-h", "--help") for argument in argv)
    if argv and not argv[0].startswith("-"):
        config, overrides, defaults = argv[0], list(argv[1:]), load_settings(argv[0])
    elif wants_help:
        config, overrides, defaults = "CONFIG.toml", ["--help"], Settings()
    else:
        got = f"`{argv[0]}`" if argv else "nothing"
        raise SettingsError(
            f"expected the path of a config file as the first argument, got {got}. For example: "
            f"{program} configs/quickstart.toml --steps 100"
        )
    default = Command(settings=defaults, launch=Launch(), start=Start())
    return tyro.cli(Command, prog=f"{program} {config}", default=default, args=overrides)


def to_toml(settings: Settings) -> str:
    """The settings as the text of a file that `load_settings` reads back as the same settings.

    TOML has no word for "none", so these keys are left out; their default must be none.
    """
    values = dataclasses.asdict(settings)
    # JSON writes strings, finite numbers and booleans just as TOML does.
    return "".join(
        f"{key} = {json.dumps(value)}\n" for key, value in values.items() if value is not None
    )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        got = "a folder" if path.is_dir() else "no such file"
        neighbours = [file.name for file in path.parent.glob("*.toml")]
        near = difflib.get_close_matches(path.name, neighbours, n=1)
        meant = f"Did you mean {path.parent / near[0]}?" if near else "Check the path."
        raise SettingsError(
            f"{path}: expected a config file (TOML), got {got} (looked from {Path.cwd()}). {meant} "
            "One to start from is configs/quickstart.toml."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(
            f'{path}: expected TOML (lines of the form `key = value`, text in "quotes"), got what '
            f"cannot be read: {error}. Correct the file at that place."
        ) from None


def _unknown_key(path: Path, key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    if near:
        remedy = f"Did you mean {' or '.join(f'`{name}`' for name in near)}?"
    else:
        remedy = "Remove it."
    return (
        f"{path}: expected only known keys, got `{key}`. {remedy} "
        f"(The keys are: {', '.join(known)}.)"
    )


_TOML_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a decimal number",
    str: "a string",
    list: "an array",
    dict: "a table",
}


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if isinstance(value, bool):  # Python counts a bool as an int
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _options(hint: Any) -> tuple[Any, ...]:
    # A file cannot say "none", so only the other types are worth naming.
    union = get_origin(hint) in (Union, types.UnionType)
    return tuple(h for h in get_args(hint) if h is not types.NoneType) if union else (hint,)


def _words(hint: Any) -> tuple[str, ...]:
    """The strings that a setting may be, if it may not be just any."""
    return tuple(w for h in _options(hint) if get_origin(h) is Literal for w in get_args(h))


def _described(hint: Any) -> str:
    quoted = [f'"{word}"' for word in _words(hint)]
    kinds = [
        "a number" if h is float else _TOML_NAMES[h]
        for h in _options(hint)
        if get_origin(h) is not Literal
    ]
    if not kinds:
        return "one of " + ", ".join(quoted)
    *others, last = kinds + quoted
    return f"{', '.join(others)} or {last}" if others else last


def _remedy(value: object, hint: Any) -> str:
    words = _words(hint)
    # Digits in quotes, where a number does, are a number with quotes too many.
    meant_as_word = isinstance(value, str) and not (int in _options(hint) and value.isdecimal())
    if words and (meant_as_word or get_origin(hint) is Literal):
        near = difflib.get_close_matches(str(value), words, n=1, cutoff=0.4)
        return f'Did you mean "{near[0]}"?' if near else "Use one of these."
    if isinstance(value, str) and hint is not str:
        return "Remove the quotes."
    if isinstance(value, dict):
        return "Settings are flat: remove the [table] line."
    if isinstance(value, float) and value.is_integer():
        return f"Write {int(value)}."
    if types.NoneType in get_args(hint):
        return "Correct the value, or leave the key out for the default."
    return "Correct the value."
