"""GLUE: the files' examples, their scores, and rejected files."""

import numpy as np
import pytest

from tests.train.scripts import write
from train.tasks import glue
from train.tasks.batches import DataError

DTYPES = {"tokens": np.int32, "types": np.uint8, "mask": np.uint8, "label": np.int32}


def tsv(*rows):
    return "".join("\t".join(row) + "\n" for row in rows)


# For each file the columns, one example, the place of its sentences, and its label's id.
FILES = {
    "sst2": ("sentence|label", "so good a film |1", [0], 1),
    "cola": ("", "gj04|0|*|the boy are good", [3], 0),
    "mrpc": ("Quality|#1 ID|#2 ID|#1 String|#2 String", "1|12|34|the cat sat|a cat sat", [3, 4], 1),
    "qqp": (
        "id|qid1|qid2|question1|question2|is_duplicate",
        "1|2|3|who is it?|what is it?|0",
        [3, 4],
        0,
    ),
    "rte": ("index|sentence1|sentence2|label", "0|he ran|it is he|not_entailment", [1, 2], 1),
    "qnli": ("index|question|sentence|label", "0|who ran?|the dog ran|entailment", [1, 2], 0),
    "mnli": ("index|sentence1|sentence2|gold_label", "0|he ran|he sat|contradiction", [1, 2], 2),
}


def first_rows(name):
    """Returns the columns, if the file has any, and the cells of its example."""
    return [row.split("|") for row in FILES[name][:2] if row]


def write_glue(folder, name, *, train=None, dev=None):
    rows = first_rows(name)
    usual = tsv(*rows, rows[-1])
    write(folder / "train.tsv", usual if train is None else train)
    for file in ("dev_matched.tsv", "dev_mismatched.tsv") if name == "mnli" else ("dev.tsv",):
        write(folder / file, usual if dev is None else dev)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_a_glue_example_is_tokenized_from_its_sentences(tmp_path, bert, name):
    places, label = FILES[name][2:]
    sentences = [first_rows(name)[-1][i] for i in places]
    task = glue.make(name, write_glue(tmp_path, name), bert, sequence_length=40)
    expected = bert.tokens.encode(*sentences)
    n = len(expected.ids)

    for source in (task.train, *task.validation.values()):
        example = source[1]
        assert example["tokens"].tolist() == expected.ids + [bert.pad] * (40 - n)
        assert example["types"].tolist() == expected.type_ids + [0] * (40 - n)
        assert example["mask"].tolist() == [1] * n + [0] * (40 - n)
        assert example["label"] == label
        assert {name: x.dtype for name, x in example.items()} == DTYPES
        assert (len(source), source.lengths[1], source.longest) == (2, n, 40)
    parts = ["matched", "mismatched"] if name == "mnli" else ["validation"]
    assert list(task.validation) == parts
    where, _, metric = task.best.rpartition("/")
    assert where == ("matched" if name == "mnli" else "")
    assert metric in task.score(np.array([0, 1]), np.array([0, 1]))


def test_colas_own_release_combines_its_two_dev_files(tmp_path, bert):
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


def test_metrics_equal_their_formulas_also_for_constant_predictions():
    labels = np.array([1, 1, 1, 0, 0, 1, 0, 0])
    predictions = np.array([1, 1, 0, 0, 1, 1, 0, 0])  # 3 of each are correct, 1 of each wrong
    scores = glue.f1_and_accuracy(predictions, labels) | glue.matthews(predictions, labels)
    assert scores == pytest.approx({"f1": 6 / 8, "accuracy": 6 / 8, "matthews": 8 / 16})
    zeros = np.zeros(8, np.int32)
    assert glue.matthews(zeros, labels) == {"matthews": 0.0}
    assert glue.f1_and_accuracy(zeros, zeros) == {"f1": 0.0, "accuracy": 1.0}


def test_broken_lines_of_qqp_are_left_out_and_named(tmp_path, bert):
    header, cells = first_rows("qqp")
    rows = [header, *[cells] * 20]
    rows[7], rows[9] = ["1", "2", "3", "a question"], [*cells[:3], "", *cells[4:]]
    folder = write_glue(tmp_path, "qqp", train=tsv(*rows))
    task = glue.make("qqp", folder, bert, sequence_length=16)
    assert len(task.train) == 18
    assert task.notes[0].startswith("train.tsv: left out 2 of 21 lines")
    assert task.notes[0].endswith("lines 8, 10")

    write_glue(tmp_path, "qqp", dev=tsv(*rows))
    with pytest.raises(DataError, match=r"dev\.tsv, line 8: needs 6 columns"):
        glue.make("qqp", folder, bert, sequence_length=16)
