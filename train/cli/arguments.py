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
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
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

    A `positional` value has no name. `out_of_bounds` finds values that are not `above` a number, or
    not at least `least`. The help lists the `tasks` that read the option; "" means all tasks.
    """
    help = f"{tasks.replace(' ', ', ')}: {help}" if tasks else help
    metadata = {"help": help, "positional": positional, "tasks": tasks, "above": above}
    return field(default=default, metadata=metadata | {"least": least, "more": argparse_options})


def out_of_bounds(options: Any) -> Iterator[tuple[str, str]]:
    """Yields the name of each option that is out of bounds, with its bounds in words."""
    for spec in fields(options):
        value = getattr(options, spec.name)
        above, least = spec.metadata.get("above"), spec.metadata.get("least")
        if isinstance(value, int | float):
            if above is not None and not above < value < math.inf:
                yield spec.name, f"a finite number above {above}"
            if least is not None and not least <= value < math.inf:
                yield spec.name, f"a finite number of at least {least}"


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
    if "--version" in argv:
        import zenflow_jax  # imports jax, which takes a second

        print(f"zenflow_jax {zenflow_jax.__version__}")
        raise SystemExit
    # As wide as the terminal, or 100 columns without a terminal.
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    specs = [spec for kind in kinds for spec in fields(kind)]
    positional = [x.name.upper() for x in specs if x.metadata["positional"]]
    parser = _Parser(
        usage=" ".join([program, *positional, "[--option value ...]"]),
        description=description,
        allow_abbrev=False,
        formatter_class=partial(argparse.HelpFormatter, width=width, max_help_position=30),
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    groups: dict[type, Any] = {kinds[0]: parser}
    for kind in kinds:
        _add_options(parser, kind, defaults or {}, groups)
    # Names with underscores also work.
    words = [re.sub(r"^--\w[\w-]*", lambda m: m[0].replace("_", "-"), word) for word in argv]
    values, unknown = parser.parse_known_args(words)
    if unknown:
        raise ArgumentError(
            f"unknown: {' '.join(unknown)}. All options are in {program} --help. Quote a text with "
            "spaces."
        )
    built = [kind(**{x.name: getattr(values, x.name) for x in fields(kind)}) for kind in kinds]
    for options in built:
        for name, expected in out_of_bounds(options):
            value = getattr(options, name)
            raise ArgumentError(f"`{name}`: must be {expected}, but is {value}.")
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
