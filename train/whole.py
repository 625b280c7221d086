"""Files and folders that get their names when they are whole.

Until then each has a name that no user gives: `.NAME.`, 16 hexadecimal digits and `.part`, beside
its place. A kill leaves it behind; the next writer to that place removes it, but not while the
process that writes it lives.
"""

from __future__ import annotations

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
def unfinished(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """A new, empty file or folder beside `path`, to be renamed to it when it is whole.

    What has not been renamed is removed at the end.

    Raises:
        OSError: If it cannot be made.
    """
    path = path.absolute()
    remove_leftovers(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    if folder:
        part.mkdir()
    flags = os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT | os.O_EXCL
    file = os.open(part, flags, 0o666)
    try:
        with suppress(OSError):  # a file system without locks, where leftovers stay
            fcntl.flock(file, fcntl.LOCK_EX)
        yield part
    finally:
        try:
            _put_back(part)
            _remove(part)
        finally:
            os.close(file)


def remove_leftovers(path: Path) -> None:
    """Removes what killed processes have left of `path`, and puts back what they had moved."""
    for left in list(path.parent.iterdir()):
        match = _NAME.fullmatch(left.name)
        if match is None or match[1] != path.name:
            continue
        # Who cannot lock it cannot know that its writer is gone.
        with suppress(OSError):
            file = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _put_back(left)
                _remove(left)
            finally:
                os.close(file)


def exchange(new: Path, path: Path) -> None:
    """Puts a folder in the place of another one, which is removed.

    Raises:
        OSError: If that fails. The old one is in its place then.
    """
    with unfinished(path, folder=True) as part:
        path.rename(_old(part))
        new.rename(path)


def replace_text(path: Path, text: str) -> None:
    """Writes a file that is the old one or the new one, whenever the process is killed."""
    with unfinished(path) as part:
        part.write_text(text, encoding="utf-8")
        part.replace(path)


def _old(part: Path) -> Path:
    """In such a folder, what was at the place before."""
    return part / part.name


def _put_back(part: Path) -> None:
    """Ends an exchange that was not finished. If it fails, nothing may be removed."""
    place = part.with_name(_NAME.fullmatch(part.name)[1])
    if _old(part).exists() and not place.exists():
        _old(part).rename(place)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
