"""Real text that every machine has: the source files of the running Python's standard library.

A byte is a token, so there is no tokenizer to fetch. What is read, and how it is split:

1. All `*.py` files below the standard library, in the order of their relative path, without the
   folders in `SKIPPED_FOLDERS`.
2. A shuffle of these files with the seed, cut off where the wanted size is reached.
3. From the front of that order, files go to validation until they hold the wanted share of the
   bytes; the others are for training. A file is never on both sides.
4. Each side is joined, one zero byte before each file, and cut into windows of
   `sequence_length + 1` bytes that overlap by one: every byte is predicted once per epoch.

The same Python and the same seed give the same split, windows and batches, on any number of devices
and processes.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

import grain
import jax
import numpy as np

VOCABULARY = 256  # the values of a byte

FILE_START = b"\0"  # occurs in no source file

SKIPPED_FOLDERS = frozenset(
    {
        # Not the standard library, though often installed below it.
        "site-packages",
        "dist-packages",
        "__pycache__",
        # Left out by many distributions, so they would make machines differ more than they must.
        "test",
        "tests",
        "idlelib",
        "turtledemo",
        # Tables and a manual in the shape of source code: half their bytes are no program text.
        "encodings",
        "pydoc_data",
    }
)


class DataError(ValueError):
    """There is not the text that was asked for; the message is meant to be shown as it is."""


class Split(NamedTuple):
    """Which files train and which validate: paths relative to the root, each side sorted."""

    train: tuple[Path, ...]
    validation: tuple[Path, ...]


def standard_library() -> Path:
    """The folder that holds the source files of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path) -> list[Path]:
    """Paths of the Python source files below `root`, relative to it and sorted.

    Args:
        root: The folder to search; folders named in `SKIPPED_FOLDERS` are not entered.

    Raises:
        DataError: If there are none.
    """
    found = []
    for folder, subfolders, names in os.walk(root):
        # In place, so that the walk does not enter them: site-packages can be huge.
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        found += [Path(folder, name).relative_to(root) for name in names if name.endswith(".py")]
    if not found:
        raise DataError(
            f"expected the source files (*.py) of Python's standard library below {root}, found "
            "none. This Python was installed without them (zipped or frozen): use one from "
            "python.org, uv, conda or your distribution."
        )
    return sorted(found, key=Path.as_posix)


def split_files(
    root: Path, files: list[Path], *, seed: int, max_bytes: int, validation_share: float
) -> Split:
    """The seeded split of `files` into training and validation, by file.

    Args:
        root: Folder that `files` are relative to.
        files: Sorted paths, as `source_files` returns them.
        seed: Fixes which files are taken and on which side each of them is.
        max_bytes: Files are taken until they hold this many bytes together.
        validation_share: Share of the bytes for validation, in (0, 1).

    Raises:
        DataError: If fewer than two files are taken, so that one side would be empty.
    """
    shuffled = [files[i] for i in np.random.default_rng(seed).permutation(len(files))]
    ends = np.cumsum([(root / path).stat().st_size for path in shuffled])
    # The file that crosses a limit still belongs to the side before it.
    taken = int(np.searchsorted(ends, max_bytes)) + 1
    shuffled, ends = shuffled[:taken], ends[:taken]
    if len(shuffled) < 2:
        raise DataError(
            f"expected text of at least two files, one to train and one to validate, got "
            f"{len(shuffled)} of the {len(files)} below {root} within {max_bytes} bytes. Allow "
            "more bytes (`corpus_megabytes`)."
        )
    border = int(np.searchsorted(ends, validation_share * ends[-1])) + 1
    border = min(border, len(shuffled) - 1)
    return Split(
        train=tuple(sorted(shuffled[border:], key=Path.as_posix)),
        validation=tuple(sorted(shuffled[:border], key=Path.as_posix)),
    )


def windows(root: Path, files: tuple[Path, ...], sequence_length: int) -> np.ndarray:
    """The text of `files` as windows `(n, sequence_length + 1)` of uint8.

    Inputs are `window[:-1]`, targets `window[1:]`. What does not fill a last window is dropped.

    Raises:
        DataError: If the text does not fill one window.
    """
    joined = b"".join(FILE_START + (root / path).read_bytes() for path in files)
    text = np.frombuffer(joined, np.uint8)
    if len(text) < sequence_length + 1:
        raise DataError(
            f"expected text for at least one window of {sequence_length} bytes, got {len(text)} "
            f"bytes in {len(files)} files. Use a shorter `sequence_length` or allow more bytes "
            "(`corpus_megabytes`)."
        )
    return np.lib.stride_tricks.sliding_window_view(text, sequence_length + 1)[::sequence_length]


def batches(windows: np.ndarray, *, batch_size: int, seed: int) -> grain.MapDataset[np.ndarray]:
    """An endless sequence of batches `(batch_size, sequence_length + 1)` of uint8.

    Batch `i` is `batches[i]`, a function of the seed and `i` alone: a run that is resumed at step
    `i` sees what it would have seen. Every epoch has its own order. Indexing starts no thread and
    no process; a batch as small as the quickstart's takes 0.15 ms.
    """
    return _endless(windows, seed).batch(batch_size, drop_remainder=True)


def batches_per_epoch(windows: np.ndarray, *, batch_size: int) -> int:
    """Batches until every window was in one, at least 1.

    Rounded up: the last of them may begin the next epoch.
    """
    return -(-len(windows) // batch_size)


class ShardedBatches:
    """The batches of `batches`, as arrays over the devices of all processes.

    Every process indexes them alike, reads the rows that lie on its own devices, and no others.

    Args:
        windows, batch_size, seed: As for `batches`, the same in every process.
        sharding: Where the array of a batch lies.
        rows: Which rows of it lie on this process's devices, ascending.
    """

    def __init__(
        self,
        windows: np.ndarray,
        *,
        batch_size: int,
        seed: int,
        sharding: jax.sharding.Sharding,
        rows: np.ndarray,
    ):
        self._windows = _endless(windows, seed)
        self._shape = (batch_size, windows.shape[1])
        self._sharding = sharding
        self._rows = rows.tolist()  # grain takes Python's integers only

    def __getitem__(self, i: int) -> jax.Array:
        own = np.stack([self._windows[i * self._shape[0] + row] for row in self._rows])
        return jax.make_array_from_process_local_data(self._sharding, own, self._shape)


def _endless(windows: np.ndarray, seed: int) -> grain.MapDataset[np.ndarray]:
    return grain.MapDataset.source(windows).shuffle(seed=seed).repeat()
