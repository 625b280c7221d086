"""Sentences, or pairs of them, with their labels: what `glue.py` and `classification.py` share.

The tokenizer's own template puts the special tokens around a sentence or a pair. What is longer
than the sequence length is cut on the right, of a pair the longer sentence first.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from train.data import DataError
from train.tasks.encoding import Text, encode
from train.tasks.overview import describe_example, describe_lengths
from train.tokenizer import Tokenizer


class Sentences:
    """Examples of a fixed length.

    Args:
        texts: All of them a sentence, or all a pair; read once, before `labels`.
        labels: The id of the class of each.
        tokenizer: Of the model.
        length: Tokens of an example, T.

    Raises:
        DataError: If there is no room for a token.
    """

    def __init__(
        self, texts: Iterable[Text], labels: Sequence[int], tokenizer: Tokenizer, length: int
    ):
        self._encoded = encode(
            tokenizer.tokens,
            texts,
            vocabulary=tokenizer.vocabulary,
            special=True,
            longest=length,
        )
        self._labels = np.array(labels, np.int32)
        self._length = self.longest = length
        self.lengths = np.diff(self._encoded.starts)
        self._pad = tokenizer.pad
        self._rows = np.arange(len(self.lengths))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        row = int(self._rows[i])
        span = slice(*self._encoded.starts[row : row + 2])
        n = span.stop - span.start
        tokens = np.full(self._length, self._pad, np.int32)
        types = np.zeros(self._length, np.uint8)
        mask = np.zeros(self._length, np.uint8)
        tokens[:n] = self._encoded.tokens[span]
        types[:n] = self._encoded.types[span]
        mask[:n] = 1
        return {"tokens": tokens, "types": types, "mask": mask, "label": self._labels[row, ...]}

    def taking(self, indices: np.ndarray) -> Sentences:
        """The examples with these indices."""
        other = copy.copy(self)
        other._rows, other.lengths = self._rows[indices], self.lengths[indices]
        return other

    def overview(self, tokenizer: Tokenizer, classes: Sequence[str]) -> tuple[str, ...]:
        """Lines about the examples: how long all texts are, and how one example reads."""
        whole = self._encoded.whole
        lengths = describe_lengths(whole, np.arange(len(whole)), self._length)
        return (lengths, *describe_example(self, tokenizer, labels=classes))

    def checksum(self, start: int) -> int:
        """CRC-32 of tokens, types, lengths, labels and choice, going on from `start`."""
        for held in (*self._encoded[:3], self._labels, self._rows):
            start = zlib.crc32(held, start)
        return start


def check_room(tokenizer: Tokenizer, sequence_length: int, *, pair: bool) -> None:
    """Raises a DataError if an example would have special tokens alone."""
    special = tokenizer.tokens.num_special_tokens_to_add(pair)
    if sequence_length <= special:
        raise DataError(
            f"`sequence_length`: expected more than {special}, the special tokens of an example, "
            f"got {sequence_length}. 64 is usual."
        )
