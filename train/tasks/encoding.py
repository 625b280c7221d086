"""Tokenizes texts in chunks into flat arrays: all tokens, and the start of each text.

A tokenizer's own results take hundreds of bytes per token. The arrays are memory-mapped files, so
that data may be larger than memory; the files have no names, so a killed run leaves none behind.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

import numpy as np

from train.huggingface.tokenizer import Tokenizer

# A chunk ends with the text that reaches one of these limits. All cores encode the chunk, one text
# per core at a time, so it should contain several texts; a million characters take about 150 MB.
CHUNK_TEXTS = 4096
CHUNK_CHARACTERS = 2**20

Text = str | tuple[str, str]

_flat = itertools.chain.from_iterable


class Encoded(NamedTuple):
    """The tokens of n texts; a chunk may start with the rest of an earlier text."""

    tokens: np.ndarray  # (total,), unsigned
    marks: np.ndarray  # (total,) uint8: 1 for the second sentence of a pair, or for answers
    starts: np.ndarray  # (n + 1,) int64; text i has tokens[starts[i] : starts[i + 1]]
    whole: np.ndarray  # the length of each text before it was cut
    checksum: int = 0  # of all arrays


def encode(
    tokenizer: Tokenizer,
    texts: Iterable[Text],
    *,
    special: bool,
    longest: int | None = None,
    together: int = 1,
) -> Iterator[Encoded]:
    """Yields chunks of the texts, or pairs of texts, as tokens; second texts are marked.

    With `special`, the tokenizer adds special tokens. It cuts texts that are longer than `longest`.
    The number of texts in a chunk is a multiple of `together`.
    """
    tokens, cutting = tokenizer.tokens, None
    if longest is not None:
        cutting = copy.deepcopy(tokens)
        cutting.enable_truncation(longest, strategy="longest_first")
    dtype = smallest_dtype(tokenizer.vocabulary)

    def size(text: Text) -> int:
        return sum(map(len, text if type(text) is tuple else [text]))

    for chunk in chunks(texts, size, together):
        encodings = tokens.encode_batch_fast(chunk, add_special_tokens=special)
        whole = np.array([len(e) for e in encodings], np.int64)
        if cutting is not None:
            long = np.flatnonzero(whole > longest)
            cut = cutting.encode_batch_fast([chunk[i] for i in long], add_special_tokens=special)
            for i, encoding in zip(long, cut, strict=True):
                encodings[i] = encoding
        starts = np.cumsum([0, *map(len, encodings)])
        ids = np.fromiter(_flat(e.ids for e in encodings), dtype, starts[-1])
        types = np.fromiter(_flat(e.type_ids for e in encodings), np.uint8, starts[-1])
        yield Encoded(ids, types, starts, whole)


def store_tokens(chunks: Iterable[Encoded], tokenizer: Tokenizer) -> Encoded:
    """Returns the texts of all chunks, as arrays in memory-mapped files."""
    dtypes = [smallest_dtype(tokenizer.vocabulary), np.uint8, np.int64, np.int64]
    checksums, total = [0] * len(dtypes), 0
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in dtypes]

        def write(*arrays: np.ndarray) -> None:
            for i, array in enumerate(arrays):
                array = np.ascontiguousarray(array, dtypes[i])
                checksums[i] = zlib.crc32(array, checksums[i])
                files[i].write(array.data)

        for tokens, marks, starts, whole, _ in chunks:
            write(tokens, marks, starts[:-1] + total, whole)
            total += len(tokens)
        write(*np.empty((2, 0)), np.array([total]))
        checksum = zlib.crc32(repr(checksums).encode())
        return Encoded._make([*map(_map_file, files, dtypes), checksum])


def _map_file(file: IO[bytes], dtype: np.dtype) -> np.ndarray:
    is_empty = not file.seek(0, 2)  # empty files cannot be mapped
    return np.empty(0, dtype) if is_empty else np.asarray(np.memmap(file, dtype, "r"))


def smallest_dtype(vocabulary: int) -> np.dtype:
    """Returns the smallest unsigned dtype that holds every id below `vocabulary`."""
    return np.min_scalar_type(max(vocabulary - 1, 0))


def enclose(
    tokens: np.ndarray, starts: np.ndarray, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Puts a begin token (if any) and an end token around each text; returns tokens and starts."""
    around = [tokenizer.end] if tokenizer.begin is None else [tokenizer.begin, tokenizer.end]
    # At the same position, `insert` keeps the order: an end, then the next begin.
    places = np.stack([starts[:-1], starts[1:]][-len(around) :], axis=1).reshape(-1)
    enclosed = np.insert(tokens, places, np.tile(np.array(around), len(starts) - 1))
    return enclosed, starts + len(around) * np.arange(len(starts))


def chunks(
    items: Iterable[Any], size: Callable[[Any], int], together: int = 1
) -> Iterator[list[Any]]:
    """Yields lists of items for the tokenizer; `size` returns an item's number of characters."""
    chunk, characters = [], 0
    for item in items:
        chunk.append(item)
        characters += size(item)
        full = len(chunk) >= CHUNK_TEXTS or characters >= CHUNK_CHARACTERS
        if full and len(chunk) % together == 0:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk
