"""Reads command lines by tyro, and says in one line what is wrong in one."""

from __future__ import annotations

import contextlib
import difflib
import io
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import tyro


def read_arguments(
    kind: type, argv: Sequence[str] | None, *, program: str, default: Any = None
) -> Any:
    """Reads the arguments `argv` into an object of the dataclass `kind`; exits after a mistake."""
    options = {} if default is None else {"default": default}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            values, unknown = tyro.cli(
                kind, prog=program, args=argv, return_unknown_args=True, **options
            )
    except SystemExit as end:
        text = printed.getvalue()
        sys.stderr.write(f"error: {_of_box(text)}\n" if end.code else text)
        raise
    sys.stderr.write(printed.getvalue())  # warnings
    if unknown:
        name = next((x for x in unknown if x.startswith("-")), unknown[0])
        sys.stderr.write(
            f"error: unknown option {name}.{did_you_mean(name, _options(kind), prefix='--')} All "
            f"are in {program} --help\n"
        )
        raise SystemExit(2)
    return values


def did_you_mean(name: str, known: Sequence[str], *, prefix: str = "") -> str:
    """A question that names which of the `known` may be meant; "" if none is similar."""
    name = name.lstrip("-").partition("=")[0]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(f'{prefix}{x}' for x in near)}?" if near else ""


def _options(kind: Any) -> list[str]:
    names = []
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint = hints[field.name]
        names += _options(hint) if is_dataclass(hint) else [field.name.replace("_", "-")]
    return names


def _of_box(text: str) -> str:
    """The sentence in a box of tyro's, without the hints that follow it."""
    rows = []
    for line in text.splitlines():
        row = line.strip(" │")
        if rows and (not row or row.startswith("─")):
            break
        if row and row[0] not in "╭╰─":
            rows.append(row)
    return " ".join(rows).removeprefix("Error parsing ")
