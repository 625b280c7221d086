"""Tokens in files: memory that does not grow with the data."""

import tracemalloc

import numpy as np
import pytest

from tests.train.scripts import records, write
from train.huggingface.chat_template import ChatTemplate
from train.tasks import answers, encoding, language

CHAT = ChatTemplate("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", {}, (), "here")

# As a share of the file: the index takes a few dozen bytes per text; the tokens themselves would
# take more than the file.
GROWTH = 0.03

TEXT = "the cat is on the mat in the bin " * 120  # 4 kB


def text(i):
    return {"text": f"{i} {TEXT}"}


def instruction(i):
    return {"instruction": f"{i} {TEXT}", "output": "a cat"}


def conversation(i):
    messages = ({"role": "user", "content": f"{i} {TEXT}"}, {"role": "assistant", "content": "a"})
    return {"messages": messages}


# How to make a task from a file, and the file's n-th example.
KINDS = {
    "language": (language.make, text),
    "alpaca": (answers.make_alpaca, instruction),
    "chat": (
        lambda path, tokenizer, **o: answers.make_chat(path, tokenizer, CHAT, **o),
        conversation,
    ),
}


def task_of(kind, path, tokenizer, **options):
    make = KINDS[kind][0]
    return make(path, tokenizer, sequence_length=3000, validation_share=0.5, seed=0, **options)


def file_of(kind, folder, count):
    return write(folder / f"{count}.jsonl", records(*map(KINDS[kind][1], range(count))))


def every_example(task):
    for source in (task.train, task.validation):
        for i in range(len(source)):
            yield source[i]


def assert_same(task, expected):
    for name in ("checksum", "notes", "overview"):
        assert getattr(task, name) == getattr(expected, name)
    for a, b in zip(every_example(task), every_example(expected), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], strict=True)


def test_memory_does_not_grow_with_the_data(tmp_path, monkeypatch, decoder):
    monkeypatch.setattr(encoding, "CHUNK_CHARACTERS", 2**15)
    peaks, sizes = [], []
    for count in (20, 20, 200):  # the first pass also imports
        path = file_of("alpaca", tmp_path, count)
        tracemalloc.start()
        task = task_of("alpaca", path, decoder)
        assert sum(1 for _ in every_example(task)) > count // 9
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        sizes.append(path.stat().st_size)
    assert peaks[2] - peaks[1] < GROWTH * (sizes[2] - sizes[1])


@pytest.mark.parametrize("kind", KINDS)
def test_examples_do_not_depend_on_the_chunks(tmp_path, monkeypatch, decoder, kind):
    monkeypatch.setattr(language, "PIECE_CHARACTERS", 1000)  # four per text
    path = file_of(kind, tmp_path, 5)
    expected = task_of(kind, path, decoder)
    monkeypatch.setattr(encoding, "CHUNK_TEXTS", 1)
    assert_same(task_of(kind, path, decoder), expected)
