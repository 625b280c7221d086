"""The next token of any text: text files, or JSONL or tables with a field of text.

A document is a text file, a line of JSONL, or a row of a table. Its tokens get an end token behind
them, and a begin token in front where the model was trained with one. All documents of a side are
joined and cut into windows of T + 1 tokens that overlap by one: every token is predicted once per
epoch. In a window documents do not see each other, unless they are `joined`; the first token of a
document is no target. Of a single document the last share validates.

A long document goes to the tokenizer in pieces, cut after a newline or else before a space: a
tokenizer takes some hundred bytes of memory for each token.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.data import DataError
from train.tasks import Task, tables
from train.tasks.encoding import CHUNK_CHARACTERS, enclose, encode
from train.tasks.examples import describe_example
from train.tasks.files import find_files, lines, records, split, text_field
from train.tokenizer import Tokenizer

# Four to a chunk, for four cores. With pieces of 2**20, four to a chunk, 20 MB of text took 430 MB
# of memory on top of the tokens, now 150 MB, in no more time.
PIECE_CHARACTERS = CHUNK_CHARACTERS // 4
SUFFIXES = (".txt", ".jsonl", *tables.SUFFIXES)


def make(
    data: Path,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    validation_share: float,
    seed: int,
    joined: bool = False,
    field: str = "text",
) -> Task:
    """The task of predicting the next token; arguments are those of `task_of_answers`."""
    files = find_files(data, SUFFIXES)
    notes = list(files.notes)
    train = _read(files.train, tokenizer, field, notes)
    if files.validation:
        validation = _read(files.validation, tokenizer, field, notes)
    else:
        train, validation = _split(train, validation_share=validation_share, seed=seed)
    for part, (tokens, _) in (("train", train), ("validation", validation)):
        if len(tokens) <= sequence_length and (part, validation_share) != ("train", 1):
            raise DataError(
                f"expected text for at least one window of {sequence_length} + 1 tokens in the "
                f"part for {part} of {data}, got {len(tokens)} tokens. Give more text, a shorter "
                "`sequence_length` or another `validation_share`."
            )
    checksum = zlib.crc32(validation.tokens, zlib.crc32(train.tokens))
    if joined:
        train, validation = as_one(train.tokens), as_one(validation.tokens)
    else:
        checksum = zlib.crc32(validation.lengths, zlib.crc32(train.lengths, checksum))
    windows = Windows(train, sequence_length)
    return Task(
        name="language",
        train=windows,
        validation={"validation": Windows(validation, sequence_length)},
        checksum=checksum,
        notes=tuple(notes),
        overview=describe_example(windows, tokenizer),
    )


class Documents(NamedTuple):
    tokens: np.ndarray  # (n,), unsigned
    lengths: np.ndarray  # (documents,) int64: how many of the tokens each has


class Windows:
    """Windows of `length + 1` tokens that overlap by one; of a single document, no positions."""

    def __init__(self, documents: Documents, length: int):
        self.tokens = documents.tokens
        # Of the second document and so on: nothing separates the first from what is before it.
        self._starts = np.cumsum(documents.lengths[:-1])
        self._length = length

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self._length

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        start, t = i * self._length, self._length
        tokens = self.tokens[start : start + t + 1].astype(np.int32)
        if not len(self._starts):
            return {"tokens": tokens}
        # From 1 to T: where documents begin in this window, its own beginning left out.
        first, behind = np.searchsorted(self._starts, (start + 1, start + t + 1))
        begins = self._starts[first:behind] - start
        weights = np.ones(t, np.uint8)
        weights[begins - 1] = 0  # the target of input j is token j + 1
        latest = np.zeros(t + 1, np.int32)
        latest[begins] = begins
        positions = np.arange(t, dtype=np.int32) - np.maximum.accumulate(latest)[:t]
        return {"tokens": tokens, "positions": positions, "weights": weights}


def _read(paths: list[Path], tokenizer: Tokenizer, field: str, notes: list[str]) -> Documents:
    pieces: list[int] = []  # of each document
    encoded = encode(tokenizer, _pieces_of(paths, field, pieces, notes), special=False)
    starts = encoded.starts[np.concatenate([[0], np.cumsum(pieces)])]
    tokens, starts = enclose(encoded.tokens, starts, tokenizer)
    return Documents(tokens, np.diff(starts))


def as_one(tokens: np.ndarray) -> Documents:
    return Documents(tokens, np.array([len(tokens)]))


def _split(
    documents: Documents, *, validation_share: float, seed: int
) -> tuple[Documents, Documents]:
    tokens, lengths = documents
    if len(lengths) == 1:
        border = len(tokens) - round(validation_share * len(tokens))
        return as_one(tokens[:border]), as_one(tokens[border:])
    training, validating = split(lengths, validation_share=validation_share, seed=seed)
    validates = np.zeros(len(lengths), bool)
    validates[validating] = True
    validates = np.repeat(validates, lengths)
    return (
        Documents(tokens[~validates], lengths[training]),
        Documents(tokens[validates], lengths[validating]),
    )


def _pieces_of(paths: list[Path], field: str, pieces: list[int], notes: list[str]) -> Iterator[str]:
    """The documents of all files in pieces; the number of pieces of each goes to `pieces`."""
    for path in paths:
        documents, blank = len(pieces), 0
        for text in _texts(path, field):
            if not text.strip():
                blank += 1
                continue
            pieces.append(0)
            for piece in _cut(text):
                pieces[-1] += 1
                yield piece
        if len(pieces) == documents:
            raise DataError(f"{path}: expected text, found an empty file or none but blank texts.")
        if blank:
            notes.append(f"{path.name}: blank texts left out: {blank}")


def _texts(path: Path, field: str) -> Iterator[str]:
    if path.name.lower().endswith(".txt"):
        yield "".join(line for _, line in lines(path))
        return
    for where, record in records(path):
        yield text_field(where, record, field, remedy="Name it with --text-column")


def _cut(text: str) -> Iterator[str]:
    """The text in pieces of at most `PIECE_CHARACTERS`; a blank rest is dropped."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        stop = start + PIECE_CHARACTERS
        stop = text.rfind("\n", start, stop) + 1 or max(text.rfind(" ", start + 1, stop), 0) or stop
        yield text[start:stop]
        start = stop
    if (rest := text[start:]).strip():
        yield rest
