"""Turns JSON into values, and names files that contain something else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

POINTER = b"version https://git-lfs"

_DECODER = json.JSONDecoder()
_START = re.compile(r"[^ \t\n\r]")
# An escape in a JSON string; group 1 is half of a surrogate pair, which is not a character.
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)


def documents(text: str) -> list[tuple[int, Any]]:
    """Returns the JSON values in a text, with their positions; raises `JSONDecodeError`."""
    values, end = [], 0
    try:
        while start := _START.search(text, end):
            value, end = _DECODER.raw_decode(text, start.start())
            values.append((start.start(), value))
    except (ValueError, RecursionError) as error:  # also for numbers and nesting beyond limits
        problem, place = getattr(error, "msg", str(error)), getattr(error, "pos", end)
        raise json.JSONDecodeError(problem, text, place) from error
    for escape in _ESCAPE.finditer(text) if "\\u" in text else ():
        if escape[1]:
            problem = f"{escape[0]} is half of a character (a lone surrogate)"
            raise json.JSONDecodeError(problem, text, escape.start())
    return values


def read_object(path: Path, error: type[Exception], *, optional: bool = False) -> dict[str, Any]:
    """Reads the object in a file; raises `error` if there is none. `optional`: {} if no file."""
    if optional and not path.is_file():
        return {}
    try:
        values = documents(path.read_text(encoding="utf-8-sig"))
    except OSError as problem:
        raise error(f"the file {path} cannot be read: {problem.strerror}.") from problem
    except ValueError as problem:  # not UTF-8, or not JSON
        raise error(f"{path} is not valid JSON ({problem}). {foreign(path)}") from problem
    if len(values) != 1 or not isinstance(values[0][1], dict):
        raise error(f"{path} must contain one JSON object. {foreign(path)}")
    return values[0][1]


def foreign(path: Path) -> str:
    """Returns a sentence that tells what a file is instead, if known, and how to get the file."""
    with path.open("rb") as file:
        head = file.read(100).lstrip()
    if head.startswith(POINTER):
        return "It is a git-lfs pointer. Run `git lfs pull` in the repository, or download it."
    kind = "It is a web page. " if head.startswith(b"<") else "" if head else "It is empty. "
    return f"{kind}Download or copy the file again."
