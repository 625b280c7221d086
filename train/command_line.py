"""The settings of a run, read from a file and a command line.

    configs/quickstart.toml      what the file says goes over the defaults of `Settings`
    --learning-rate 1e-3         what the command line says goes over the file
    --process 1                  `Launch`: which of several processes this is; never in a file
    --fresh                      `Start`: what is of this start alone; never in a file
    --plan                       `Planning`: likewise

The file is TOML without tables. Nothing is guessed: an unknown key, a wrong type or an impossible
value is a `SettingsError`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from train.arguments import meant, read_arguments
from train.settings import Command, Launch, Planning, Settings, SettingsError, Start


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
        is_float = float in (hints[key], *get_args(hints[key])) and not isinstance(value, str)
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
        SettingsError: As `load_settings`, if no file is named, or a value is impossible.
        SystemExit: As `read_arguments`.
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
    default = Command(settings=defaults, launch=Launch(), start=Start(), planning=Planning())
    return read_arguments(Command, overrides, program=f"{program} {config}", default=default)


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
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
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
    options = [name.replace("_", "-") for name in known]
    near = [name.replace("-", "_") for name in meant(key, options)]
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
