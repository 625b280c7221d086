"""Writes files and folders atomically: they get their final names when they are complete.

Until then they are in the same folder under a temporary name: `.NAME.`, 16 hexadecimal digits,
`.part`. The next writer to the same path removes such leftovers of killed processes.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NAME = re.compile(r"\.(.+)\.[0-9a-f]{16}\.part")


@contextmanager
def atomic_path(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """Yields a new, empty file or folder next to `path`, renamed to `path` when the block ends.

    It replaces an existing file or empty folder at `path`. The block may remove or move it first.
    """
    path = path.absolute()
    remove_leftovers(path)
    part, lock = _locked_part(path, folder)
    try:
        yield part
        if part.exists():
            sync_all(part)
            part.replace(path)
            _sync(path.parent)
    finally:
        _remove(part)
        os.close(lock)


def write_text_atomically(path: Path, text: str) -> None:
    """Writes a file atomically: if the process is killed, either the old or the new file exists."""
    with atomic_path(path) as part:
        part.write_text(text, encoding="utf-8")


def exchange(new: Path, old: Path) -> None:
    """Exchanges two folders, atomically unless the file system does not support that."""
    cwd, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    at_once = getattr(ctypes.CDLL(None), "renameat2", None)  # missing in older C libraries
    if at_once is None or at_once(cwd, os.fsencode(new), cwd, os.fsencode(old), both):
        aside = _new_name(old)
        old.rename(aside)
        new.rename(old)
        aside.rename(new)


def remove_leftovers(path: Path) -> None:
    """Removes temporary files that killed processes have left next to `path`."""
    for left in list(path.parent.iterdir()):
        match = _NAME.fullmatch(left.name)
        if match is None or match[1] != path.name:
            continue
        # Without locks, the writer may still be running, so the leftover stays.
        with suppress(OSError):
            file = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(left)
            finally:
                os.close(file)


def is_partial(path: Path) -> bool:
    """Returns whether a path is a temporary path of `atomic_path`, or is inside such a path."""
    return any(map(_NAME.fullmatch, path.parts))


def finished(path: Path) -> Path:
    """Returns the final path for a temporary path or a path inside it, or the path unchanged."""
    return Path(*(m[1] if (m := _NAME.fullmatch(name)) else name for name in path.parts))


def _locked_part(path: Path, folder: bool) -> tuple[Path, int]:
    """Makes and locks a temporary path; retries if another process has already removed it."""
    flags = os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT | os.O_EXCL
    while True:
        part = _new_name(path)
        if folder:
            part.mkdir()
        try:
            file = os.open(part, flags, 0o666)
        except FileNotFoundError:
            if folder:
                continue
            raise
        with suppress(OSError):  # a file system without locks keeps leftovers
            fcntl.flock(file, fcntl.LOCK_EX)
        if part.exists():
            return part, file
        os.close(file)


def _new_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def sync_all(path: Path) -> None:
    """Waits until a file, or a folder with its contents, is on disk."""
    for written in [*path.rglob("*"), path]:
        _sync(written)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
