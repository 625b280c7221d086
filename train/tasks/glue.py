"""GLUE: classification of sentences or pairs of sentences, from the standard TSV files.

The files are from GLUE's own download (https://gluebenchmark.com/tasks), `train.tsv` and `dev.tsv`;
MNLI has two of the latter. CoLA may also use the names of its own release, whose two dev files
together are GLUE's dev.tsv. The header names the columns; CoLA has none. A quotation mark is an
ordinary character.

In QQP's official train.tsv, some questions contain a line break, which splits an example into two
lines. These lines, which lack columns or a question, are left out and named in the task's notes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from train.huggingface.tokenizer import Tokenizer
from train.tasks import Score, Task
from train.tasks.batches import DataError
from train.tasks.encoding import Text
from train.tasks.examples import Sentences, task_of
from train.tasks.files import expect_examples, first_30, lines, shorten


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns the share of the predictions `(n,)` that equal the labels `(n,)`."""
    return {"accuracy": float(np.mean(predictions == labels))}


def f1(predictions: np.ndarray, labels: np.ndarray, of: int = 1) -> float:
    """Returns the F1 of a class, or 0 if it was neither predicted nor present."""
    predicted, true = predictions == of, labels == of
    count = np.sum(predicted) + np.sum(true)
    return float(2 * np.sum(predicted & true) / count) if count else 0.0


def f1_and_accuracy(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    return {"f1": f1(predictions, labels), **accuracy(predictions, labels)}


def matthews(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns the Matthews correlation, or 0 if all predictions or all labels are the same."""
    if not (np.ptp(predictions) and np.ptp(labels)):
        return {"matthews": 0.0}
    # For two classes it is the correlation of their ids.
    return {"matthews": float(np.corrcoef(predictions, labels)[0, 1])}


Files = Mapping[str, tuple[str, ...]]  # "train" or the name of a validation: file names

_PLAIN: Files = {"train": ("train.tsv",), "validation": ("dev.tsv",)}
_COLA_RELEASE: Files = {
    "train": ("in_domain_train.tsv",),
    "validation": ("in_domain_dev.tsv", "out_of_domain_dev.tsv"),
}
_MNLI: Files = {
    "train": ("train.tsv",),
    "matched": ("dev_matched.tsv",),
    "mismatched": ("dev_mismatched.tsv",),
}


class Format(NamedTuple):
    folder: str  # the task's name in GLUE's download
    sentences: tuple[str, ...]  # names of the text columns
    label: str  # name of the label column
    labels: Mapping[str, str]  # labels in the file and class names, by id
    score: Score = accuracy
    best: str = "accuracy"
    layouts: tuple[Files, ...] = (_PLAIN,)  # file names
    columns: tuple[str, ...] | None = None  # column indices in files without a header
    skips_broken: bool = False  # in the training file


_EQUIVALENT = {"0": "not_equivalent", "1": "equivalent"}
_DUPLICATE = {"0": "not_duplicate", "1": "duplicate"}
_F1: dict[str, Any] = {"score": f1_and_accuracy, "best": "f1"}
_ENTAILMENT = {name: name for name in ("entailment", "not_entailment")}
_MNLI_LABELS = {name: name for name in ("entailment", "neutral", "contradiction")}

FORMATS: Mapping[str, Format] = {
    "sst2": Format("SST-2", ("sentence",), "label", {"0": "negative", "1": "positive"}),
    "cola": Format(
        "CoLA",
        ("sentence",),
        "label",
        {"0": "unacceptable", "1": "acceptable"},
        score=matthews,
        best="matthews",
        layouts=(_PLAIN, _COLA_RELEASE),
        columns=("source", "label", "mark", "sentence"),
    ),
    "mrpc": Format("MRPC", ("#1 String", "#2 String"), "Quality", _EQUIVALENT, **_F1),
    "qqp": Format(
        "QQP", ("question1", "question2"), "is_duplicate", _DUPLICATE, skips_broken=True, **_F1
    ),
    "rte": Format("RTE", ("sentence1", "sentence2"), "label", _ENTAILMENT),
    "qnli": Format("QNLI", ("question", "sentence"), "label", _ENTAILMENT),
    "mnli": Format(
        "MNLI",
        ("sentence1", "sentence2"),
        "gold_label",
        _MNLI_LABELS,
        best="matched/accuracy",
        layouts=(_MNLI,),
    ),
}


def make(name: str, data: Path, tokenizer: Tokenizer, *, sequence_length: int) -> Task:
    """Creates the GLUE task `name` from the folder `data` or its subfolder (`SST-2`, ...)."""
    fmt = FORMATS[name]
    folder, layout = _find(name, fmt, data)
    notes: list[str] = []
    sources: dict[str, Sentences] = {}
    for part, files in layout.items():
        paths = [folder / file for file in files]
        labels: list[int] = []
        broken = [] if fmt.skips_broken and part == "train" else None
        read = partial(_read, fmt=fmt, broken=broken, labels=labels)
        sources[part] = Sentences(expect_examples(paths, read), labels, tokenizer, sequence_length)
        if broken:
            counts = f"{len(broken)} of {1 + len(labels) + len(broken)} lines, which lack text"
            notes.append(f"{paths[0].name}: left out {counts}: lines {first_30(broken)}")
    train = sources.pop("train")
    return task_of(
        name,
        train,
        sources,
        tokenizer,
        labels=tuple(fmt.labels.values()),
        notes=notes,
        score=fmt.score,
        best=fmt.best,
    )


def _find(name: str, fmt: Format, data: Path) -> tuple[Path, Files]:
    for folder in (data, data / fmt.folder):
        for layout in fmt.layouts:
            if all((folder / file).is_file() for files in layout.values() for file in files):
                return folder, layout
    wanted = " or ".join(
        ", ".join(file for files in layout.values() for file in files) for layout in fmt.layouts
    )
    raise DataError(
        f"{data} and its folder {fmt.folder} lack files of {name}: {wanted}. Download them from "
        "GLUE, https://gluebenchmark.com/tasks."
    )


def _read(path: Path, fmt: Format, broken: list[int] | None, labels: list[int]) -> Iterator[Text]:
    """Yields the texts of a file; appends label ids to `labels`, split lines to `broken`."""
    numbered = lines(path)
    names = fmt.columns or _header(path, fmt, next(numbered, (1, ""))[1])
    ids = {written: i for i, written in enumerate(fmt.labels)}
    for number, line in numbered:
        where = f"{path}, line {number}"
        cells = line.removesuffix("\n").split("\t")
        row = dict(zip(names, cells, strict=False)) if len(cells) == len(names) else {}
        texts = [row.get(column, "").strip() for column in fmt.sentences]
        if broken is not None and not all(texts):
            broken.append(number)
            continue
        if not row:
            raise DataError(
                f"{where}: needs {len(names)} columns ({', '.join(names)}), but has {len(cells)}."
            )
        if not all(texts):
            missing = fmt.sentences[texts.index("")]
            raise DataError(f"{where}: column {missing!r} is empty.")
        if row[fmt.label] not in ids:
            raise DataError(
                f"{where}: column {fmt.label!r} must have a label of {', '.join(ids)}, but has "
                f"{row[fmt.label]!r}."
            )
        labels.append(ids[row[fmt.label]])
        yield (texts[0], texts[1]) if len(texts) == 2 else texts[0]


def _header(path: Path, fmt: Format, line: str) -> tuple[str, ...]:
    needed = (*fmt.sentences, fmt.label)
    names = tuple(line.removesuffix("\n").split("\t"))
    if missing := [column for column in needed if column not in names]:
        raise DataError(
            f"{path}, line 1: the header {shorten(line.strip())!r} lacks {', '.join(missing)}. It "
            f"must have the columns {', '.join(needed)}, separated by tabs."
        )
    return names
