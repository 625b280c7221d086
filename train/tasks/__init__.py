"""Tasks, which provide training and validation examples.

All tasks but `standard_library` tokenize everything at the start, in chunks, into memory-mapped
files on disk (`encoding.py`). The same files and seed give the same examples.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from train.tasks.batches import Source


class Task(NamedTuple):
    """Training and validation examples, and facts about them.

    An example is a dict of NumPy arrays, where T is the sequence length:

    * for a language model, `tokens` (T + 1,), any integer dtype. If not every target counts, also
      `weights` (T,) uint8. If an example contains texts that must not attend to each other, also
      `positions` (T,) int32, the position of each input in its text, 0 at its start;
    * for a classification, `tokens` (T,) int32, `types` (T,) uint8 (which sentence of a pair),
      `mask` (T,) uint8 (1 for tokens, 0 for padding) and `label` () int32.
    """

    train: Source
    validation: Source
    checksum: int  # CRC-32 of all tokens and labels, so that a resumed run detects changed data
    labels: tuple[str, ...] = ()  # names of the classes in the order of their ids
    notes: tuple[str, ...] = ()  # sentences about omitted examples, to be shown
    overview: tuple[str, ...] = ()  # lines about the training examples, to be shown

    @property
    def kind(self) -> Literal["decoder", "encoder"]:
        """Returns the kind of model that the task needs."""
        return "encoder" if self.labels else "decoder"

    @property
    def target(self) -> str:
        """Returns the unit of the loss."""
        return "label" if self.labels else "token"
