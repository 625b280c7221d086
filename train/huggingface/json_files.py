"""Reads JSON files that contain an object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_object(path: Path, error: type[Exception]) -> dict[str, Any]:
    """Reads the object in a file; raises `error` if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise error(f"the file {path} cannot be read: {problem.strerror}.") from problem
    except (ValueError, RecursionError) as problem:  # not UTF-8, or not JSON
        raise error(f"{path} is not valid JSON ({problem}).") from problem
    if not isinstance(content, dict):
        raise error(f"{path} contains a JSON {type(content).__name__}, not an object.")
    return content
