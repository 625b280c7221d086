"""Users' classification files: examples, classes, and rejected files."""

import csv
import io
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.hf_models import write_model
from tests.train.scripts import read, records, write
from train.tasks import classification
from train.tasks.batches import DataError
from train.tasks.classification import Columns

COLUMNS = Columns("text", "label")
TEXTS = ["a fine film", 'so "bad", it is', "how good\nis it", "not good"]
LABELS = ["kind", "unkind", "kind", "unkind"]


def make(data, tokenizer, columns=COLUMNS, *, length=20, share=0.5, seed=0, **options):
    options |= {"sequence_length": length, "validation_share": share, "seed": seed}
    return classification.make(data, tokenizer, columns, **options)


def as_csv(rows, **options):
    out = io.StringIO()
    csv.writer(out, **options).writerows(rows)
    return out.getvalue()


def examples(task):
    """Returns the tokens without padding, and the label, of all examples."""
    pairs = []
    for source in (task.train, task.validation):
        for i in range(len(source)):
            example = source[i]
            ids = example["tokens"][example["mask"] == 1].tolist()
            assert len(ids) == source.lengths[i]
            pairs.append((ids, int(example["label"])))
    return pairs


def classes_of(task):
    """Returns the classes of all examples, trained on or not, in order."""
    return sorted(label for _, label in examples(task))


def expected(tokenizer, texts):
    """Returns the result of `examples` for texts with `LABELS`, in order."""
    ids = [tokenizer.tokens.encode(text).ids for text in texts]
    return sorted((i, ["kind", "unkind"].index(x)) for i, x in zip(ids, LABELS, strict=True))


ROWS = [("id", "text", "label"), *((str(i), t, LABELS[i]) for i, t in enumerate(TEXTS))]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", as_csv(ROWS)),
        ("a.csv", "\ufeff" + as_csv(ROWS, delimiter=";")),
        ("a.CSV", as_csv([(" id", "text ", " label "), *ROWS[1:]])),
        ("a.jsonl", records(*(dict(zip(ROWS[0], row, strict=True)) for row in ROWS[1:]))),
    ],
    ids=["crlf", "semicolons", "spaces in the header", "jsonl"],
)
def test_every_text_and_label_in_a_file_is_an_example(tmp_path, bert, name, content):
    task = make(write(tmp_path / name, content), bert)
    assert sorted(examples(task)) == expected(bert, TEXTS)
    assert len(task.train) == 2
    assert task.labels == ("kind", "unkind")


def test_a_line_of_tsv_is_a_row_whatever_its_quotation_marks(tmp_path, bert):
    texts = ['"a" film', 'so "bad', '"', "good, or not"]
    rows = [("text", "label"), *zip([*texts[:3], f'"{texts[3]}"'], LABELS, strict=True)]
    content = "".join("\t".join(row) + "\r\n" for row in rows)
    assert sorted(examples(make(write(tmp_path / "a.tsv", content), bert))) == expected(bert, texts)


def test_pairs_have_two_columns_and_the_longer_text_is_cut(tmp_path, bert):
    rows = [("one", "two", "same"), ("a cat", "the cat sat on a dog", "yes"), ("a", "b", "no")]
    write(tmp_path / "train.csv", as_csv(rows))
    write(tmp_path / "valid.csv", as_csv(rows))
    task = make(tmp_path, bert, Columns("one", "same", "two"), length=8)
    tokens = bert.tokens.encode("a cat", "the cat sat").ids
    assert task.train[0]["tokens"].tolist() == tokens
    assert task.train[0]["types"].tolist() == [0] * 4 + [1] * 4
    assert task.labels == ("no", "yes")


def write_table(path, ids, names):
    """Writes texts with class ids, whose names are in the schema as `datasets` writes them."""
    features = {"label": {"names": names, "_type": "ClassLabel"}}
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pyarrow.table({"text": TEXTS, "label": ids}).replace_schema_metadata(about)
    pyarrow.parquet.write_table(table, path)
    return path


def test_numeric_classes_are_sorted_and_a_tables_own_names_are_used(tmp_path, bert):
    rows = [("text", "label"), *((f"film {i}", str(i)) for i in (10, 9, -1, 2))]
    assert make(write(tmp_path / "a.csv", as_csv(rows)), bert).labels == ("-1", "2", "9", "10")
    names = ["unkind", "so", "kind"]
    path = write_table(tmp_path / "c.parquet", [2, 0, 2, 0], names)
    task = make(path, bert)
    assert task.labels == ("unkind", "so", "kind")
    assert classes_of(task) == [0, 0, 2, 2]
    with pytest.raises(DataError, match=r"row 4: column 'label' has no label"):
        make(write_table(path, [2, 0, 2, -1], names), bert)


def test_each_class_is_on_both_sides_of_a_split(tmp_path, bert):
    labels = ["ham"] * 18 + ["spam"] * 2 + ["once"]
    rows = [("text", "label"), *((f"film {i}", label) for i, label in enumerate(labels))]
    path = write(tmp_path / "a.csv", as_csv(rows))
    for seed in range(5):
        task = make(path, bert, share=0.2, seed=seed)
        sides = [task.train, task.validation]
        counts = [np.bincount([s[i]["label"] for i in range(len(s))]).tolist() for s in sides]
        assert counts == [[15, 1, 1], [3, 0, 1]]


NAMED, DIGITS, GENERIC = ("UNKIND", "so", "Kind"), ["2", "0", "2", "0"], ("LABEL_0", "LABEL_1")
MANY = tuple(f"LABEL_{i}" for i in range(11))


@pytest.mark.parametrize(
    ("labels", "names", "known", "classes"),
    [
        (LABELS, None, NAMED, NAMED),
        (LABELS, None, ("unkind", "good"), ("kind", "unkind")),
        (LABELS, None, GENERIC, ("kind", "unkind")),
        (LABELS, ["unkind", "kind"], NAMED, NAMED),
        (LABELS, ["unkind", "kind", "bad"], NAMED, ("unkind", "kind", "bad")),
        (DIGITS, None, MANY[:3], ("0", "1", "2")),
        (DIGITS, None, NAMED, ("0", "2")),
        (["LABEL_2", "LABEL_10", "LABEL_2", "LABEL_10"], None, MANY, MANY),
    ],
)
def test_labels_are_put_to_the_heads_classes_if_it_has_all_of_them(
    tmp_path, bert, labels, names, known, classes
):
    if names:
        ids = [names.index(label) for label in labels]
        path = write_table(tmp_path / "a.parquet", ids, names)
    else:
        rows = [("text", "label"), *zip(TEXTS, labels, strict=True)]
        path = write(tmp_path / "a.csv", as_csv(rows))
    task = make(path, bert, known=known)
    assert task.labels == classes
    folded = [name.lower() for name in classes]
    assert classes_of(task) == sorted(folded.index(label.lower()) for label in labels)


def test_the_heads_class_names_come_from_the_folder(tmp_path):
    folder = write_model(tmp_path / "given", "bert")
    rows = zip(TEXTS, ["yes", "No"] * 2, strict=True)
    data = write(tmp_path / "a.csv", as_csv([("a", "b"), *rows]))
    settings = {"task": "classification", "model": str(folder), "data": str(data)}
    settings |= {"text_column": "a", "label_column": "b", "sequence_length": 20}
    assert read(**settings).task.labels == ("no", "perhaps", "yes")
    assert read(**settings, best="macro_f1").settings.metric == "macro_f1"


def test_scores_equal_their_formulas():
    predictions, labels = np.array([0, 0, 1, 1, 2, 0]), np.array([0, 0, 0, 1, 2, 2])
    # The mean F1: twice a class's hits, divided by predictions plus labels.
    expected = {"accuracy": 4 / 6, "macro_f1": (4 / 6 + 2 / 3 + 2 / 3) / 3, "matthews": 11 / 22}
    assert classification.score(predictions, labels) == pytest.approx(expected)
    scores = classification.score(np.zeros(6, np.int32), labels)
    assert scores == pytest.approx({"accuracy": 0.5, "macro_f1": 2 / 9, "matthews": 0})


def test_rows_without_text_are_left_out_and_named(tmp_path, bert):
    rows = [*ROWS, ("9", " ", "kind"), ("9", "", "kind")]
    task = make(write(tmp_path / "a.csv", as_csv(rows)), bert)
    assert task.notes == ("a.csv: left out 2 rows without text: 7, 8",)
    assert len(task.train) + len(task.validation) == 4


GOOD = "text,label\na fine film,kind\nso bad,unkind\n"


def test_unknown_labels_are_rejected(tmp_path, bert):
    write(tmp_path / "train.csv", GOOD)
    write(tmp_path / "dev.csv", "text,label\ngood,KIND\n")  # without a head, case matters
    with pytest.raises(DataError, match="the label 'KIND'"):
        make(tmp_path, bert)
    task = make(tmp_path, bert, known=("Kind", "Unkind"))
    assert task.validation[0]["label"] == 0
