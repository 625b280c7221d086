"""JSON from outside: files with an object, and objects without duplicate keys."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any


def read_object(path: Path, error: type[Exception]) -> dict[str, Any]:
    """Reads the object in a file; raises `error` if there is none."""
    try:
        content = loads_unique(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise error(f"the file {path} cannot be read: {problem.strerror}.") from problem
    except (ValueError, RecursionError) as problem:  # not UTF-8, or not JSON
        raise error(f"{path} is not valid JSON ({problem}).") from problem
    if not isinstance(content, dict):
        raise error(f"{path} has a JSON {type(content).__name__}, not an object.")
    return content


def loads_unique(text: str) -> Any:
    """Parses JSON like `json.loads`, but refuses an object with a duplicate key."""
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {key!r} twice")
    return unique
