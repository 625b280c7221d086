"""Answers to instructions, as in Stanford's Alpaca: {"instruction", "input", "output"}.

A file is a JSON list of such objects, or has one a line, or is a table with such columns
(`tables.py`). `input` may be missing, null or empty; further fields are passed over. The
instruction is set into one of the two templates that the Alpaca data was made for,
`PROMPT_WITH_INPUT` and `PROMPT`, and the output follows directly on it.

Prompt and answer are tokenized apart, so that the prompt has the tokens that it has when the model
is asked, with no token reaching over into the answer:

    [begin] prompt answer end

Only the tokens of the answer and the end token behind it count in the loss. Examples of more than
T + 1 tokens are cut on the right; those of which no token of the answer is left are dropped, and
the task's notes say how many. Which examples validate is a matter of file names
(`files.find_files`) or a draw with the seed.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from train.data import DataError
from train.tasks import Task, tables
from train.tasks.encoding import Encoded, encode
from train.tasks.files import check_share, find_files, records, split_examples, text_field
from train.tasks.overview import said_of_example, said_of_lengths
from train.tokenizer import Tokenizer, end_token

SUFFIXES = (".json", ".jsonl", *tables.SUFFIXES)

# The wording is fixed: https://github.com/tatsu-lab/stanford_alpaca
PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)


def make(
    data: Path, tokenizer: Tokenizer, *, sequence_length: int, validation_share: float, seed: int
) -> Task:
    """The task of answering instructions.

    Args:
        data: A file `.json` or `.jsonl` or a table, or a folder with such files.
        tokenizer: Of the model; must have an end token.
        sequence_length: Predicted tokens of an example, T.
        validation_share: Of the examples, in (0, 1), where files have no names that tell.
        seed: Fixes which examples validate.

    Raises:
        DataError: If the files hold no such examples, with the file and the line or item, or none
            whose answer begins within the sequence length, or only one where some are to validate.
        TokenizerError: If the tokenizer has no end token.
    """
    check_share(validation_share)
    end_token(tokenizer)
    files = find_files(data, SUFFIXES)
    notes = list(files.notes)
    train = _read(files.train, tokenizer, sequence_length, notes)
    lengths = train.said_of_lengths()
    if files.validation:
        validation = _read(files.validation, tokenizer, sequence_length, notes)
    else:
        train, validation = split_examples(
            train, "examples", data, validation_share=validation_share, seed=seed
        )
    return Task(
        name="alpaca",
        kind="decoder",
        train=train,
        validation={"validation": validation},
        labels=(),
        score=None,
        best="loss",
        checksum=validation.checksum(train.checksum(0)),
        notes=tuple(notes),
        overview=(lengths, *said_of_example(train, tokenizer)),
    )


def prompt(instruction: str, given: str = "") -> str:
    """The prompt for an instruction, and for what is given with it (`input`).

    Examples:
        >>> prompt("Add.", "1 and 2").splitlines()[-4:]
        ['### Input:', '1 and 2', '', '### Response:']
    """
    if given:
        return PROMPT_WITH_INPUT.format(instruction=instruction, input=given)
    return PROMPT.format(instruction=instruction)


class Answers:
    """Prompts with their answers as examples of `length + 1` tokens.

    Args:
        encoded: Prompt and answer of each example, one after the other, without special tokens.
        rows: The examples to take.
        length: Predicted tokens of an example; each prompt taken is shorter by one at least.
        tokenizer: For the tokens that begin, end and pad.
    """

    def __init__(self, encoded: Encoded, rows: np.ndarray, length: int, tokenizer: Tokenizer):
        self._encoded = encoded
        self._rows = rows
        self._length = self.longest = length
        self._begin = [] if tokenizer.begin is None else [tokenizer.begin]
        self._end = end_token(tokenizer)
        self._pad = tokenizer.pad

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> np.ndarray:
        """Of each example the tokens after which another one is predicted."""
        starts = self._encoded.starts
        tokens = starts[2 * self._rows + 2] - starts[2 * self._rows]  # prompt and answer
        return np.minimum(tokens + len(self._begin), self._length)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(f"expected an index from 0 to {len(self) - 1}, got {i}")
        row = 2 * int(self._rows[i])
        prompt, answer = self._encoded.span(row), self._encoded.span(row + 1)
        size = self._length + 1
        tokens = np.full(size, self._pad, np.int32)
        weights = np.zeros(self._length, np.uint8)
        # The two follow on each other in the flat array too.
        text = self._encoded.tokens[prompt.start : answer.stop][: size - len(self._begin)]
        first = len(self._begin)
        tokens[:first] = self._begin
        tokens[first : first + len(text)] = text
        stop = first + len(text)
        if stop < size:
            tokens[stop] = self._end
            stop += 1
        # The target of position j is token j + 1.
        weights[first + prompt.stop - prompt.start - 1 : stop - 1] = 1
        return {"tokens": tokens, "weights": weights}

    def some(self, chosen: np.ndarray) -> Answers:
        """The examples with these indices."""
        other = copy.copy(self)
        other._rows = self._rows[chosen]
        return other

    def said_of_lengths(self) -> str:
        """How long the examples are, with those that are not among the rows."""
        prompts, answers = self._encoded.whole.reshape(-1, 2).T
        whole = len(self._begin) + prompts + answers + 1
        return said_of_lengths(whole, self._rows, self._length + 1)

    def checksum(self, start: int) -> int:
        """CRC-32 of the examples' tokens, lengths and order, going on from `start`."""
        for held in (self._encoded.tokens, self._encoded.starts, self._rows):
            start = zlib.crc32(held, start)
        return start


def _read(paths: list[Path], tokenizer: Tokenizer, length: int, notes: list[str]) -> Answers:
    """The examples of the files, without those whose answer begins too late."""
    encoded = encode(
        tokenizer.tokens, _texts(paths), vocabulary=tokenizer.vocabulary, special=False
    )
    prompts = np.diff(encoded.starts)[::2] + (tokenizer.begin is not None)
    rows = np.flatnonzero(prompts <= length)
    dropped = len(prompts) - len(rows)
    where = paths[0] if len(paths) == 1 else paths[0].parent
    if not len(rows):
        raise DataError(
            f"{where}: expected an example whose answer begins within {length} tokens, but the "
            f"shortest of {dropped} prompts takes {prompts.min()}. Use a longer "
            "`sequence_length`: 512 is usual."
        )
    if dropped:
        notes.append(
            f"{where}: left out {dropped} of {len(prompts)} examples, whose prompts leave no room "
            f"for an answer in {length} tokens"
        )
    return Answers(encoded, rows, length, tokenizer)


def _texts(paths: list[Path]) -> Iterator[str]:
    """Prompt and answer of each example in turn."""
    for path in paths:
        empty = True
        for where, record in records(path):
            given = ""
            if record.get("input") is not None:
                given = text_field(where, record, "input")
            yield prompt(text_field(where, record, "instruction"), given)
            yield text_field(where, record, "output")
            empty = False
        if empty:
            raise DataError(
                f"{path}: expected examples, found none. Fetch the file again, or take it away."
            )
