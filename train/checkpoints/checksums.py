"""Checks whether a checkpoint is intact, by the sizes and checksums of its files."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

CHECKSUMS = "checksums.json"


def checksums(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns the size and CRC-32 of each file in the items' folders."""
    # Files next to the items are left out: orbax writes them last, and does not need to read them.
    files = sorted(p for p in folder.glob("*/**/*") if p.is_file())
    return {p.relative_to(folder).as_posix(): _checksum(p) for p in files}


def _checksum(path: Path) -> tuple[int, int]:
    size = checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return size, checksum


def find_damage(folder: Path) -> str | None:
    """Describes the first damage in a checkpoint; None if it is intact."""
    try:
        text = (folder / CHECKSUMS).read_text(encoding="utf-8")
        listed = {name: (int(size), int(crc)) for name, (size, crc) in json.loads(text).items()}
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except (ValueError, TypeError, AttributeError):  # not UTF-8, not JSON, or another object
        return f"{CHECKSUMS} cannot be read"
    files = checksums(folder)
    for name in sorted(listed.keys() | files.keys()):
        if name not in files:
            return f"{name} is missing"
        if name not in listed:
            return f"{name} is not in {CHECKSUMS}"
        if files[name] != listed[name]:
            return f"{name} does not match {CHECKSUMS}"
    return None
