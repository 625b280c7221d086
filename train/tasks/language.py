"""Trains on the next token of any text: text files, JSONL, or tables with a text field.

A document is a text file, a line of JSONL, or a row of a table, between a begin token, if the model
was trained with one, and an end token. All documents in a split are joined and cut into windows of
T + 1 tokens that overlap by one: every token is predicted once per epoch. Documents in a window do
not attend to each other; the first token of a document is not a target.

A long document is tokenized in pieces, cut after a newline or else before a space, because a
tokenizer takes several hundred bytes of memory per token.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.huggingface.tokenizer import Tokenizer
from train.tasks import Task, tables
from train.tasks.batches import DataError
from train.tasks.encoding import CHUNK_CHARACTERS, Encoded, encode, store_tokens
from train.tasks.examples import describe_example
from train.tasks.fields import Fields
from train.tasks.files import common_path, find_files, lines, records, split, text_field

# With pieces of 2**20 characters, 20 MB of text took 430 MB of memory instead of 150 MB.
PIECE_CHARACTERS = CHUNK_CHARACTERS // 4
SUFFIXES = (".txt", ".jsonl", tables.SUFFIX)


def make(
    data: Path,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    validation_share: float,
    seed: int,
    field: str = "text",
) -> Task:
    """Creates the task of predicting the next token, with the arguments of `task_of_answers`."""
    files = find_files(data, SUFFIXES)
    notes, checksum = list(files.notes), 0
    splits: list[Documents] = []
    for paths in filter(None, (files.train, files.validation)):
        encoded = store_tokens(_encode(paths, tokenizer, field, notes), tokenizer)
        checksum = zlib.crc32(b"%d" % encoded.checksum, checksum)
        splits.append(Documents(encoded.tokens, encoded.starts[:-1], np.diff(encoded.starts)))
    if len(splits) == 1:
        splits = _split(splits[0], validation_share=validation_share, seed=seed)
    for part, (_, begins, lengths) in zip(("train", "validation"), splits, strict=True):
        count = int(lengths.sum())
        if count <= sequence_length and (part, validation_share) != ("train", 1):
            raise DataError(
                f"the {part} part of {data} has {count} tokens, too few for a window of "
                f"{sequence_length} + 1. Change `sequence_length` or `validation_share`."
            )
        checksum = zlib.crc32(lengths, zlib.crc32(begins, checksum))
    windows, validation = (Windows(x, sequence_length) for x in splits)
    return Task(
        train=windows,
        validation=validation,
        checksum=checksum,
        notes=tuple(notes),
        overview=describe_example(windows if len(windows) else validation, tokenizer),
    )


class Documents(NamedTuple):
    tokens: np.ndarray  # (n,), unsigned
    begins: np.ndarray  # (documents,) int64: starting indices in the tokens
    lengths: np.ndarray  # (documents,) int64: numbers of tokens


class Windows:
    """Overlapping windows of `length + 1` tokens over joined documents.

    If there are several documents, windows contain positions.
    """

    def __init__(self, documents: Documents, length: int):
        self.tokens = documents.tokens
        self._ends = np.cumsum(documents.lengths)
        # Maps a position in the joined documents to a position in the tokens.
        self._shifts = documents.begins + documents.lengths - self._ends
        self._length = length

    def __len__(self) -> int:
        return max(int(self._ends[-1:].sum()) - 1, 0) // self._length

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        t = self._length
        places = i * t + np.arange(t + 1)
        documents = np.searchsorted(self._ends, places, side="right")
        tokens = self.tokens[self._shifts[documents] + places].astype(np.int32)
        if len(self._ends) == 1:
            return {"tokens": tokens}
        # A document's positions start at its first token in the window.
        positions = np.arange(t) - np.searchsorted(documents, documents[:t])
        weights = (np.diff(documents) == 0).astype(np.uint8)  # the target of input j is token j + 1
        return {"tokens": tokens, "positions": positions.astype(np.int32), "weights": weights}


def as_one(tokens: np.ndarray) -> Documents:
    return Documents(tokens, np.array([0]), np.array([len(tokens)]))


def _split(documents: Documents, *, validation_share: float, seed: int) -> list[Documents]:
    """Splits by whole documents, or cuts the longest document if no such split fits the share."""
    tokens, begins, lengths = documents
    wanted = validation_share * lengths.sum()
    if len(lengths) > 1:
        splits = split(lengths, validation_share=validation_share, seed=seed)
        if wanted / 2 <= lengths[splits[1]].sum() <= 2 * wanted:
            return [Documents(tokens, begins[x], lengths[x]) for x in splits]
    longest = np.argmax(lengths)
    size = min(round(wanted), lengths[longest])
    begin = begins[longest] + lengths[longest] - size
    rest = lengths - size * (np.arange(len(lengths)) == longest)
    validation = Documents(tokens, np.array([begin]), np.array([size]))
    return [Documents(tokens, begins, rest), validation]


def _encode(
    paths: list[Path], tokenizer: Tokenizer, field: str, notes: list[str]
) -> Iterator[Encoded]:
    """Yields chunks of all documents, with a begin token (if any) and an end token around each."""
    between = [tokenizer.end, *([] if tokenizer.begin is None else [tokenizer.begin])]
    none = np.empty(0, np.uint8)
    begins: list[bool] = []  # for each piece in a chunk
    skipped = 1  # no document ends before the first
    for chunk in encode(tokenizer, _pieces_of(paths, field, begins, notes), special=False):
        borders = chunk.starts[:-1][begins]
        begins.clear()
        # `insert` keeps the order of several tokens at one place.
        places = np.repeat(borders, len(between))
        tokens = np.insert(chunk.tokens, places, np.tile(between, len(borders)))[skipped:]
        starts = borders + len(between) * np.arange(len(borders)) + 1 - skipped
        yield Encoded(tokens, none, np.append(starts, len(tokens)), none)
        skipped = 0
    yield Encoded(np.array(between[:1]), none, np.array([1]), none)


def _pieces_of(
    paths: list[Path], field: str, begins: list[bool], notes: list[str]
) -> Iterator[str]:
    """Yields all files' documents in pieces; appends to `begins` whether each starts a document."""
    fields = Fields(field)
    for path in paths:
        count, blank = 0, 0
        for document in _documents(path, field, fields):
            number = -1
            for number, piece in enumerate(_cut(document)):
                begins.append(number == 0)
                yield piece
            count, blank = count + (number >= 0), blank + (number < 0)
        if not count:
            raise DataError(f"{path}: the file is empty, or has only blank texts.")
        if blank:
            notes.append(f"{path.name}: blank texts left out: {blank}")
    notes += fields.notes(common_path(paths))


def _documents(path: Path, field: str, fields: Fields) -> Iterator[Iterable[str]]:
    """Yields the documents in a file; a text file is one document, read line by line."""
    if path.name.lower().endswith(".txt"):
        yield (line for _, line in lines(path))
        return
    for where, record in records(path):
        fields.check(where, record)
        yield [text_field(where, record, field, remedy="Pass its name with --text-column")]


def _cut(parts: Iterable[str]) -> Iterator[str]:
    """Yields the text in pieces of at most `PIECE_CHARACTERS`; drops a blank remainder."""
    text = ""
    for part in parts:
        text += part
        start = 0
        while len(text) - start > PIECE_CHARACTERS:
            stop = start + PIECE_CHARACTERS
            space = max(text.rfind(" ", start + 1, stop), 0)
            stop = text.rfind("\n", start, stop) + 1 or space or stop
            yield text[start:stop]
            start = stop
        text = text[start:]
    if text.strip():
        yield text
