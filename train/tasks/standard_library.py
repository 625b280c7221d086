"""Real text that every machine has: the source files of the running Python's standard library.

A byte is a token. The files are shuffled with the seed, and cut off where the wanted size is
reached; the first ones validate. Each side is joined, one zero byte before each file.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.data import DataError
from train.tasks import Task
from train.tasks.language import Windows, as_one

VOCABULARY = 256  # the values of a byte

FILE_START = b"\0"  # occurs in no source file

# What is installed below it, what many distributions leave out, and tables in the shape of code.
SKIPPED_FOLDERS = frozenset(
    "site-packages dist-packages __pycache__ test tests idlelib turtledemo encodings "
    "pydoc_data".split()
)


class Split(NamedTuple):
    """Which files train and which validate: paths relative to the root, each side sorted."""

    train: tuple[Path, ...]
    validation: tuple[Path, ...]


def make(
    *, seed: int, sequence_length: int, corpus_megabytes: float, validation_share: float
) -> Task:
    """The task of predicting the next byte of Python's source files."""
    root, max_bytes = folder(), int(corpus_megabytes * 1e6)
    split = split_files(
        root, source_files(root), seed=seed, max_bytes=max_bytes, validation_share=validation_share
    )
    train, validation = (windows(root, files, sequence_length) for files in split)
    checksum = 0
    for part in (train, validation):
        checksum = zlib.crc32(part.tokens, checksum)
    return Task(
        name="standard_library",
        kind="decoder",
        train=train,
        validation={"validation": validation},
        checksum=checksum,
    )


def folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path) -> list[Path]:
    """Paths of the Python source files below `root`, relative to it and sorted."""
    paths = []
    for folder, subfolders, names in os.walk(root):
        # In place, so that the walk does not enter them: site-packages can be huge.
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        paths += [Path(folder, name).relative_to(root) for name in names if name.endswith(".py")]
    if not paths:
        raise DataError(
            f"expected the source files (*.py) of Python's standard library below {root}, got none."
        )
    return sorted(paths, key=Path.as_posix)


def split_files(
    root: Path, files: list[Path], *, seed: int, max_bytes: int, validation_share: float
) -> Split:
    """The seeded split of `files`, by a share of their bytes, of at most `max_bytes`."""
    shuffled = [files[i] for i in np.random.default_rng(seed).permutation(len(files))]
    ends = np.cumsum([(root / path).stat().st_size for path in shuffled])
    # The file that crosses a limit still belongs to the side before it.
    taken = int(np.searchsorted(ends, max_bytes)) + 1
    shuffled, ends = shuffled[:taken], ends[:taken]
    if len(shuffled) < 2:
        raise DataError(
            f"expected text of at least two files, got {len(shuffled)} of the {len(files)} below "
            f"{root} within {max_bytes} bytes. Raise `corpus_megabytes`."
        )
    border = int(np.searchsorted(ends, validation_share * ends[-1])) + 1
    border = min(border, len(shuffled) - 1)
    return Split(
        train=tuple(sorted(shuffled[border:], key=Path.as_posix)),
        validation=tuple(sorted(shuffled[:border], key=Path.as_posix)),
    )


def windows(root: Path, files: tuple[Path, ...], sequence_length: int) -> Windows:
    """The text of `files` as windows, which overlap by one."""
    joined = b"".join(FILE_START + (root / path).read_bytes() for path in files)
    text = np.frombuffer(joined, np.uint8)
    if len(text) < sequence_length + 1:
        raise DataError(
            f"expected text for at least one window of {sequence_length} bytes, got {len(text)} "
            "bytes. Raise `corpus_megabytes`."
        )
    return Windows(as_one(text), sequence_length)
