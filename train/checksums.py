"""Tells whether a checkpoint is whole, by the sizes and checksums of its files in JSON."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

CHECKSUMS = "checksums.json"
#: In a checkpoint that an earlier version has packed, the checksums of what it was.
UNPACKED = "unpacked.json"

# The folders that every checkpoint has.
ITEMS = ("run", "state")


def checksums(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of each file in the folders of the items."""
    return {p.relative_to(folder).as_posix(): _checksum(p) for p in _files(folder)}


def _files(folder: Path) -> list[Path]:
    # Not those beside the items, which orbax writes when all is sealed, and need not read.
    return sorted(p for p in folder.glob("*/**/*") if p.is_file())


def _checksum(path: Path) -> tuple[int, int]:
    size = checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return size, checksum


def damage(folder: Path) -> str | None:
    """The first damage in a checkpoint; None if it is whole."""
    if (folder / UNPACKED).exists():
        return f"it is packed (python -m train.compress --restore {folder} makes it what it was)"
    try:
        text = (folder / CHECKSUMS).read_text(encoding="utf-8")
        listed = {name: (int(size), int(crc)) for name, (size, crc) in json.loads(text).items()}
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except (ValueError, TypeError, AttributeError):  # no UTF-8, no JSON, or another object
        return f"{CHECKSUMS} cannot be read"
    files = {path.relative_to(folder).as_posix() for path in _files(folder)}
    for item in ITEMS:
        if not any(name.startswith(f"{item}/") for name in listed):
            return f"{CHECKSUMS} has no file of {item}/"
    if missing := sorted(listed.keys() - files):
        return f"{missing[0]} is missing"
    if unknown := sorted(files - listed.keys()):
        return f"{unknown[0]} is not in {CHECKSUMS}"
    for name, listing in listed.items():
        actual = _checksum(folder / name)
        if actual[0] != listing[0]:
            return f"{name} has {actual[0]} bytes in place of {listing[0]}"
        if actual != listing:
            return f"{name} has another checksum"
    return None
