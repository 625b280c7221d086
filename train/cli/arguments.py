"""Reads command lines into dataclasses with argparse, and explains a mistake in one line.

A field that is an `option` has its name, type, default, help and limits in one place. In the help,
options are grouped by the class that declares them; a field that is a dataclass stands for all
options of that class. A type such as `Annotated[str, "DIR"]` sets the value's name in the help.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import inspect
import math
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, field, fields, is_dataclass
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

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
    if tasks:
        help = f"{tasks.replace(' ', ', ')}: {help}"
    metadata = {"help": help, "positional": positional, "tasks": tasks}
    metadata |= {"above": above, "least": least, "argparse": argparse_options}
    return field(default=default, metadata=metadata)


def out_of_bounds(options: Any) -> Iterator[tuple[str, str]]:
    """Yields the name of each option that is out of bounds, with its bounds in words."""
    for spec in fields(options):
        value, metadata = getattr(options, spec.name), spec.metadata
        above, least = metadata.get("above"), metadata.get("least")
        if value is None or isinstance(value, str) or above is least is None:
            continue
        if above is not None and not (math.isfinite(value) and value > above):
            yield spec.name, f"a finite number above {above}"
        if least is not None and not (math.isfinite(value) and value >= least):
            yield spec.name, f"a finite number of at least {least}"


def read_arguments(
    kind: type, argv: Sequence[str] | None, *, program: str, default: Any = None
) -> Any:
    """Reads the arguments `argv` into an object of the dataclass `kind`; `--help` exits."""
    # As wide as the terminal, or 100 columns without a terminal.
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    positional = [x.name for x in fields(kind) if x.metadata.get("positional")]
    parser = _Parser(
        usage=" ".join([program, *map(str.upper, positional), "[--option value ...]"]),
        description=kind.__doc__,
        allow_abbrev=False,
        formatter_class=partial(argparse.HelpFormatter, width=width, max_help_position=30),
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    _add_options(parser, kind, default, {kind: parser})
    argv = sys.argv[1:] if argv is None else argv
    if "--version" in argv:
        import zenflow_jax  # imports jax, which takes a second

        print(f"zenflow_jax {zenflow_jax.__version__}")
        raise SystemExit
    # Names with underscores also work.
    words = [re.sub(r"^--\w[\w-]*", lambda m: m[0].replace("_", "-"), word) for word in argv]
    values, unknown = parser.parse_known_args(words)
    if unknown:
        known = [x.replace("_", "-") for x in vars(values) if x not in positional]
        problems = []
        for name in (x for x in unknown if x.startswith("-")):
            remedy = did_you_mean(name, known, prefix="--")
            if name[2:] in positional:
                remedy = " Write only its value."
            problems.append(f"unknown option {name}.{remedy}")
        extra = f"unexpected argument {' '.join(unknown)!r}. Quote texts with spaces."
        raise ArgumentError(f"{' '.join(problems) or extra} All options are in {program} --help")
    return _build(kind, vars(values))


def did_you_mean(name: str, known: Sequence[str], *, prefix: str = "") -> str:
    """Returns a question that suggests similar `known` names; "" if none is similar."""
    # The name may be an option, a key in a file, or `--name=value`.
    name = name.removeprefix("--").partition("=")[0]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(f'{prefix}{x}' for x in near)}?" if near else ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(message.removeprefix("argument "))


def _add_options(
    parser: argparse.ArgumentParser, kind: Any, default: Any, groups: dict[type, Any]
) -> None:
    """Adds the fields of a dataclass, each to the group of the class that declares it."""
    hints = get_type_hints(kind, include_extras=True)
    for spec in fields(kind):
        hint, name = hints[spec.name], spec.name
        value = spec.default if default is None else getattr(default, name)
        if is_dataclass(hint):
            _add_options(parser, hint, value, groups)
            continue
        owner = next(base for base in kind.__mro__ if name in inspect.get_annotations(base))
        if owner not in groups:
            groups[owner] = parser.add_argument_group((owner.__doc__ or "").rstrip("."))
        group = groups[owner]
        text, kinds, flag = spec.metadata["help"], _kinds(hint), name.replace("_", "-")
        if hint is bool:
            action, text = argparse.BooleanOptionalAction, text + " (default: on)" * value
            group.add_argument(f"--{flag}", action=action, default=value, help=text)
            continue
        if value not in (None, MISSING):
            text += f" (default: {value})".replace("%", "%%")
        words = "|".join(_word(kind) for kind in kinds if kind is not NoneType)
        options = {"type": partial(_read, kinds), "metavar": words, "default": value, "help": text}
        options |= spec.metadata["argparse"]
        if not spec.metadata["positional"]:
            group.add_argument(f"--{flag}", required=value is MISSING, **options)
            continue
        nargs = None if value is MISSING else "?"
        group.add_argument(name, **options | {"nargs": nargs, "metavar": name.upper()})


def _kinds(hint: Any) -> list[Any]:
    """Returns the types that a value may have, None first."""
    if get_origin(hint) not in (Union, UnionType):
        return [hint]
    kinds = [kind for member in get_args(hint) for kind in _kinds(member)]
    return sorted(kinds, key=lambda kind: kind is not NoneType)


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) is Annotated:
        return get_args(kind)[1]
    return {int: "INT", float: "FLOAT"}.get(kind, "TEXT")


def _read(kinds: Sequence[Any], text: str) -> Any:
    for kind in kinds:
        if kind is NoneType or get_origin(kind) is Literal:
            if text in (get_args(kind) or ("None",)):
                return None if kind is NoneType else text
            continue
        with contextlib.suppress(ValueError):
            return get_args(kind)[0](text) if get_origin(kind) is Annotated else kind(text)
    words = " or ".join("None" if kind is NoneType else _word(kind) for kind in kinds)
    raise argparse.ArgumentTypeError(f"must be {words}, but is {text!r}.")


def _build(kind: Any, values: dict[str, Any]) -> Any:
    """Builds the dataclass and its nested dataclasses from the values of all options."""
    nested = {n: _build(h, values) for n, h in get_type_hints(kind).items() if is_dataclass(h)}
    built = kind(**{spec.name: (values | nested)[spec.name] for spec in fields(kind)})
    for name, expected in out_of_bounds(built):
        raise ArgumentError(f"`{name}`: must be {expected}, but is {getattr(built, name)}.")
    return built
