"""Tokens in memory-mapped files, so that data may be larger than memory.

The files are temporary and have no names, so a killed run leaves no files. With a cache they are

    CACHE/DIGEST/tokens, marks, starts, whole   the arrays of `Encoded`, raw bytes
    CACHE/DIGEST/encoded.json                   their checksum, and notes on the data

where the digest covers everything that determines the tokens. Data is identified by path, size and
change time, which cannot be set: a new file with an old modification time is still new.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import tokenizers

import zenflow_jax
from elves.atomic import atomic_path
from train.huggingface.tokenizer import Tokenizer
from train.tasks.batches import DataError
from train.tasks.encoding import Encoded, smallest_dtype

NAMES = Encoded._fields[:-1]
RECORD = "encoded.json"

STEP = 10**9  # bytes of tokens between two progress lines


def store_tokens(
    encode_all: Callable[[list[str]], Iterator[Encoded]],
    tokenizer: Tokenizer,
    paths: Sequence[Path],
    notes: list[str],
    *,
    form: Sequence[object] = (),
    cache: Path | None = None,
    say: Callable[[str], None] = print,
) -> Encoded:
    """Returns the texts of the `paths` as tokens, from an earlier start's cache or new.

    `encode_all` yields all chunks, and appends notes about the data. `form` has all facts that
    determine the tokens, besides paths and tokenizer, as JSON.
    """
    dtypes = [smallest_dtype(tokenizer.vocabulary), np.uint8, np.int64, np.int64]
    with contextlib.ExitStack() as stack:
        if cache is None:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in NAMES]
            checksum = _write(encode_all(notes), files, dtypes, tempfile.gettempdir(), say)
            return Encoded._make([*map(_map_file, files, dtypes), checksum])
        # Everything that determines the tokens.
        stats = [(str(p.resolve()), p.stat().st_size, p.stat().st_ctime_ns) for p in paths]
        versions = zenflow_jax.__version__, tokenizers.__version__
        facts = [versions, tokenizer.tokens.to_str(), tokenizer[1:], form, stats]
        folder = cache / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        if not folder.exists():
            _write_folder(folder, encode_all, dtypes, say)
        try:
            record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            notes += record["notes"]
            files = [stack.enter_context(open(folder / name, "rb")) for name in NAMES]
            return Encoded._make([*map(_map_file, files, dtypes), record["checksum"]])
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{folder}: tokens from an earlier start cannot be read ({error!r}). Delete that "
                "folder."
            ) from error


def _write_folder(
    folder: Path,
    encode_all: Callable[[list[str]], Iterator[Encoded]],
    dtypes: Sequence[np.dtype],
    say: Callable[[str], None],
) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"`token_cache`: cannot write to {folder.parent} ({error.strerror})"
        raise DataError(f"{problem}. Name another folder.") from error
    notes: list[str] = []
    try:
        with atomic_path(folder, folder=True) as part, contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(part / name, "wb")) for name in NAMES]
            checksum = _write(encode_all(notes), files, dtypes, folder.parent, say)
            record = {"checksum": checksum, "notes": notes}
            (part / RECORD).write_text(json.dumps(record), encoding="utf-8")
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process was faster
            raise


def _write(
    chunks: Iterable[Encoded],
    files: Sequence[IO[bytes]],
    dtypes: Sequence[np.dtype],
    where: str | Path,
    say: Callable[[str], None],
) -> int:
    """Writes the chunks to the files of the arrays, and returns their checksum."""
    checksums, total, shown = [0] * len(files), 0, 0

    def write(*arrays: np.ndarray) -> None:
        for i, array in enumerate(arrays):
            array = np.ascontiguousarray(array, dtypes[i])
            checksums[i] = zlib.crc32(array, checksums[i])
            try:
                files[i].write(array.data)
                files[i].flush()
            except OSError as error:
                raise DataError(
                    f"the tokens cannot be written to {where}: {error}. Free disk space or name "
                    "another folder: --token-cache DIR."
                ) from error

    for tokens, marks, starts, whole, _ in chunks:
        write(tokens, marks, starts[:-1] + total, whole)
        total += len(tokens)
        if (steps := total * dtypes[0].itemsize // STEP) > shown:
            say(f"{steps} GB of tokens are in {where}")
            shown = steps
    write(*np.empty((2, 0)), np.array([total]))
    return zlib.crc32(repr(checksums).encode())


def _map_file(file: IO[bytes], dtype: np.dtype) -> np.ndarray:
    is_empty = not file.seek(0, 2)  # empty files cannot be mapped
    return np.empty(0, dtype) if is_empty else np.asarray(np.memmap(file, dtype, "r"))
