"""Real tokens that every machine has: the bytes of the running Python's standard library."""

import sysconfig
from pathlib import Path

import numpy as np


def batches(count: int, batch: int, length: int) -> np.ndarray:
    """`count` batches of text, int32 `(count, batch, length + 1)`, a byte for a token.

    Files in the order of their names, until there is enough; the same Python gives the same text.

    Raises:
        ValueError: If there is less text than that.
    """
    needed = count * batch * (length + 1)
    found = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(found) >= needed:
            break
        found += path.read_bytes()
    if len(found) < needed:
        raise ValueError(
            f"expected {needed:,} bytes of Python's sources, got {len(found):,}. Ask for fewer or "
            "smaller batches."
        )
    tokens = np.frombuffer(bytes(found[:needed]), np.uint8).astype(np.int32)
    return tokens.reshape(count, batch, length + 1)
