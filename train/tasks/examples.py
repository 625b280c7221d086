"""Pads, splits and describes tokenized examples."""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train.huggingface.tokenizer import Tokenizer
from train.tasks import Task
from train.tasks.batches import DataError, Padded, Source
from train.tasks.encoding import Encoded, Text, encode, store_tokens
from train.tasks.files import split

#: The maximum number of characters in each part of the shown example.
CHARACTERS = 240


class Examples:
    """Examples of at most `most` tokens; models get `longest` tokens. Subclasses add indexing."""

    def __init__(self, encoded: Encoded, rows: np.ndarray, *, most: int, longest: int, pad: int):
        self.longest = longest
        self._encoded = encoded
        self._kept = rows
        self._most = most
        self._pad = pad
        self._choose(rows)

    def _choose(self, rows: np.ndarray) -> None:
        starts = self._encoded.starts
        self._rows = rows
        #: The number of inputs in each example.
        self.lengths = np.minimum(starts[rows + 1] - starts[rows], self._most)
        self.lengths -= self._most - self.longest

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def _filled(self, i: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Returns the tokens and marks of example `i`, and their number before padding."""
        start, stop = self._encoded.starts[self._rows[i] :][:2]
        size = min(stop - start, self._most)
        tokens = np.full(self._most, self._pad, np.int32)
        marks = np.zeros(self._most, np.uint8)
        tokens[:size] = self._encoded.tokens[start : start + size]
        marks[:size] = self._encoded.marks[start : start + size]
        return tokens, marks, size

    def split(self, data: Path, **options: Any) -> list[Examples]:
        """Returns the training examples and the validation examples of `data`."""
        if len(self) < 2 and options["validation_share"] < 1:
            raise DataError(f"{data} needs at least two examples, but has {len(self)}.")
        splits = []
        for chosen in self._drawn(**options):
            splits.append(copy.copy(self))
            splits[-1]._choose(self._rows[chosen])
        return splits

    def _drawn(self, **options: Any) -> Sequence[np.ndarray]:
        """Returns the indices of training and validation examples."""
        return split(np.ones(len(self)), **options)

    def checksum(self, start: int) -> int:
        """Returns a CRC-32 of tokens, marks, lengths and chosen examples, starting from `start`."""
        return zlib.crc32(self._rows, zlib.crc32(b"%d" % self._encoded.checksum, start))

    def describe_lengths(self) -> str:
        """Returns a line about the lengths of all examples, and how many did not fit."""
        lengths, kept = self._encoded.whole, self._kept
        median, high = np.percentile(lengths, [50, 95])
        usual = f"median {median:.0f} tokens, 95th percentile {high:.0f}, longest {lengths.max()}"
        count = np.count_nonzero(lengths[kept] > self._most)
        cut = f"{count} were cut by --sequence-length {self.longest}"
        return f"{len(lengths)} examples: {usual}; {cut}, {len(lengths) - len(kept)} dropped"


class Sentences(Examples):
    """Texts or pairs of texts with class ids, the `labels`."""

    def __init__(
        self, texts: Iterable[Text], labels: Sequence[int], tokenizer: Tokenizer, length: int
    ):
        chunks = encode(tokenizer, texts, special=True, longest=length)
        encoded = store_tokens(chunks, tokenizer)
        self._labels = np.array(labels, np.int32)
        rows = np.arange(len(self._labels))
        super().__init__(encoded, rows, most=length, longest=length, pad=tokenizer.pad)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        tokens, types, size = self._filled(i)
        mask = (np.arange(len(tokens)) < size).astype(np.uint8)
        label = self._labels[self._rows[i], ...]
        return {"tokens": tokens, "types": types, "mask": mask, "label": label}

    def _drawn(self, **options: Any) -> Sequence[np.ndarray]:
        """Splits each class separately: a class with two examples has one in each split."""
        labels = self._labels[self._rows]
        counts = np.bincount(labels)
        if options["validation_share"] == 1 or counts.max() < 2:
            return super()._drawn(**options)
        class_places = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
        in_training = np.ones(len(labels), bool)
        for places in class_places:
            if len(places) > 1:
                in_training[places[split(np.ones(len(places)), **options)[1]]] = False
        return np.flatnonzero(in_training), np.flatnonzero(~in_training)

    def checksum(self, start: int) -> int:
        return zlib.crc32(self._labels, super().checksum(start))


def task_of(
    splits: Sequence[Examples],
    data: Path,
    tokenizer: Tokenizer,
    *,
    checksum: int = 0,
    labels: Sequence[str] = (),
    notes: Iterable[str] = (),
    **options: Any,
) -> Task:
    """Creates the task for examples for training and, unless `options` split them, validation.

    `checksum` covers anything else in the data.
    """
    train, validation = splits if len(splits) > 1 else splits[0].split(data, **options)
    checksum = validation.checksum(train.checksum(checksum))
    shown = train if len(train) else validation
    counts = f"{len(train)} for training, {len(validation)} for validation"
    lengths = f"{train.describe_lengths()}; {counts}"
    return Task(
        train=train,
        validation=validation,
        checksum=checksum,
        labels=tuple(labels),
        notes=tuple(dict.fromkeys(notes)),
        overview=(lengths, *describe_example(shown, tokenizer, labels=labels)),
    )


def describe_example(
    source: Source, tokenizer: Tokenizer, *, labels: Sequence[str] = ()
) -> tuple[str, ...]:
    """Returns the first example as text, with marks around the part that counts; () if empty."""
    if not len(source):
        return ()
    example = source[0]
    tokens = example["tokens"]
    if labels:
        tokens = tokens[example["mask"] == 1]
        text = _marked(tokens, np.zeros(len(tokens)), tokenizer)
        text += f" ⟦{labels[int(example['label'])]}⟧"
    else:
        # The target of input j is token j + 1. After the last target, there is padding.
        weights = example.get("weights", np.ones(len(tokens) - 1))
        stop = source.lengths[0] + 1 if isinstance(source, Padded) else len(tokens)
        text = _marked(tokens[:stop], np.append(0, weights)[:stop], tokenizer)
    return (f"an example; the model is trained on the text in ⟦⟧: {text!r}",)


def _marked(tokens: np.ndarray, learned: np.ndarray, tokenizer: Tokenizer) -> str:
    """Returns the text of the tokens, with marks around those that count in the loss."""
    borders = [0, *np.flatnonzero(np.diff(learned)) + 1, len(tokens)]
    parts, before = [], ""
    for start, stop in itertools.pairwise(borders):
        # Always decodes from the start, because a part's first token may otherwise lose its space.
        text = tokenizer.tokens.decode(tokens[:stop].tolist(), skip_special_tokens=False)
        part, before = text[len(before) :], text
        if len(part) > CHARACTERS:
            part = f"{part[: CHARACTERS // 2]} ... {part[-CHARACTERS // 2 :]}"
        parts.append(f"⟦{part}⟧" if learned[start] else part)
    return "".join(parts)
