"""JSON in which no object has a key twice: Python's reader takes the last one without a word."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


def loads(text: str) -> Any:
    """What the text holds.

    Raises:
        ValueError: If it is no JSON, or an object has a key twice.
    """
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} is in one object twice")
    return found
