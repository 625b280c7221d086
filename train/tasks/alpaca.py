"""Answers to instructions, as in Stanford's Alpaca: {"instruction", "input", "output"}.

A file is a JSON list of such objects, or has one a line, or is a table with such columns
(`tables.py`). Prompt and answer are tokenized apart, so that the prompt has the tokens that it has
when the model is asked: `[begin] prompt answer end`. Only answer and end count.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from train.tasks import Task, tables
from train.tasks.encoding import Encoded, enclose, encode
from train.tasks.examples import task_of_answers
from train.tasks.files import expect_examples, records, text_field
from train.tokenizer import Tokenizer

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


def make(data: Path, tokenizer: Tokenizer, **options: Any) -> Task:
    """The task of answering instructions; arguments and errors are those of `task_of_answers`."""

    def encode_files(paths: list[Path], notes: list[str]) -> Encoded:
        return _encode(paths, tokenizer)

    return task_of_answers("alpaca", data, SUFFIXES, tokenizer, encode_files, **options)


def prompt(instruction: str, context: str = "") -> str:
    if context:
        return PROMPT_WITH_INPUT.format(instruction=instruction, input=context)
    return PROMPT.format(instruction=instruction)


def _encode(paths: list[Path], tokenizer: Tokenizer) -> Encoded:
    texts = expect_examples(paths, _texts)
    encoded = encode(tokenizer, texts, special=False)
    prompts, outputs = np.diff(encoded.starts).reshape(-1, 2).T
    tokens, starts = enclose(encoded.tokens, encoded.starts[::2], tokenizer)
    # Begin and prompt do not count, answer and end do.
    lengths = np.stack([prompts + (tokenizer.begin is not None), outputs + 1], axis=1)
    counts = np.repeat(np.tile(np.array([0, 1], np.uint8), len(lengths)), lengths.reshape(-1))
    return Encoded(tokens, counts, starts, np.diff(starts))


def _texts(path: Path) -> Iterator[str]:
    """Prompt and answer of each example in turn."""
    for where, record in records(path):
        context = ""
        if record.get("input") is not None:
            context = text_field(where, record, "input")
        yield prompt(text_field(where, record, "instruction"), context)
        yield text_field(where, record, "output")
