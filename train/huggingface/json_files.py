"""Turns JSON into values, and names files that contain something else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_DECODER = json.JSONDecoder()
_NEXT = re.compile(r"[^ \t\n\r]")  # not JSON's white space
# An escape in a JSON string; group 1 is half of a surrogate pair, which is not a character.
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)

POINTER = b"version https://git-lfs"


def documents(text: str) -> list[tuple[int, Any]]:
    """Returns the JSON values in a text, each with its position.

    Raises:
        json.JSONDecodeError: If the text is not JSON, or a string is not text.
    """
    values, end = [], 0
    while first := _NEXT.search(text, end):
        start = first.start()
        try:
            value, end = _DECODER.raw_decode(text, start)
        except json.JSONDecodeError:
            raise
        except (ValueError, RecursionError) as error:  # a number or a nesting beyond limits
            raise json.JSONDecodeError(str(error), text, start) from error
        values.append((start, value))
    for escape in _ESCAPE.finditer(text) if "\\u" in text else ():
        if escape[1]:
            problem = f"{escape[0]} is half of a character (a lone surrogate)"
            raise json.JSONDecodeError(problem, text, escape.start())
    return values


def loads(text: str) -> Any:
    """Returns the only JSON value in a text, with the errors of `documents`."""
    values = documents(text)
    if len(values) != 1:
        problem = "Extra data" if values else "Expecting value"
        raise json.JSONDecodeError(problem, text, values[1][0] if values else len(text))
    return values[0][1]


def read_object(path: Path, error: type[Exception]) -> dict[str, Any]:
    """Reads the object in a file; raises `error` if there is none."""
    try:
        content = loads(path.read_text(encoding="utf-8-sig"))
    except OSError as problem:
        raise error(f"the file {path} cannot be read: {problem.strerror}.") from problem
    except ValueError as problem:  # not UTF-8, or not JSON
        raise error(f"{path} is not valid JSON ({problem}). {foreign(path)}") from problem
    if not isinstance(content, dict):
        raise error(f"{path} contains a JSON {type(content).__name__}, not an object.")
    return content


def foreign(path: Path) -> str:
    """Returns sentences about a file that cannot be read: its content, and a remedy."""
    with path.open("rb") as file:
        head = file.read(40)
    if head.startswith(POINTER):
        return "It is a git-lfs pointer, without the content. Run `git lfs pull` where it is cloned."
    begin = f"begins with {head!r}" if head else "is empty"
    return f"The file {begin}. Copy or download it again."
