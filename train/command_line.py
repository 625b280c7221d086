"""The settings of a run, read from a file and a command line.

    configs/quickstart.toml      overrides the defaults of `Settings`
    --learning-rate 1e-3         overrides the file
    --process 1, --fresh, --plan `Launch`, `Start`, `Planning`: never in a file

The file is TOML without tables. An unknown key, a wrong type or an impossible value is a
`SettingsError`.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from train.arguments import did_you_mean, read_arguments
from train.settings import Command, Launch, Planning, Settings, SettingsError, Start

PROGRAM = "python -m train.finetune"


def load_settings(path: str | Path) -> Settings:
    """Reads a settings file.

    Args:
        path: A TOML file whose keys are fields of `Settings`; the others keep their defaults.

    Raises:
        SettingsError: If the file is missing or not TOML, a key is unknown, or a value has the
            wrong type (a whole number does for a float, nothing else is converted) or is
            impossible.
    """
    path = Path(path)
    hints = get_type_hints(Settings)
    values = {}
    for key, value in _read_toml(path).items():
        if key not in hints:
            known = list(hints)
            raise SettingsError(
                f"{path}: expected only known keys, got `{key}`.{did_you_mean(key, known)} (The "
                f"keys are: {', '.join(known)}.)"
            )
        if not _fits(value, hints[key]):
            raise SettingsError(
                f"{path}: `{key}`: expected {_described(hints[key])}, got {value!r} "
                f"({_TOML_NAMES.get(type(value), type(value).__name__)})."
            )
        is_float = float in _options(hints[key]) and not isinstance(value, str)
        values[key] = float(value) if is_float else value
    try:
        return Settings(**values)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


def read_command_line(argv: Sequence[str], *, program: str) -> Command:
    """Reads the command `program CONFIG.toml [--key value ...]`.

    Args:
        argv: The arguments: the path of the file, then settings that override it.
        program: The command's name in the help text.

    Raises:
        SettingsError: As `load_settings`, or if no file is named.
        SystemExit: As `read_arguments`.
    """
    if argv and not argv[0].startswith("-"):
        config, overrides, settings = argv[0], list(argv[1:]), load_settings(argv[0])
    elif "-h" in argv or "--help" in argv:
        config, overrides, settings = "CONFIG.toml", ["--help"], Settings()
    else:
        raise SettingsError(
            f"expected the path of a config file as the first argument, got "
            f"{argv[0] if argv else 'nothing'}. For example: {program} configs/quickstart.toml"
        )
    default = Command(settings=settings, launch=Launch(), start=Start(), planning=Planning())
    return read_arguments(Command, overrides, program=f"{program} {config}", default=default)


def to_toml(settings: Settings) -> str:
    """The text of a file that `load_settings` reads back as the same settings.

    TOML cannot say "none", so these keys are left out; their default must be none.
    """
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
            f"{path}: expected a config file (TOML), got: {error.strerror}.{near}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(
            f'{path}: expected TOML (lines of the form `key = value`, text in "quotes"), got what '
            f"cannot be read: {error}."
        ) from None


_TOML_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "a table",
}


def _options(hint: Any) -> tuple[Any, ...]:
    """The types of a union, without None, which a file cannot say."""
    union = get_origin(hint) in (Union, types.UnionType)
    return tuple(h for h in get_args(hint) if h is not types.NoneType) if union else (hint,)


def _fits(value: object, hint: Any) -> bool:
    if len(options := _options(hint)) != 1 or options[0] is not hint:
        return any(_fits(value, option) for option in options)
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if isinstance(value, bool):  # Python counts a bool as an int
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _described(hint: Any) -> str:
    kinds = []
    for option in _options(hint):
        if get_origin(option) is Literal:
            kinds += [f'"{word}"' for word in get_args(option)]
        else:
            kinds.append(_TOML_NAMES[option])
    return " or ".join(kinds)
