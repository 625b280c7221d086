"""Language modelling and Alpaca: examples, splits, and Parquet files.

Tokens are compared with one call of the tokenizer per text, on text taken from the files by hand.
"""

import functools
import itertools
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.comparisons import assert_same_bits
from tests.train.scripts import records, write
from train.huggingface.chat_template import ChatTemplate
from train.tasks import answers, encoding, files, language, tables
from train.tasks.batches import DataError


def language_task(data, tokenizer, *, length=4, share=0.3, seed=0, **options):
    return language.make(
        data, tokenizer, sequence_length=length, validation_share=share, seed=seed, **options
    )


def joined(source):
    """Returns all tokens of overlapping windows, once."""
    windows = [source[i]["tokens"] for i in range(len(source))]
    assert all(w.dtype == np.int32 for w in windows)
    for window, following in itertools.pairwise(windows):
        assert window[-1] == following[0]
    return [*windows[0].tolist(), *(t for w in windows[1:] for t in w[1:].tolist())]


def enclosed(tokenizer, *texts):
    ids = []
    for text in texts:
        text_ids = tokenizer.tokens.encode(text, add_special_tokens=False).ids
        ids += [tokenizer.begin, *text_ids, tokenizer.end]
    return ids


def test_windows_cover_all_documents_with_begin_and_end_tokens(tmp_path, decoder):
    write(tmp_path / "train_b.jsonl", records({"text": "who?"}, {"text": " \n"}, {"text": "end\n"}))
    write(tmp_path / "train_a.txt", "the thing is\r\nin the bin\n")
    write(tmp_path / "valid.txt", "\ufeffthis is it\n")
    task = language_task(tmp_path, decoder, length=3)
    for source, texts in (
        (task.train, ("the thing is\nin the bin\n", "who?", "end\n")),
        (task.validation, ("this is it\n",)),
    ):
        expected = enclosed(decoder, *texts)
        tokens = joined(source)
        assert tokens == expected[: len(tokens)]
        assert len(source) == (len(expected) - 1) // 3
    assert task.notes == ("train_b.jsonl: blank texts left out: 1",)


def test_positions_restart_in_each_document_and_its_first_token_is_not_a_target(tmp_path, decoder):
    texts = ("who?", "the end", "it", "the thing is in the bin")
    write(tmp_path / "train.jsonl", records(*({"text": text} for text in texts)))
    write(tmp_path / "valid.txt", "this is it\n")
    task = language_task(tmp_path, decoder, length=5)
    positions, targets = [], []
    for text in texts:
        ids = enclosed(decoder, text)
        positions += range(len(ids))
        targets += [0] + [1] * (len(ids) - 1)
    assert len(task.train) == (len(positions) - 1) // 5 > 3
    for i in range(len(task.train)):
        example = task.train[i]
        assert (example["positions"].dtype, example["weights"].dtype) == (np.int32, np.uint8)
        expected = np.array(positions[5 * i : 5 * i + 5])
        # The rest of a document starts the window.
        border = expected.argmin() if 0 in expected else 5
        expected[:border] = range(border)
        assert example["positions"].tolist() == expected.tolist()
        assert example["weights"].tolist() == targets[5 * i + 1 : 5 * i + 6]
    # A single document needs neither positions nor weights.
    assert task.validation[0].keys() == {"tokens"}


def test_validation_gets_the_longest_documents_end_if_no_document_has_the_size(tmp_path, decoder):
    for name, letter, count in (("README", "r", 1), ("a", "a", 40), ("b", "b", 60)):
        write(tmp_path / f"{name}.txt", letter * count)
    task = language_task(tmp_path, decoder, length=4, share=0.15)
    # The 107 tokens include begin and end tokens; 15% are 16 tokens. README has 3.
    every = [enclosed(decoder, letter * n) for letter, n in (("r", 1), ("a", 40), ("b", 60))]
    train, validation = joined(task.train), joined(task.validation)
    assert validation == every[2][-16:][: len(validation)]
    assert train == [*every[0], *every[1], *every[2][:-16]][: len(train)]


@pytest.mark.parametrize(
    ("names", "train", "validation", "unused"),
    [
        ("data eval evaluation-2 testset", "data", "", "eval evaluation-2 testset"),
        ("chat_train chat_test chat-dev", "chat_train", "chat-dev", "chat_test"),
        ("train-00000-of-00002 train-1-of-2-ab valid", "train-0 train-1", "valid", ""),
        ("Training.1 data valid_set devset", "Training.1", "devset valid_set", "data"),
        ("devices testimony value", "devices testimony value", "", ""),
        ("data data_test_v2 my_eval_file Dev2", "data", "Dev2", "data_test_v2 my_eval_file"),
        ("dataset_info a .b/val", "a", "", ""),
    ],
)
def test_file_names_decide_between_training_and_validation(
    tmp_path, names, train, validation, unused
):
    for name in names.split():
        write(tmp_path / f"{name}.jsonl", "{}")
    sides = files.find_files(tmp_path, (".jsonl",))
    for side, expected in ((sides.train, train), (sides.validation, validation)):
        assert len(side) == len(expected.split())
        assert all(map(str.startswith, [path.name for path in side], expected.split()))
    assert len(sides.notes) == bool(unused)
    assert all(name in sides.notes[0] for name in unused.split())


def test_a_seed_always_draws_the_same_whole_documents(tmp_path, decoder):
    texts = [letter * 9 for letter in "abcdefghijklmnopqrst"]
    path = write(tmp_path / "a.jsonl", records(*({"text": text} for text in texts)))
    tasks = [language_task(path, decoder, length=10, share=0.25, seed=s) for s in (0, 0, 1)]
    assert tasks[0].checksum == tasks[1].checksum != tasks[2].checksum
    sources = tasks[0].train, tasks[0].validation
    train, validation = (decoder.tokens.decode(joined(source)) for source in sources)
    assert not set(train) & set(validation)
    # A quarter of 220 tokens is 55, and each document's begin, text and end are 11.
    assert len(set(validation)) == 5
    assert list(train) == sorted(train)


PLAIN = {"instruction": "Say {this}.", "output": "this"}
WITH_INPUT = {"instruction": "Add.", "input": "1 and 2", "output": "the sum is 3"}


def alpaca_task(data, tokenizer, *, length=512):
    return answers.make_alpaca(
        data, tokenizer, sequence_length=length, validation_share=0.5, seed=0
    )


def alpaca_folder(folder, *items):
    write(folder / "train.json", json.dumps(items))
    write(folder / "validation.jsonl", records(*items))
    return folder


def test_only_the_answer_and_its_end_token_are_trained_on(tmp_path, decoder):
    items = (PLAIN, WITH_INPUT, PLAIN | {"input": None}, PLAIN | {"input": ""})
    task = alpaca_task(alpaca_folder(tmp_path, *items), decoder)
    for source in (task.train, task.validation):
        for i, item in enumerate(items):
            example = source[i]
            assert (example["tokens"].shape, example["tokens"].dtype) == ((513,), np.int32)
            assert example["tokens"][0] == decoder.begin
            counts = example["weights"].astype(bool)
            prompt = decoder.tokens.decode(example["tokens"][: np.argmax(counts) + 1].tolist())
            assert prompt == answers.prompt(item["instruction"], item.get("input") or "")
            answer = decoder.tokens.encode(item["output"], add_special_tokens=False).ids
            assert example["tokens"][1:][counts].tolist() == [*answer, decoder.end]
            # Only padding follows the last target.
            assert example["tokens"][-1] == decoder.pad
            assert source.lengths[i] == np.flatnonzero(example["weights"])[-1] + 1


def test_long_answers_are_cut_on_the_right_and_answers_without_room_are_dropped(tmp_path, decoder):
    longer = PLAIN | {"instruction": "Say {this} now."}
    folder = alpaca_folder(tmp_path, longer, PLAIN, PLAIN | {"output": ""})
    prompt = decoder.tokens.encode(answers.prompt("Say {this}.")).ids  # with its begin token
    answer = decoder.tokens.encode("this", add_special_tokens=False).ids
    assert len(answer) > 1

    task = alpaca_task(folder, decoder, length=len(prompt))
    assert "left out 1 of 3 examples" in task.notes[0]
    tokens = [task.train[i]["tokens"].tolist() for i in range(len(task.train))]
    assert tokens == [[*prompt, answer[0]], [*prompt, decoder.end]]  # an empty answer
    for i in range(2):
        assert task.train[i]["weights"].tolist() == [0] * (len(prompt) - 1) + [1]
        assert task.train.lengths[i] == task.train.longest == len(prompt)

    with pytest.raises(DataError, match="none of 3 examples has an answer"):
        alpaca_task(folder, decoder, length=len(prompt) - 1)


def test_neither_side_of_a_split_is_empty():
    for sizes, share, held_back in (
        ([1] * 10, 0.2, 2),  # a share that comes out even
        ([1] * 3, 0.01, 1),  # no document fits, so the smallest
        ([1] * 2, 0.999, 1),  # training keeps one
        ([0, 0, 0], 0.5, 2),
    ):
        train, validation = files.split(np.array(sizes), validation_share=share, seed=0)
        assert sorted([*train, *validation]) == list(range(len(sizes)))
        assert len(validation) == held_back


def test_a_row_equals_a_line_of_json(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROWS", 4)
    rows = [{"text": f"bin {i}", "n": i, "none": None} for i in range(9)]
    # In a table, every row has `a` and `b`.
    rows = [row | {"more": [{"in": {"ab"[row["n"] % 2]: 1}}]} for row in rows]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    places, read = zip(*files.records(path), strict=True)
    assert list(read) == rows
    assert list(places) == [f"{path}, row {i}" for i in range(1, 10)]


ITEMS = [{"text": "a\u2028\n", "n": [1]}, {"text": "\N{GRINNING FACE} \\ud800", "n": []}]


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
@pytest.mark.parametrize(
    ("content", "places"),
    [
        (records(*ITEMS), "line 1, line 2"),
        ("\ufeff\n" + records(*ITEMS).replace("\n", "\r\n\r\n"), "line 2, line 4"),
        ("\n".join(json.dumps(x, indent=1, ensure_ascii=False) for x in ITEMS), "line 1, line 7"),
        (json.dumps(ITEMS), "item 1, item 2"),
    ],
    ids=["lines", "blank lines", "objects", "list"],
)
def test_records_do_not_depend_on_the_layout_of_their_file(tmp_path, suffix, content, places):
    path = write(tmp_path / f"a{suffix}", content)
    expected = [f"{path}, {place}" for place in places.split(", ")]
    assert list(files.records(path)) == list(zip(expected, ITEMS, strict=True))


CHAT = ChatTemplate("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", {}, (), "here")
LONG = "the cat is on the mat in the bin " * 120  # 4 kB
LONG_CHAT = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "a"}]


def every_example(task):
    return [source[i] for source in (task.train, task.validation) for i in range(len(source))]


@pytest.mark.parametrize(
    ("make", "record"),
    [
        (language.make, {"text": LONG}),
        (answers.make_alpaca, {"instruction": LONG, "output": "a cat"}),
        (functools.partial(answers.make_chat, template=CHAT), {"messages": LONG_CHAT}),
    ],
    ids=["language", "alpaca", "chat"],
)
def test_examples_do_not_depend_on_the_chunks(tmp_path, monkeypatch, decoder, make, record):
    monkeypatch.setattr(language, "PIECE_CHARACTERS", 1000)  # four per text
    path = write(tmp_path / "a.jsonl", records(*(record | {"id": i} for i in range(5))))
    options = {"sequence_length": 3000, "validation_share": 0.5, "seed": 0}
    expected = make(path, decoder, **options)
    monkeypatch.setattr(encoding, "CHUNK_TEXTS", 1)
    task = make(path, decoder, **options)
    assert (task.checksum, task.notes) == (expected.checksum, expected.notes)
    assert_same_bits(every_example(task), every_example(expected))
