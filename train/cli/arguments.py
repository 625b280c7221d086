"""Reads command lines into dataclasses with argparse, and explains a mistake in one line.

A field that is an `option` has its name, type, default, help and limits in one place. The help
groups options by the class that declares them.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from train import Failure


class ArgumentError(Failure):
    """A mistake in a command line."""


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    positional: bool = False,
    above: int | None = None,
    least: int | None = None,
    tasks: str = "",
    **argparse_options: Any,
) -> Any:
    """Declares an option as a field of a dataclass; an option without a default is required.

    A `positional` value has no name. `check_bounds` rejects values that are not `above` a number,
    or not at least `least`. The help lists the `tasks` that read the option; "" means all tasks.
    """
    help = f"{tasks.replace(' ', ', ')}: {help}" if tasks else help
    metadata = {"help": help, "positional": positional, "tasks": tasks, "above": above}
    return field(default=default, metadata=metadata | {"least": least, "more": argparse_options})


def check_bounds(options: Any) -> None:
    """Raises `ArgumentError` for an option that is out of bounds."""
    for spec in fields(options):
        value, expected = getattr(options, spec.name), ""
        above, least = spec.metadata.get("above"), spec.metadata.get("least")
        if isinstance(value, int | float):
            if above is not None and not above < value < math.inf:
                expected = f"above {above}"
            if least is not None and not least <= value < math.inf:
                expected = f"of at least {least}"
        if expected:
            problem = f"`{spec.name}`: must be a finite number {expected}, but is {value}."
            raise ArgumentError(problem)


def read_arguments(
    kinds: Sequence[type],
    argv: Sequence[str] | None,
    *,
    program: str,
    description: str | None,
    defaults: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Reads the arguments `argv` into an object of each dataclass; `--help` exits.

    The `defaults` override those of the dataclasses.
    """
    argv = sys.argv[1:] if argv is None else argv
    specs = [spec for kind in kinds for spec in fields(kind)]
    positional = [x.name.upper() for x in specs if x.metadata["positional"]]
    parser = _Parser(
        usage=" ".join([program, *positional, "[--option value ...]"]),
        description=description,
        allow_abbrev=False,
        formatter_class=partial(argparse.HelpFormatter, max_help_position=30),
    )
    groups: dict[type, Any] = {kinds[0]: parser}
    for kind in kinds:
        _add_options(parser, kind, defaults or {}, groups)
    # Names with underscores also work.
    words = [re.sub(r"^--\w[\w-]*", lambda m: m[0].replace("_", "-"), word) for word in argv]
    values = parser.parse_args(words)
    built = [kind(**{x.name: getattr(values, x.name) for x in fields(kind)}) for kind in kinds]
    for options in built:
        check_bounds(options)
    return built


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(message.removeprefix("argument "))


def _add_options(
    parser: _Parser, kind: Any, defaults: Mapping[str, Any], groups: dict[type, Any]
) -> None:
    """Adds the fields of a dataclass, each to the group of the class that declares it."""
    hints = get_type_hints(kind)
    for spec in fields(kind):
        hint, name = hints[spec.name], spec.name
        value = defaults.get(name, spec.default)
        owner = next(base for base in kind.__mro__ if name in inspect.get_annotations(base))
        if owner not in groups:
            groups[owner] = parser.add_argument_group((owner.__doc__ or "").rstrip("."))
        text, flag = spec.metadata["help"], f"--{name.replace('_', '-')}"
        if hint is bool:
            text, action = text + " (default: on)" * value, argparse.BooleanOptionalAction
            groups[owner].add_argument(flag, action=action, default=value, help=text)
            continue
        if value not in (None, MISSING):
            text += f" (default: {value})".replace("%", "%%")
        # None is tried first.
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]
        kinds = sorted(kinds, key=lambda kind: kind is not NoneType)
        words = "|".join(_word(kind) for kind in kinds if kind is not NoneType)
        more = {"type": partial(_read, kinds), "metavar": words, "default": value, "help": text}
        more |= spec.metadata["more"]
        if spec.metadata["positional"]:
            more |= {"nargs": None if value is MISSING else "?", "metavar": name.upper()}
            groups[owner].add_argument(name, **more)
        else:
            groups[owner].add_argument(flag, required=value is MISSING, **more)


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {int: "INT", float: "FLOAT", NoneType: "None"}.get(kind, "TEXT")


def _read(kinds: Sequence[Any], text: str) -> Any:
    for kind in kinds:
        if kind is NoneType and text == "None":
            return None
        if get_origin(kind) is Literal and text in get_args(kind):
            return text
        if kind is not NoneType and get_origin(kind) is not Literal:
            with contextlib.suppress(ValueError):
                return kind(text)
    words = " or ".join(map(_word, kinds))
    raise argparse.ArgumentTypeError(f"must be {words}, but is {text!r}.")
