"""Trains on answers to instructions, and on answers in conversations.

    alpaca  {"instruction": "...", "input": "...", "output": "..."}, as in Stanford's Alpaca
    chat    {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}

An instruction's prompt and answer are tokenized separately, so that the prompt has the same tokens
as in `train.generate`: `[begin] prompt answer end`. The chat template turns a conversation into one
text, in which only the assistant's answers with their end tokens count in the loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from train.huggingface.chat_template import ChatTemplate, Conversation
from train.huggingface.tokenizer import Tokenizer
from train.tasks import Task, tables
from train.tasks.batches import DataError
from train.tasks.conversations import Conversations
from train.tasks.encoding import Encoded, chunks, enclose, encode, smallest_dtype, store_tokens
from train.tasks.examples import Examples, task_of
from train.tasks.fields import OF_INSTRUCTIONS, Fields
from train.tasks.files import common_path, find_files, records, text_field

SUFFIXES = (".json", ".jsonl", tables.SUFFIX)

# The exact wording matters: https://github.com/tatsu-lab/stanford_alpaca
PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)


class Answers(Examples):
    """Examples with `length` predicted tokens; only the marked tokens count in the loss."""

    def __init__(self, encoded: Encoded, rows: np.ndarray, length: int, pad: int):
        super().__init__(encoded, rows, most=length + 1, longest=length, pad=pad)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        tokens, marks, _ = self._filled(i)
        return {"tokens": tokens, "weights": marks[1:]}  # the target of position j is token j + 1


def make_alpaca(data: Path, tokenizer: Tokenizer, **options: Any) -> Task:
    """Creates the task of answering instructions, with the arguments of `task_of_answers`."""
    return task_of_answers(data, tokenizer, partial(_encode_instructions, tokenizer), **options)


def make_chat(data: Path, tokenizer: Tokenizer, template: ChatTemplate, **options: Any) -> Task:
    """Creates the task of answering in conversations, with the arguments of `task_of_answers`."""
    special = [n for n, t in tokenizer.tokens.get_added_tokens_decoder().items() if t.special]

    def encode_files(paths: list[Path], notes: list[str]) -> Iterator[Encoded]:
        ends, reader = False, Conversations(template)
        conversations = itertools.chain.from_iterable(map(reader.read, paths))
        for chunk in encode_conversations(tokenizer, conversations):
            ends = ends or np.isin(chunk.tokens[chunk.marks == 1], special).any()
            yield chunk
        if not ends:
            problem = "no special token follows an answer, so a model may not learn to stop"
            notes.append(f"{template.where}: {problem}")
        notes += reader.notes(common_path(paths))

    return task_of_answers(data, tokenizer, encode_files, **options)


def task_of_answers(
    data: Path,
    tokenizer: Tokenizer,
    encode_files: Callable[[list[Path], list[str]], Iterator[Encoded]],
    *,
    sequence_length: int,
    **options: Any,
) -> Task:
    """Creates the task of predicting the answers in the files of `data`.

    Examples longer than T + 1 tokens are truncated; those that lose their answer are dropped. The
    `options` are `validation_share` and `seed`.
    """
    files, splits = find_files(data, SUFFIXES), []
    notes = list(files.notes)
    for paths in filter(None, (files.train, files.validation)):
        encoded = store_tokens(encode_files(paths, notes), tokenizer)
        # The first token of an example is not a target.
        ends = np.minimum(encoded.starts[1:], encoded.starts[:-1] + sequence_length + 1)
        bounds = zip(encoded.starts[:-1] + 1, ends, strict=True)
        answered = (encoded.marks[begin:end].any() for begin, end in bounds)
        rows = np.flatnonzero(np.fromiter(answered, bool))
        where, count = common_path(paths), len(encoded.whole)
        if not len(rows):
            limit = f"within {sequence_length} tokens. Use a longer `sequence_length`"
            raise DataError(f"{where}: none of {count} examples has an answer that begins {limit}.")
        if len(rows) < count:
            reason = f"because no answer to train on begins within {sequence_length} tokens"
            notes.append(f"{where}: left out {count - len(rows)} of {count} examples, {reason}")
        splits.append(Answers(encoded, rows, sequence_length, tokenizer.pad))
    return task_of(splits, data, tokenizer, notes=notes, **options)


def prompt(instruction: str, context: str = "") -> str:
    form = PROMPT_WITH_INPUT if context else PROMPT
    return form.format(instruction=instruction, input=context)


def _encode_instructions(
    tokenizer: Tokenizer, paths: list[Path], notes: list[str]
) -> Iterator[Encoded]:
    """Yields prompts and answers as tokens; begin (if any) and end tokens surround each pair."""
    fields = Fields("instruction", "input", "output", refused=OF_INSTRUCTIONS)
    texts = (text for path in paths for text in _instructions(path, fields))
    for chunk in encode(tokenizer, texts, special=False, together=2):
        prompts, outputs = np.diff(chunk.starts).reshape(-1, 2).T
        tokens, starts = enclose(chunk.tokens, chunk.starts[::2], tokenizer)
        # The begin token and the prompt do not count; the answer and the end token do.
        lengths = np.stack([prompts + (tokenizer.begin is not None), outputs + 1], axis=1)
        counts = np.repeat(np.tile(np.array([0, 1], np.uint8), len(lengths)), lengths.reshape(-1))
        yield Encoded(tokens, counts, starts, np.diff(starts))
    notes += fields.notes(common_path(paths))


def encode_conversations(
    tokenizer: Tokenizer, conversations: Iterator[Conversation]
) -> Iterator[Encoded]:
    """Yields chunks of conversations as tokens, in order, without begin and end tokens."""
    dtype = smallest_dtype(tokenizer.vocabulary)
    for chunk in chunks(conversations, lambda conversation: len(conversation.text)):
        ids, counts, lengths = [], [], [0]
        encodings = tokenizer.tokens.encode_batch(
            [conversation.text for conversation in chunk], add_special_tokens=False
        )
        for conversation, encoding in zip(chunk, encodings, strict=True):
            # A token belongs to the answer in which it begins.
            begins = np.array([start for start, _ in encoding.offsets], np.int64)
            bounds = np.array(conversation.answers, np.int64).reshape(-1)
            counts.append((np.searchsorted(bounds, begins, side="right") % 2).astype(np.uint8))
            ids.append(np.array(encoding.ids, dtype))
            lengths.append(len(encoding.ids))
        starts = np.cumsum(lengths)
        yield Encoded(np.concatenate(ids), np.concatenate(counts), starts, np.diff(starts))


def _instructions(path: Path, fields: Fields) -> Iterator[str]:
    """Yields each example's prompt, then its answer."""
    for where, record in records(path):
        fields.check(where, record)
        context = "" if record.get("input") is None else text_field(where, record, "input")
        yield prompt(text_field(where, record, "instruction"), context)
        yield text_field(where, record, "output")
