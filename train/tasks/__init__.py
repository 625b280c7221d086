"""Tasks: examples to train on, examples to validate on, and a score.

    standard_library.py  the next byte of Python's own source files; needs no download
    language.py          the next token of text
    answers.py           answers to instructions (alpaca), and in conversations (chat)
    conversations.py     what messages have to have
    fields.py            what those fields mean that no task reads
    glue.py              the GLUE tasks: a class for a sentence or a pair of sentences
    classification.py    a class for a text or a pair of texts of one's own
    examples.py          what the last three of these share
    files.py, tables.py  what is in the files

All tasks but the first tokenize everything at the start, a chunk at a time (`encoding.py`), into
files on disk that are mapped into memory (`token_files.py`). The same files and the same seed give
the same examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np

from train.tasks.batches import Source

# Predicted and true ids of classes, both (n,), to metrics.
Score = Callable[[np.ndarray, np.ndarray], dict[str, float]]


def is_loss(metric: str) -> bool:
    """Returns whether a figure of this name is better where it is smaller."""
    return metric.rpartition("/")[2] == "loss"


class Task(NamedTuple):
    """A source of examples for training, those for validation, and what is known of them.

    An example is a dict of NumPy arrays, with T the sequence length:

    * of a language model, `tokens` (T + 1,), any integer dtype. Where not every target counts, also
      `weights` (T,) uint8. Where texts share an example and are not to see each other, also
      `positions` (T,) int32, the place of each input in its text, 0 where one begins;
    * of a classification, `tokens` (T,) int32, `types` (T,) uint8 (which sentence of a pair),
      `mask` (T,) uint8 (1 for tokens, 0 for padding) and `label` () int32.
    """

    name: str
    train: Source
    validation: Mapping[str, Source]  # mostly one, "validation"
    checksum: int  # CRC-32 of all tokens and labels, so that a resumed run notices other data
    labels: tuple[str, ...] = ()  # names of the classes in the order of their ids
    score: Score | None = None  # the official metrics of classes
    # The figure of a validation that says which weights are best; a loss is better where smaller.
    # With several sets of data it has the set's name in front: "matched/accuracy".
    best: str = "loss"
    notes: tuple[str, ...] = ()  # sentences about what was left out of the files, to be shown
    overview: tuple[str, ...] = ()  # lines about the examples that train, to be shown

    @property
    def kind(self) -> Literal["decoder", "encoder"]:
        """Returns the model that the task needs."""
        return "encoder" if self.labels else "decoder"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Returns the names of a validation's figures."""
        one = np.zeros(1, np.int32)
        names = ["loss", *(self.score(one, one) if self.score else ())]
        if len(self.validation) == 1:
            return tuple(names)
        return tuple(f"{data}/{name}" for data in self.validation for name in names)

    @property
    def target(self) -> str:
        """Returns the unit that a loss is the mean over."""
        return "label" if self.labels else "token"
