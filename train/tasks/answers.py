"""Examples of which only answers are learned: what `alpaca.py` and `chat.py` have in common.

Examples of more than T + 1 tokens are cut on the right; those of which no token of an answer is
left are dropped, and the task's notes say how many. Which examples validate is a matter of file
names (`files.find_files`) or a draw with the seed.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.data import DataError
from train.tasks import Task
from train.tasks.files import find_files, split_examples
from train.tasks.overview import describe_example, describe_lengths
from train.tokenizer import Tokenizer


class Encoded(NamedTuple):
    """The tokens of n examples."""

    tokens: np.ndarray  # (total,), unsigned
    answers: np.ndarray  # (total,) uint8, 1 for the tokens of answers
    starts: np.ndarray  # (n + 1,) int64; example i has tokens[starts[i] : starts[i + 1]]


Encode = Callable[[list[Path], list[str]], Encoded]


def make(
    name: str,
    data: Path,
    suffixes: tuple[str, ...],
    tokenizer: Tokenizer,
    encode: Encode,
    *,
    sequence_length: int,
    validation_share: float,
    seed: int,
) -> Task:
    """The task of giving the answers of some files.

    Args:
        name: Of the task.
        data: A file, or a folder with files.
        suffixes: How the names of such files end.
        tokenizer: Of the model.
        encode: Gives the tokens of files, and may add to the notes.
        sequence_length: Predicted tokens of an example, T.
        validation_share: Of the examples, in (0, 1), where files have no names that tell.
        seed: Fixes which examples validate.

    Raises:
        DataError: If there is no example with an answer within the sequence length, or only one
            where some are to validate.
    """
    files = find_files(data, suffixes)
    notes = list(files.notes)

    train = _read(files.train, tokenizer, encode, sequence_length, notes)
    lengths = train.describe_lengths()
    if files.validation:
        validation = _read(files.validation, tokenizer, encode, sequence_length, notes)
    else:
        train, validation = split_examples(
            train, data, validation_share=validation_share, seed=seed
        )
    return Task(
        name=name,
        kind="decoder",
        train=train,
        validation={"validation": validation},
        labels=(),
        score=None,
        best="loss",
        checksum=validation.checksum(train.checksum(0)),
        notes=tuple(dict.fromkeys(notes)),
        overview=(lengths, *describe_example(train, tokenizer)),
    )


def _read(
    paths: list[Path], tokenizer: Tokenizer, encode: Encode, length: int, notes: list[str]
) -> Answers:
    encoded = encode(paths, notes)
    rows = _answered(encoded, length)
    count = len(encoded.starts) - 1
    where = paths[0] if len(paths) == 1 else paths[0].parent
    if not len(rows):
        raise DataError(
            f"{where}: expected an answer that begins within {length} tokens, but in all of "
            f"{count} examples it begins later. Use a longer `sequence_length`."
        )
    if len(rows) < count:
        notes.append(
            f"{where}: left out {count - len(rows)} of {count} examples, in which no answer begins "
            f"within {length} tokens"
        )
    return Answers(encoded, rows, length, tokenizer.pad)


def _answered(encoded: Encoded, length: int) -> np.ndarray:
    """The examples with a target in an answer; the first token is no target."""
    begins, ends = encoded.starts[:-1], encoded.starts[1:]
    ends = np.minimum(ends, begins + length + 1)
    counts = np.concatenate([[0], np.cumsum(encoded.answers, dtype=np.int64)])
    return np.flatnonzero(counts[ends] > counts[np.minimum(begins + 1, ends)])


class Answers:
    """Examples of `length + 1` tokens, filled up behind.

    Args:
        encoded: Their tokens.
        rows: The examples to take.
        length: Predicted tokens of an example.
        pad: The token that fills up short ones.
    """

    def __init__(self, encoded: Encoded, rows: np.ndarray, length: int, pad: int):
        self._encoded = encoded
        self._rows = rows
        self._length = self.longest = length
        self._pad = pad

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> np.ndarray:
        """The number of inputs of each example that are followed by a target."""
        starts = self._encoded.starts
        return np.minimum(starts[self._rows + 1] - starts[self._rows] - 1, self._length)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        row, size = int(self._rows[i]), self._length + 1
        start, stop = self._encoded.starts[row : row + 2]
        span = slice(start, min(stop, start + size))
        tokens = np.full(size, self._pad, np.int32)
        weights = np.zeros(size, np.uint8)
        tokens[: span.stop - start] = self._encoded.tokens[span]
        weights[: span.stop - start] = self._encoded.answers[span]
        return {"tokens": tokens, "weights": weights[1:]}  # the target of position j is token j + 1

    def taking(self, indices: np.ndarray) -> Answers:
        """The examples with these indices."""
        other = copy.copy(self)
        other._rows = self._rows[indices]
        return other

    def describe_lengths(self) -> str:
        """A line about the lengths of all examples, dropped ones included."""
        return describe_lengths(np.diff(self._encoded.starts), self._rows, self._length + 1)

    def checksum(self, start: int) -> int:
        """CRC-32 of the examples' tokens, answers, lengths and order, going on from `start`."""
        for held in (*self._encoded, self._rows):
            start = zlib.crc32(held, start)
        return start
