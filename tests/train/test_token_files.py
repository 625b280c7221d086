"""Tokens in files: memory that does not grow with the data, and a cache that is never stale."""

import os
import tracemalloc
from functools import partial

import numpy as np
import pytest

from tests.tiny_tokenizer import write_byte_level
from tests.train.scripts import records, write
from train.huggingface.chat_template import ChatTemplate
from train.huggingface.tokenizer import read_tokenizer
from train.tasks import answers, encoding, language, token_files
from train.tasks.batches import DataError
from train.tasks.token_files import store_tokens

CHAT = ChatTemplate("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", {}, (), "here")

# Share of the data's bytes. A text takes a few dozen bytes; its tokens would take more than 1.
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
    for source in (task.train, *task.validation.values()):
        for i in range(len(source)):
            yield source[i]


def assert_same(one, other):
    assert (one.checksum, one.notes, one.overview) == (other.checksum, other.notes, other.overview)
    for a, b in zip(every_example(one), every_example(other), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], strict=True)


@pytest.mark.parametrize("kind", ["language", "alpaca"])
def test_memory_does_not_grow_with_the_data(tmp_path, monkeypatch, decoder, kind):
    monkeypatch.setattr(encoding, "CHUNK_CHARACTERS", 2**15)
    peaks, sizes = [], []
    for count in (20, 20, 200):  # the first one also imports
        path = file_of(kind, tmp_path, count)
        tracemalloc.start()
        task = task_of(kind, path, decoder)
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_start_reads_the_tokens_of_an_earlier_one(tmp_path, monkeypatch, decoder, kind):
    path = file_of(kind, tmp_path, 5)
    path.write_text(path.read_text() + records({"text": " "} | KINDS[kind][1](9)))
    expected = task_of(kind, path, decoder)
    store = partial(store_tokens, cache=tmp_path / "cache")
    assert_same(task_of(kind, path, decoder, store=store), expected)
    monkeypatch.setattr(token_files, "_write", None)
    assert_same(task_of(kind, path, decoder, store=store), expected)
    before = path.stat()
    path.write_text(path.read_text().replace("cat", "dog"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(TypeError):  # nothing can be written
        task_of(kind, path, decoder, store=store)
    write_byte_level(tmp_path, begin=False)
    without_begin = read_tokenizer(tmp_path, vocabulary=decoder.vocabulary)
    for tokenizer, count in ((without_begin, 5), (decoder, 4)):
        with pytest.raises(TypeError):
            task_of(kind, file_of(kind, tmp_path, count), tokenizer, store=store)


def test_a_cache_reuses_complete_files_and_names_damaged_ones(tmp_path, decoder):
    path = file_of("language", tmp_path, 5)
    with pytest.raises(DataError, match="`token_cache`: cannot write to .*jsonl"):
        task_of("language", path, decoder, store=partial(store_tokens, cache=path))
    store = partial(store_tokens, cache=tmp_path / "cache")
    path.write_text(path.read_text() + "{}")
    with pytest.raises(DataError, match="line 6: the field 'text' is missing"):
        task_of("language", path, decoder, store=store)
    assert not [*(tmp_path / "cache").iterdir()]

    path = file_of("language", tmp_path, 4)
    chunks = [*language._encode([path], decoder, "text", [])]

    def overtaken(notes):
        store(lambda _: iter(chunks), decoder, [path], notes)
        yield from chunks

    tokens = store(overtaken, decoder, [path], []).tokens
    np.testing.assert_array_equal(tokens, np.concatenate([chunk.tokens for chunk in chunks]))
    [folder] = (tmp_path / "cache").iterdir()
    for name, content in (("tokens", b"odd"), ("encoded.json", b"{}"), ("encoded.json", None)):
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{folder}: tokens .* cannot be read .* Delete that"):
            store(overtaken, decoder, [path], [])


def test_a_full_disk_raises_an_error_that_names_the_option(tmp_path, decoder, small_disk):
    path, disk = file_of("language", tmp_path, 40), small_disk("40k")
    with pytest.raises(DataError, match=rf"written to {disk}: .*No space.* --token-cache"):
        task_of("language", path, decoder, store=partial(store_tokens, cache=disk))
    assert not [*disk.iterdir()]


def test_a_line_says_how_much_is_written(tmp_path, monkeypatch, decoder):
    monkeypatch.setattr(token_files, "STEP", 4000)
    monkeypatch.setattr(encoding, "CHUNK_TEXTS", 1)
    said = []
    path = file_of("language", tmp_path, 4)
    task_of("language", path, decoder, store=partial(store_tokens, say=said.append))
    assert [line.partition(" of")[0] for line in said] == ["1 GB", "2 GB", "3 GB", "4 GB"]
