"""Examples that tasks cut from files: what is in them, how they are split, and what is refused.

Tokens are compared with those of one call of the tokenizer per text, on text taken from the files
by hand.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.tiny_tokenizer import write_byte_level, write_wordpiece
from train.data import DataError
from train.tasks import alpaca, encoding, files, glue, language
from train.tokenizer import TokenizerError, read_tokenizer


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    return read_tokenizer(folder, vocabulary=write_wordpiece(folder))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    return read_tokenizer(folder, vocabulary=write_byte_level(folder))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def tsv(*rows):
    return "".join("\t".join(row) + "\n" for row in rows)


def records(*items):
    return "".join(json.dumps(item) + "\n" for item in items)


# --- GLUE: one example of each file, as (columns or none, cells, sentences, id of the label)

COLA = (None, ("gj04", "0", "*", "the boy are good"), ("the boy are good",), 0)
FIRST_EXAMPLES = {
    "sst2": (("sentence", "label"), ("so good a film ", "1"), ("so good a film",), 1),
    "cola": COLA,
    "mrpc": (
        ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"),
        ("1", "12", "34", "the cat sat", "a cat sat"),
        ("the cat sat", "a cat sat"),
        1,
    ),
    "qqp": (
        ("id", "qid1", "qid2", "question1", "question2", "is_duplicate"),
        ("1", "2", "3", "who is it?", "what is it?", "0"),
        ("who is it?", "what is it?"),
        0,
    ),
    "rte": (
        ("index", "sentence1", "sentence2", "label"),
        ("0", "the dog ran", "it is a dog", "not_entailment"),
        ("the dog ran", "it is a dog"),
        1,
    ),
    "qnli": (
        ("index", "question", "sentence", "label"),
        ("0", "who ran?", "the dog ran", "entailment"),
        ("who ran?", "the dog ran"),
        0,
    ),
    "mnli": (
        ("index", "genre", "sentence1", "sentence2", "label1", "gold_label"),
        ("0", "fiction", "the dog ran", "the dog sat", "neutral", "contradiction"),
        ("the dog ran", "the dog sat"),
        2,
    ),
}


def write_glue(folder, name, *, train=None, dev=None):
    columns, cells, _, _ = FIRST_EXAMPLES[name]
    usual = tsv(*([columns] if columns else []), cells, cells)
    write(folder / "train.tsv", usual if train is None else train)
    devs = ("dev_matched.tsv", "dev_mismatched.tsv") if name == "mnli" else ("dev.tsv",)
    for file in devs:
        write(folder / file, usual if dev is None else dev)
    return folder


@pytest.mark.parametrize("name", FIRST_EXAMPLES)
def test_a_glue_example_is_what_the_tokenizer_makes_of_its_sentences(tmp_path, bert, name):
    _, _, sentences, label = FIRST_EXAMPLES[name]
    task = glue.make(name, write_glue(tmp_path, name), bert, sequence_length=40)
    expected = bert.tokens.encode(*sentences)
    n = len(expected.ids)

    for source in (task.train, *task.validation.values()):
        assert len(source) == 2
        example = source[1]
        assert {key: (x.shape, x.dtype) for key, x in example.items()} == {
            "tokens": ((40,), np.int32),
            "types": ((40,), np.uint8),
            "mask": ((40,), np.uint8),
            "label": ((), np.int32),
        }
        assert example["tokens"].tolist() == expected.ids + [bert.pad] * (40 - n)
        assert example["types"].tolist() == expected.type_ids + [0] * (40 - n)
        assert example["mask"].tolist() == [1] * n + [0] * (40 - n)
        assert example["label"] == label
        assert (source.lengths[1], source.longest) == (n, 40)

    assert set(expected.type_ids) == set(range(len(sentences)))
    parts = ["matched", "mismatched"] if name == "mnli" else ["validation"]
    assert list(task.validation) == parts
    assert (task.kind, task.notes, len(task.labels)) == ("encoder", (), 3 if name == "mnli" else 2)
    where, _, metric = task.best.rpartition("/")
    assert where == ("matched" if name == "mnli" else "")
    assert metric in task.score(np.array([0, 1]), np.array([0, 1]))


def test_cola_s_own_release_in_a_folder_below_has_its_two_dev_files_as_one(tmp_path, bert):
    for file, sentences in (
        ("in_domain_train.tsv", ["a cat sat"]),
        ("in_domain_dev.tsv", ["the boy ran", "the girl ran"]),
        ("out_of_domain_dev.tsv", ["who ran"]),
    ):
        write(tmp_path / "CoLA" / file, tsv(*(("x", "1", "", sentence) for sentence in sentences)))
    validation = glue.make("cola", tmp_path, bert, sequence_length=8).validation["validation"]
    assert len(validation) == 3
    assert validation[2]["tokens"][:4].tolist() == bert.tokens.encode("who ran").ids


def test_quotation_marks_and_carriage_returns_are_characters(tmp_path, bert):
    content = '\ufeffsentence\tlabel\r\n"a film\t1\r\nthe\rcat" \u2028 sat\t0\r\n'
    task = glue.make("sst2", write_glue(tmp_path, "sst2", train=content), bert, sequence_length=16)
    assert len(task.train) == 2
    expected = bert.tokens.encode('the cat" sat').ids
    assert task.train[1]["tokens"][: len(expected)].tolist() == expected


SST2_HEADER = "sentence\tlabel\n"


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("sst2", "", r"train\.tsv, line 1: expected a header with the columns sentence, label"),
        ("sst2", SST2_HEADER, r"train\.tsv: expected examples, found none"),
        ("sst2", "sentence\tmark\na\t1\n", r"line 1: .* label is not in it: 'sentence\\tmark'"),
        ("sst2", SST2_HEADER + "a\t1\na film\n", "line 3: expected 2 columns .* got 1"),
        ("sst2", SST2_HEADER + " \t1\n", "line 2: expected text in column 'sentence'"),
        ("sst2", SST2_HEADER + "a\t2\n", "line 2: expected a label of 0, 1 .* got '2'"),
        ("sst2", SST2_HEADER.encode() + b"a\t1\nb\xff\t1\n", "line 3: expected UTF-8, got 0xff"),
        ("cola", "", r"train\.tsv: expected examples, found none"),
        ("mnli", tsv(FIRST_EXAMPLES["mnli"][0], ("0", "", "a", "b", "", "-")), "got '-'"),
    ],
)
def test_a_glue_file_that_is_wrong_is_named_with_the_line(tmp_path, bert, name, content, match):
    folder = write_glue(tmp_path, name, train=content)
    with pytest.raises(DataError, match=match):
        glue.make(name, folder, bert, sequence_length=8)


def test_a_glue_task_without_its_files_or_room_is_refused(tmp_path, bert):
    write(tmp_path / "train.tsv", "")
    for name, folder, length, match in (
        ("cola", tmp_path, 8, r"cola in .*: train\.tsv, dev\.tsv or in_domain_train"),
        ("cola", tmp_path / "none", 8, "found no such folder"),
        ("wnli", tmp_path, 8, "one of sst2, cola, .* got 'wnli'"),
        ("mrpc", tmp_path, 3, "`sequence_length`: expected more than 3"),
    ):
        with pytest.raises(DataError, match=match):
            glue.make(name, folder, bert, sequence_length=length)


def test_metrics_are_those_of_their_formulas_also_of_a_constant():
    labels = np.array([1, 1, 1, 0, 0, 1, 0, 0])
    predictions = np.array([1, 1, 0, 0, 1, 1, 0, 0])  # 3 of each right, 1 of each wrong
    scores = glue.f1_and_accuracy(predictions, labels) | glue.matthews(predictions, labels)
    assert scores == pytest.approx({"f1": 6 / 8, "accuracy": 6 / 8, "matthews": 8 / 16})
    zeros = np.zeros(8, np.int32)
    assert glue.matthews(zeros, labels) == {"matthews": 0.0}
    assert glue.f1_and_accuracy(zeros, zeros) == {"f1": 0.0, "accuracy": 1.0}


def test_broken_lines_of_qqp_are_left_out_and_named_as_long_as_they_are_few(tmp_path, bert):
    header, cells, _, _ = FIRST_EXAMPLES["qqp"]
    rows = [header, *[cells] * 2000]
    rows[7], rows[9] = ("1", "2", "3", "a question"), (*cells[:3], "", *cells[4:])
    folder = write_glue(tmp_path, "qqp", train=tsv(*rows))
    task = glue.make("qqp", folder, bert, sequence_length=16)
    assert len(task.train) == 1998
    assert task.notes[0].startswith("train.tsv: left out 2 of 2001 lines")
    assert task.notes[0].endswith("lines 8, 10")

    write_glue(tmp_path, "qqp", train=tsv(*rows[:1500]))
    with pytest.raises(DataError, match="at most one line in 1000 .* 2 of 1500 are: lines 8, 10"):
        glue.make("qqp", folder, bert, sequence_length=16)
    write_glue(tmp_path, "qqp", dev=tsv(*rows))
    with pytest.raises(DataError, match=r"dev\.tsv, line 8: expected 6 columns"):
        glue.make("qqp", folder, bert, sequence_length=16)


def test_the_checksum_follows_every_label_and_token(tmp_path, bert):
    def checksum(dev):
        folder = write_glue(tmp_path, "sst2", dev=SST2_HEADER + dev)
        return glue.make("sst2", folder, bert, sequence_length=8).checksum

    first = checksum("a film\t1\n")
    assert checksum("a film\t1\n") == first
    assert len({first, checksum("a film\t0\n"), checksum("the film\t1\n")}) == 3


# --- Language modelling


def language_task(data, tokenizer, *, length=4, share=0.3, seed=0, **options):
    return language.make(
        data, tokenizer, sequence_length=length, validation_share=share, seed=seed, **options
    )


def joined(source):
    """All tokens of overlapping windows, once."""
    windows = [source[i]["tokens"] for i in range(len(source))]
    assert all(w.dtype == np.int32 for w in windows)
    for one, next_one in zip(windows, windows[1:], strict=False):
        assert one[-1] == next_one[0]
    return [*windows[0].tolist(), *(t for w in windows[1:] for t in w[1:].tolist())]


def enclosed(tokenizer, *texts):
    ids = []
    for text in texts:
        text_ids = tokenizer.tokens.encode(text, add_special_tokens=False).ids
        ids += [tokenizer.begin, *text_ids, tokenizer.end]
    return ids


def test_windows_run_through_all_documents_with_begin_and_end(tmp_path, decoder):
    write(tmp_path / "train_b.jsonl", records({"text": "who?"}, {"text": "the end\n", "id": 7}))
    write(tmp_path / "train_a.txt", "the thing is\r\nin the bin\n")
    write(tmp_path / "valid.txt", "\ufeffthis is it\n")
    task = language_task(tmp_path, decoder, length=3)
    for source, texts in (
        (task.train, ("the thing is\nin the bin\n", "who?", "the end\n")),
        (task.validation["validation"], ("this is it\n",)),
    ):
        expected = enclosed(decoder, *texts)
        got = joined(source)
        assert got == expected[: len(got)]
        assert len(source) == (len(expected) - 1) // 3
    assert (task.kind, task.labels, task.score, task.best) == ("decoder", (), None, "loss")


def test_positions_begin_anew_with_each_document_whose_first_token_is_no_target(tmp_path, decoder):
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
        # What is left of a document begins with the window.
        border = expected.argmin() if 0 in expected else 5
        expected[:border] = range(border)
        assert example["positions"].tolist() == expected.tolist()
        assert example["weights"].tolist() == targets[5 * i + 1 : 5 * i + 6]
    # A document by itself has nothing to be kept from.
    assert task.validation["validation"][0].keys() == {"tokens"}
    together = language_task(tmp_path, decoder, length=5, joined=True)
    assert together.train[1].keys() == {"tokens"}
    assert joined(together.train) == joined(task.train)
    assert together.checksum != task.checksum


def test_a_model_without_a_begin_token_gets_none(tmp_path, decoder):
    path = write(tmp_path / "a.txt", "the cat is in the bin\n" * 5)
    task = language_task(path, decoder._replace(begin=None))
    assert joined(task.train)[0] == decoder.tokens.encode("the", add_special_tokens=False).ids[0]


def test_a_single_document_validates_with_its_end(tmp_path, decoder):
    path = write(tmp_path / "a.txt", "abcdefghij" * 10)
    task = language_task(path, decoder, length=2, share=0.25)
    every = enclosed(decoder, "abcdefghij" * 10)
    border = len(every) - round(0.25 * len(every))
    train, validation = joined(task.train), joined(task.validation["validation"])
    assert train == every[:border][: len(train)]
    assert validation == every[border:][: len(validation)]


def test_a_seed_draws_whole_documents_and_always_the_same(tmp_path, decoder):
    texts = [letter * 9 for letter in "abcdefghijklmnopqrst"]
    path = write(tmp_path / "a.jsonl", records(*({"text": text} for text in texts)))

    def sides(seed):
        task = language_task(path, decoder, length=10, share=0.25, seed=seed)
        sources = (task.train, task.validation["validation"])
        # Of each document begin, text and end are 11 tokens; windows take 10 of them further.
        return tuple(decoder.tokens.decode(joined(source)) for source in sources), task.checksum

    (train, validation), checksum = sides(0)
    assert sides(0) == ((train, validation), checksum)
    assert sides(1)[1] != checksum
    assert not set(train) & set(validation)
    # A quarter of 220 tokens is 55: five documents, the last of them cut by the windows.
    assert len(set(validation)) == 5
    assert list(train) == sorted(train)


def test_files_beside_train_files_are_left_out_and_named(tmp_path, decoder):
    write(tmp_path / "train-00.txt", "the thing is in the bin " * 3)
    write(tmp_path / "test.txt", "zzzzzzzzzzzz")
    write(tmp_path / "notes.md", "no text of ours")
    task = language_task(tmp_path, decoder)
    assert task.notes == (f"{tmp_path}: left out test.txt, since there is train*",)
    assert decoder.tokens.encode("z").ids[-1] not in joined(task.train)


def test_blank_texts_of_jsonl_are_left_out_and_counted(tmp_path, decoder):
    text = "the thing is in the bin " * 3
    path = write(tmp_path / "a.jsonl", records({"text": " \n"}, {"text": text}) + "\n\n")
    task = language_task(path, decoder)
    assert task.notes == ("a.jsonl: blank texts left out: 1",)
    got = joined(task.train)
    assert got == enclosed(decoder, text)[: len(got)]


@pytest.mark.parametrize(
    "text",
    ["the thing\nis on\n\nthe bin\n" * 9, "the thing is on " * 9, "thethingis" * 9],
    ids=["lines", "one line", "one word"],
)
def test_a_long_document_in_pieces_is_the_same_text(tmp_path, decoder, monkeypatch, text):
    monkeypatch.setattr(language, "PIECE_CHARACTERS", 12)
    longest = []
    monkeypatch.setattr(
        language,
        "encode",
        lambda tokens, texts, **rest: encoding.encode(
            tokens, (longest.append(len(t)) or t for t in texts), **rest
        ),
    )
    write(tmp_path / "train.txt", text)
    write(tmp_path / "valid.jsonl", records({"text": text}))
    task = language_task(tmp_path, decoder, length=1)
    for source in (task.train, task.validation["validation"]):
        tokens = joined(source)
        assert (tokens[0], tokens[-1]) == (decoder.begin, decoder.end)
        assert decoder.tokens.decode(tokens) == text
    assert 10 < len(longest)
    assert max(longest) <= 12


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("a.txt", "", r"a\.txt: expected text, found an empty file"),
        ("a.txt", b"the\n\xe9\n", r"a\.txt, line 2: expected UTF-8, got 0xe9"),
        ("a.txt", "a", r"part for train of .*, got 2 tokens.*`validation_share`"),
        ("a.txt", "one\ntw\0o\n", r"a\.txt, line 2: expected UTF-8 text, got NUL at character 3"),
        (
            "a.jsonl",
            '{"text": "a", "text": "b"}\n',
            r"line 1: expected JSON \(the key 'text' is in",
        ),
        ("a.jsonl", '{"text": "a"}\n{text: 1}\n', r"a\.jsonl, line 2, column 2: expected JSON"),
        ("a.jsonl", '\n{"content": "a"}\n', r"a\.jsonl, line 2: expected a field 'text', found 'c"),
        ("a.jsonl", '{"text": 3}\n', r"a\.jsonl, line 1: expected a text in the field .* got 3"),
        ("a.jsonl", '{"text": "\\ud800"}\n', r"line 1: .* got half of a surrogate pair"),
        ("a.jsonl", '["a"]\n', r"a\.jsonl, line 1: expected an object"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl, line 1: expected JSON"),
        ("a.csv", "a,b", r"expected a file \*\.txt or \*\.jsonl or .* found the file .*a\.csv"),
        ("dev.txt", "a", r"expected files train\*\.txt beside dev\.txt"),
        ("b/data.csv", "a", r"expected files .* found data\.csv"),
    ],
)
def test_text_that_is_none_is_named_with_the_line(tmp_path, decoder, file, content, match):
    path = write(tmp_path / file, content)
    with pytest.raises(DataError, match=match):
        language_task(path if path.name[0] == "a" else path.parent, decoder)


@pytest.mark.parametrize("module", [language, alpaca])
def test_a_tokenizer_without_an_end_is_refused(tmp_path, bert, module):
    with pytest.raises(TokenizerError, match="a token that ends a text"):
        module.make(tmp_path, bert, sequence_length=4, validation_share=0.1, seed=0)


# --- Alpaca

PLAIN = {"instruction": "Say {this}.", "output": "this"}
GIVEN = {"instruction": "Add.", "input": "1 and 2", "output": "the sum is 3"}


def alpaca_task(data, tokenizer, *, length=512):
    return alpaca.make(data, tokenizer, sequence_length=length, validation_share=0.5, seed=0)


def alpaca_folder(folder, *items):
    write(folder / "train.json", json.dumps(items))
    write(folder / "validation.jsonl", records(*items))
    return folder


def asked_and_counted(example, tokenizer):
    """The text of an example up to its answer, and the tokens that count."""
    tokens, counts = example["tokens"], example["weights"].astype(bool)
    first = int(np.argmax(counts))
    assert not counts[:first].any()
    return tokenizer.tokens.decode(tokens[: first + 1].tolist()), tokens[1:][counts].tolist()


def test_only_the_answer_and_its_end_count(tmp_path, decoder):
    task = alpaca_task(alpaca_folder(tmp_path, PLAIN, GIVEN), decoder)
    assert (task.kind, task.best, task.notes) == ("decoder", "loss", ())
    for source in (task.train, task.validation["validation"]):
        for i, item in enumerate((PLAIN, GIVEN)):
            example = source[i]
            assert (example["tokens"].shape, example["tokens"].dtype) == ((513,), np.int32)
            assert (example["weights"].shape, example["weights"].dtype) == ((512,), np.uint8)
            assert example["tokens"][0] == decoder.begin
            asked, counted = asked_and_counted(example, decoder)
            assert asked == alpaca.prompt(item["instruction"], item.get("input", ""))
            answer = decoder.tokens.encode(item["output"], add_special_tokens=False).ids
            assert counted == [*answer, decoder.end]
            assert example["tokens"][-1] == decoder.pad
            # Behind the last target there is padding alone.
            assert source.lengths[i] == np.flatnonzero(example["weights"])[-1] + 1


def test_prompts_have_alpaca_s_wording_and_an_empty_input_is_none(tmp_path, decoder):
    end = "completes the request.\n\n### Instruction:\nSay {this}.\n\n### Response:"
    assert alpaca.prompt("Say {this}.") == (
        "Below is an instruction that describes a task. Write a response that appropriately " + end
    )
    assert alpaca.prompt("Say {this}.", "1 and 2") == (
        "Below is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately "
        + end.replace("\n\n### Resp", "\n\n### Input:\n1 and 2\n\n### Resp")
    )
    items = [PLAIN, PLAIN | {"input": None}, PLAIN | {"input": "", "text": "passed over"}]
    source = alpaca_task(alpaca_folder(tmp_path, *items), decoder).train
    for i in (1, 2):
        np.testing.assert_array_equal(source[i]["tokens"], source[0]["tokens"])


def test_long_answers_are_cut_on_the_right_and_answers_without_room_dropped(tmp_path, decoder):
    longer = PLAIN | {"instruction": "Say {this} now."}
    folder = alpaca_folder(tmp_path, longer, PLAIN, PLAIN | {"output": ""})
    prompt = decoder.tokens.encode(alpaca.prompt("Say {this}.")).ids  # with its begin token
    answer = decoder.tokens.encode("this", add_special_tokens=False).ids
    assert len(answer) > 1

    task = alpaca_task(folder, decoder, length=len(prompt))
    assert len(task.train) == 2
    assert task.notes[0].endswith(
        f"train.json: left out 1 of 3 examples, in which no answer begins within {len(prompt)} "
        "tokens"
    )
    lengths = sorted(len(prompt) + n for n in (len(answer) + 5, len(answer) + 1, 1))
    assert f"median {lengths[1]} tokens" in task.overview[0]
    assert task.overview[0].endswith(f"; 1 were cut to {len(prompt) + 1}, 1 dropped")
    assert task.train[0]["tokens"].tolist() == [*prompt, answer[0]]
    assert task.train[1]["tokens"].tolist() == [*prompt, decoder.end]  # an empty answer
    for i in range(2):
        assert task.train[i]["weights"].tolist() == [0] * (len(prompt) - 1) + [1]
        assert task.train.lengths[i] == task.train.longest == len(prompt)

    with pytest.raises(DataError, match="but in all of 3 examples it begins later"):
        alpaca_task(folder, decoder, length=len(prompt) - 1)


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("a.json", "[]", r"a\.json: expected examples, found none"),
        ("a.json", '[\n{"instruction": "a",}]', r"a\.json, line 2: expected JSON"),
        ("a.json", json.dumps([PLAIN, {"output": "b"}]), "item 2: expected a field 'instruction'"),
        ("a.json", json.dumps([PLAIN, "b"]), 'item 2: expected an object .* got "b"'),
        ("a.jsonl", records(PLAIN, PLAIN | {"output": None}), "line 2: .* 'output', got null"),
        ("a.jsonl", records(PLAIN | {"input": 3}), "line 1: .* 'input', got 3"),
        ("a.jsonl", records(PLAIN), "at least two examples .* got 1"),
    ],
)
def test_instructions_that_are_none_are_named_with_the_place(
    tmp_path, decoder, file, content, match
):
    with pytest.raises(DataError, match=match):
        alpaca_task(write(tmp_path / file, content), decoder)


# --- What they have in common


@pytest.mark.parametrize(
    ("sizes", "share", "held_back"),
    [
        ([1] * 10, 0.2, 2),  # a share that comes out even
        ([1] * 3, 0.01, 1),  # none fits, so the smallest
        ([1] * 2, 0.999, 1),  # training keeps one
        ([100, 1, 100], 0.001, 1),
        ([0, 0, 0], 0.5, 2),
    ],
    ids=str,
)
def test_neither_side_of_a_split_is_empty(sizes, share, held_back):
    sizes = np.array(sizes)
    for seed in range(5):
        train, validation = files.split(sizes, validation_share=share, seed=seed)
        assert sorted([*train, *validation]) == list(range(len(sizes)))
        assert len(validation) == held_back
        assert len(train)
    assert sizes[validation].sum() <= max(share * sizes.sum(), sizes.min())


@pytest.mark.parametrize(("texts", "characters"), [(3, 10**6), (1000, 20)])
def test_chunks_change_no_token(decoder, monkeypatch, texts, characters):
    documents = ["the thing " * (i % 4) for i in range(10)]
    whole = encoding.encode(decoder, documents, special=False)
    monkeypatch.setattr(encoding, "CHUNK_TEXTS", texts)
    monkeypatch.setattr(encoding, "CHUNK_CHARACTERS", characters)
    sizes = []
    counting = SimpleNamespace(
        encode_batch_fast=lambda chunk, **rest: (
            sizes.append(len(chunk)) or decoder.tokens.encode_batch_fast(chunk, **rest)
        )
    )
    parts = encoding.encode(decoder._replace(tokens=counting), documents, special=False)
    assert max(sizes) <= 3
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
