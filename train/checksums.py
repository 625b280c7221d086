"""Tells whether a checkpoint is whole, by the sizes and checksums of its files in JSON."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

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
        listed = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except ValueError:  # no UTF-8, or no JSON
        return f"{CHECKSUMS} cannot be read"
    if not _is_listing(listed):
        return f"{CHECKSUMS} is no list of files with their sizes and checksums"
    files = {path.relative_to(folder).as_posix() for path in _files(folder)}
    for item in ITEMS:
        if not any(name.startswith(f"{item}/") for name in listed):
            return f"{CHECKSUMS} has no file of {item}/"
    if missing := sorted(listed.keys() - files):
        return f"{missing[0]} is missing"
    if unknown := sorted(files - listed.keys()):
        return f"{unknown[0]} is not in {CHECKSUMS}"
    for name, (size, checksum) in listed.items():
        actual = _checksum(folder / name)
        if actual[0] != size:
            return f"{name} has {actual[0]} bytes in place of {size}"
        if actual[1] != checksum:
            return f"{name} has another checksum"
    return None


def _is_listing(value: Any) -> bool:
    """Whether that is what `checksums` returns, in JSON."""
    return isinstance(value, dict) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)
        for pair in value.values()
    )
