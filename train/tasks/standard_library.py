"""Reads real text that every machine has: the source files of Python's standard library.

Each byte is a token. The files are shuffled with the seed and cut off at the requested size; the
first files are for validation. The files in each split are joined, with a zero byte before each.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from pathlib import Path

import numpy as np

from train.tasks import Task
from train.tasks.batches import DataError
from train.tasks.language import Windows, as_one

VOCABULARY = 256  # the values of a byte
FILE_START = b"\0"  # occurs in no source file

# Folders with installed packages, parts that many distributions omit, and data tables in code.
SKIPPED_FOLDERS = frozenset(
    "site-packages dist-packages __pycache__ test tests idlelib turtledemo encodings "
    "pydoc_data".split()
)


def make(
    *, seed: int, sequence_length: int, corpus_megabytes: float, validation_share: float
) -> Task:
    """Creates the task of predicting the next byte of Python's source files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    options = {"max_bytes": int(corpus_megabytes * 1e6), "validation_share": validation_share}
    splits = split_files(root, source_files(root), seed=seed, **options)
    train, validation = (windows(root, files, sequence_length) for files in splits)
    checksum = zlib.crc32(validation.tokens, zlib.crc32(train.tokens))
    return Task(train, validation, checksum)


def source_files(root: Path) -> list[Path]:
    """Returns the Python source files below `root`, as sorted relative paths."""
    paths = []
    for folder, subfolders, names in os.walk(root):
        # Changed in place, so that the walk does not enter these folders.
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        paths += [Path(folder, name).relative_to(root) for name in names if name.endswith(".py")]
    return sorted(paths, key=Path.as_posix)


def split_files(
    root: Path, files: list[Path], *, seed: int, max_bytes: int, validation_share: float
) -> tuple[list[Path], list[Path]]:
    """Splits `files`, up to `max_bytes`, into sorted training and validation files."""
    shuffled = [files[i] for i in np.random.default_rng(seed).permutation(len(files))]
    ends = np.cumsum([(root / path).stat().st_size for path in shuffled])
    # A file that crosses a limit belongs to the split before the limit.
    taken = int(np.searchsorted(ends, max_bytes)) + 1
    shuffled, ends = shuffled[:taken], ends[:taken]
    border = int(np.searchsorted(ends, validation_share * ends[-1])) + 1
    border = min(border, len(shuffled) - 1)
    train, validation = (
        sorted(x, key=Path.as_posix) for x in (shuffled[border:], shuffled[:border])
    )
    return train, validation


def windows(root: Path, files: list[Path], sequence_length: int) -> Windows:
    """Returns the text of `files` as overlapping windows."""
    joined = b"".join(FILE_START + (root / path).read_bytes() for path in files)
    text = np.frombuffer(joined, np.uint8)
    if len(text) < sequence_length + 1:
        problem = f"{len(text)} bytes of text are too few for {sequence_length}-byte windows"
        raise DataError(f"{problem}. Raise `corpus_megabytes`.")
    return Windows(as_one(text), sequence_length)
