"""Answers in conversations: {"messages": [{"role": "user", "content": "..."}, ...]}.

A file has one such object a line, or, as *.json, is a list of them, or is a table with such columns
(`tables.py`). Roles are those that the chat
template knows: mostly `system`, `user`, `assistant`, `tool`. The template of the model's folder
makes one text of a conversation (`chat_template.py`), in which special tokens stand already. Only
what the assistant writes counts in the loss, with what ends it; in a long conversation each of its
answers. An object may also have `tools`, descriptions of functions, for templates that know them.

Conversations of more than T + 1 tokens are cut on the right; those of which no token of an answer
is left are dropped, and the task's notes say how many. Which examples validate is a matter of file
names (`files.find_files`) or a draw with the seed.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from train.chat_template import ChatTemplate, Conversation, ConversationError
from train.data import DataError
from train.tasks import Task, tables
from train.tasks.encoding import CHUNK_CHARACTERS, CHUNK_TEXTS, smallest_dtype
from train.tasks.files import check_share, find_files, records, shorten, split_examples, text_field
from train.tasks.overview import said_of_example, said_of_lengths
from train.tokenizer import Tokenizer

SUFFIXES = (".jsonl", ".json", *tables.SUFFIXES)

MESSAGES, TOOLS = "messages", "tools"

# What a file of another format has in place of messages, and what to do.
OTHERS = {
    "conversations": "Rename it, and in its items `from` to `role` and `value` to `content`, with "
    "the roles user and assistant",
    "instruction": "That is Alpaca's format: take --task alpaca",
    "text": "That is text: take --task language",
}


def make(
    data: Path,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    sequence_length: int,
    validation_share: float,
    seed: int,
) -> Task:
    """The task of answering in conversations.

    Args:
        data: A file `.jsonl` or `.json` or a table, or a folder with such files.
        tokenizer: Of the model.
        template: Makes text of messages.
        sequence_length: Predicted tokens of an example, T.
        validation_share: Of the examples, in (0, 1), where files have no names that tell.
        seed: Fixes which examples validate.

    Raises:
        DataError: If the files hold no such conversations, with the file and the line or item, or
            none with an answer within the sequence length, or only one where some are to validate.
    """
    check_share(validation_share)
    files = find_files(data, SUFFIXES)
    notes = list(files.notes)
    train = _read(files.train, tokenizer, template, sequence_length, notes)
    lengths = train.said_of_lengths()
    if files.validation:
        validation = _read(files.validation, tokenizer, template, sequence_length, notes)
    else:
        train, validation = split_examples(
            train, "conversations", data, validation_share=validation_share, seed=seed
        )
    return Task(
        name="chat",
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


class Encoded(NamedTuple):
    """The tokens of n conversations."""

    tokens: np.ndarray  # (total,), unsigned
    answers: np.ndarray  # (total,) uint8, 1 for the tokens of answers
    starts: np.ndarray  # (n + 1,) int64; conversation i has tokens[starts[i] : starts[i + 1]]


class Conversations:
    """Conversations as examples of `length + 1` tokens.

    Args:
        encoded: Their tokens.
        rows: The conversations to take.
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
        """Of each example the tokens after which another one is predicted."""
        starts = self._encoded.starts
        return np.minimum(starts[self._rows + 1] - starts[self._rows] - 1, self._length)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(f"expected an index from 0 to {len(self) - 1}, got {i}")
        row, size = int(self._rows[i]), self._length + 1
        start, stop = self._encoded.starts[row : row + 2]
        here = slice(start, min(stop, start + size))
        tokens = np.full(size, self._pad, np.int32)
        weights = np.zeros(size, np.uint8)
        tokens[: here.stop - start] = self._encoded.tokens[here]
        weights[: here.stop - start] = self._encoded.answers[here]
        return {"tokens": tokens, "weights": weights[1:]}  # the target of position j is token j + 1

    def some(self, chosen: np.ndarray) -> Conversations:
        """The examples with these indices."""
        other = copy.copy(self)
        other._rows = self._rows[chosen]
        return other

    def said_of_lengths(self) -> str:
        """How long the conversations are, with those that are not among the rows."""
        return said_of_lengths(np.diff(self._encoded.starts), self._rows, self._length + 1)

    def checksum(self, start: int) -> int:
        """CRC-32 of the examples' tokens, answers, lengths and order, going on from `start`."""
        for held in (*self._encoded, self._rows):
            start = zlib.crc32(held, start)
        return start


def _read(
    paths: list[Path], tokenizer: Tokenizer, template: ChatTemplate, length: int, notes: list[str]
) -> Conversations:
    """The conversations of the files, without those whose first answer begins too late."""
    encoded = encode(tokenizer, _conversations(paths, template))
    # The first token is no target.
    ends = np.minimum(encoded.starts[1:], encoded.starts[:-1] + length + 1)
    counts = np.concatenate([[0], np.cumsum(encoded.answers, dtype=np.int64)])
    behind_first = np.minimum(encoded.starts[:-1] + 1, ends)
    rows = np.flatnonzero(counts[ends] > counts[behind_first])
    dropped = len(ends) - len(rows)
    where = paths[0] if len(paths) == 1 else paths[0].parent
    if not len(rows):
        raise DataError(
            f"{where}: expected a conversation with an answer that begins within {length} tokens, "
            f"but in all of {dropped} it begins later. Use a longer `sequence_length`: 1024 is "
            "usual."
        )
    if dropped:
        notes.append(
            f"{where}: left out {dropped} of {len(ends)} conversations, in which no answer begins "
            f"within {length} tokens"
        )
    special = [n for n, t in tokenizer.tokens.get_added_tokens_decoder().items() if t.special]
    if not np.isin(encoded.tokens[encoded.answers == 1], special).any():
        notes.append(
            f"{template.where}: puts no special token behind an answer, so a model may not learn "
            "where to end"
        )
    return Conversations(encoded, rows, length, tokenizer.pad)


def encode(tokenizer: Tokenizer, conversations: Iterator[Conversation]) -> Encoded:
    """The conversations as tokens, in their order; none are put around them."""
    dtype = smallest_dtype(tokenizer.vocabulary)
    ids, answers, lengths = [np.empty(0, dtype)], [np.empty(0, np.uint8)], [0]
    for chunk in _chunks(conversations):
        encodings = tokenizer.tokens.encode_batch(
            [conversation.text for conversation in chunk], add_special_tokens=False
        )
        for conversation, encoding in zip(chunk, encodings, strict=True):
            # A token belongs to the answer that it begins in.
            begins = np.array([start for start, _ in encoding.offsets], np.int64)
            bounds = np.array(conversation.answers, np.int64).reshape(-1)
            answers.append((np.searchsorted(bounds, begins, side="right") % 2).astype(np.uint8))
            ids.append(np.array(encoding.ids, dtype))
            lengths.append(len(encoding.ids))
    return Encoded(np.concatenate(ids), np.concatenate(answers), np.cumsum(lengths))


def _chunks(conversations: Iterator[Conversation]) -> Iterator[list[Conversation]]:
    chunk, characters = [], 0
    for conversation in conversations:
        chunk.append(conversation)
        characters += len(conversation.text)
        if len(chunk) >= CHUNK_TEXTS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _conversations(paths: list[Path], template: ChatTemplate) -> Iterator[Conversation]:
    for path in paths:
        empty = True
        for where, record in records(path):
            messages = _messages(where, record)
            tools = record.get(TOOLS) or None
            if not isinstance(tools, list | None):
                raise DataError(
                    f"{where}: expected a list in the field {TOOLS!r}, got "
                    f"{shorten(repr(tools))}. Write it as JSON, not as a text with JSON in it."
                )
            try:
                yield template.conversation(messages, tools)
            except ConversationError as error:
                raise DataError(f"{where}: {error}.") from error
            empty = False
        if empty:
            raise DataError(
                f"{path}: expected conversations, found none. Fetch the file again, or take it "
                "away."
            )


def _messages(where: str, record: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a record."""
    if MESSAGES not in record:
        names = ", ".join(map(repr, record)) or "none"
        remedy = next((do for name, do in OTHERS.items() if name in record), "Rename the field")
        raise DataError(f"{where}: expected a field {MESSAGES!r}, found {names}. {remedy}.")
    messages = record[MESSAGES]
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f'{where}: expected a list of messages {{"role": ..., "content": ...}} in the field '
            f"{MESSAGES!r}, got {shorten(repr(messages))}. Correct the record, or take it out."
        )
    return [_message(f"{where}, message {n}", m) for n, m in enumerate(messages, 1)]


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise DataError(
            f'{where}: expected an object {{"role": ..., "content": ...}}, got '
            f"{shorten(repr(message))}. Correct it, or take the conversation out."
        )
    # Tables have a column for each field that any message has.
    message = {name: value for name, value in message.items() if value is not None}
    text_field(where, message, "role")
    if "content" in message or not message.get("tool_calls"):
        text_field(where, message, "content")
    return message
