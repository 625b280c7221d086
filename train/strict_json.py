"""JSON in which no object has a key twice: Python's reader takes the last one without a word."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


def loads(text: str) -> Any:
    """Parses the text; raises `ValueError` if it is no JSON, or an object has a key twice."""
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} is in one object twice")
    return unique
