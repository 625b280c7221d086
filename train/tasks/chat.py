"""Answers in conversations: {"messages": [{"role": "user", "content": "..."}, ...]}.

A file has one such object a line, or, as *.json, is a list of them, or is a table with such columns
(`tables.py`). The chat template makes one text of a conversation. Only what the assistant writes
counts, with what ends it. An object may also have `tools`, descriptions of functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from train.chat_template import ChatTemplate, Conversation, ConversationError
from train.data import DataError
from train.tasks import Task, tables
from train.tasks.encoding import Encoded, chunks, smallest_dtype
from train.tasks.examples import task_of_answers
from train.tasks.files import expect_examples, records, shorten, text_field
from train.tokenizer import Tokenizer

SUFFIXES = (".jsonl", ".json", *tables.SUFFIXES)

MESSAGES, TOOLS = "messages", "tools"

# What a file of another format has in place of messages, and what to do.
OTHERS = {
    "conversations": "Rename it, and in its items `from` to `role` and `value` to `content`",
    "instruction": "That is Alpaca's format: take --task alpaca",
    "text": "That is text: take --task language",
}


def make(data: Path, tokenizer: Tokenizer, template: ChatTemplate, **options: Any) -> Task:
    """The task of answering in conversations; arguments are those of `task_of_answers`."""
    special = [n for n, t in tokenizer.tokens.get_added_tokens_decoder().items() if t.special]

    def encode_files(paths: list[Path], notes: list[str]) -> Encoded:
        conversations = expect_examples(paths, lambda path: _conversations(path, template))
        encoded = encode(tokenizer, conversations)
        if not np.isin(encoded.tokens[encoded.marks == 1], special).any():
            notes.append(
                f"{template.where}: puts no special token behind an answer, so a model may not "
                "learn where to end"
            )
        return encoded

    return task_of_answers("chat", data, SUFFIXES, tokenizer, encode_files, **options)


def encode(tokenizer: Tokenizer, conversations: Iterator[Conversation]) -> Encoded:
    """The conversations as tokens, in their order; none are put around them."""
    dtype = smallest_dtype(tokenizer.vocabulary)
    ids, counts, lengths = [np.empty(0, dtype)], [np.empty(0, np.uint8)], [0]
    for chunk in chunks(conversations, lambda conversation: len(conversation.text)):
        encodings = tokenizer.tokens.encode_batch(
            [conversation.text for conversation in chunk], add_special_tokens=False
        )
        for conversation, encoding in zip(chunk, encodings, strict=True):
            # A token belongs to the answer that it begins in.
            begins = np.array([start for start, _ in encoding.offsets], np.int64)
            bounds = np.array(conversation.answers, np.int64).reshape(-1)
            counts.append((np.searchsorted(bounds, begins, side="right") % 2).astype(np.uint8))
            ids.append(np.array(encoding.ids, dtype))
            lengths.append(len(encoding.ids))
    starts = np.cumsum(lengths)
    return Encoded(np.concatenate(ids), np.concatenate(counts), starts, np.diff(starts))


def _conversations(path: Path, template: ChatTemplate) -> Iterator[Conversation]:
    for where, record in records(path):
        messages = _messages(where, record)
        tools = record.get(TOOLS) or None
        if not isinstance(tools, list | None):
            got = shorten(repr(tools))
            raise DataError(f"{where}: expected a list in the field {TOOLS!r}, got {got}.")
        try:
            yield template.conversation(messages, tools)
        except ConversationError as error:
            raise DataError(f"{where}: {error}.") from error


def _messages(where: str, record: dict[str, Any]) -> list[dict[str, Any]]:
    if MESSAGES not in record:
        names = ", ".join(map(repr, record)) or "none"
        remedy = next((do for name, do in OTHERS.items() if name in record), "Rename the field")
        raise DataError(f"{where}: expected a field {MESSAGES!r}, found {names}. {remedy}.")
    messages = record[MESSAGES]
    if not isinstance(messages, list) or not messages:
        got = shorten(repr(messages))
        raise DataError(f"{where}: expected a list of messages in {MESSAGES!r}, got {got}.")
    return [_message(f"{where}, message {n}", m) for n, m in enumerate(messages, 1)]


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        got = shorten(repr(message))
        raise DataError(f'{where}: expected {{"role": ..., "content": ...}}, got {got}.')
    # Tables have a column for each field that any message has.
    message = {name: value for name, value in message.items() if value is not None}
    text_field(where, message, "role")
    if "content" in message or not message.get("tool_calls"):
        text_field(where, message, "content")
    return message
