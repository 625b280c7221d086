"""GLUE: a class for a sentence, or for a pair of sentences, from the standard TSV files.

    sst2   is a review kind or unkind                       accuracy
    cola   is a sentence grammatical                        Matthews correlation
    mrpc   do two sentences say the same                    F1, accuracy
    qqp    do two questions ask the same                    F1, accuracy
    rte    does a sentence follow from another              accuracy
    qnli   does a sentence answer a question                accuracy
    mnli   does a sentence follow, contradict or neither    accuracy

The files are those of GLUE's own download (https://gluebenchmark.com/tasks), `train.tsv` and
`dev.tsv`; MNLI has two of the latter, for texts of the kinds that it trains on and of others. CoLA
may also have the names of its own release, of which GLUE's dev.tsv is the two dev files together.
MRPC's own release has no dev.tsv: GLUE takes one out of `msr_paraphrase_train.txt`. The test files
carry no labels and are not read.

Columns are found by their names in the header, so a file may have further ones; CoLA has no header.
Every line must have as many columns as the header. A quotation mark is an ordinary character.

One exception. In QQP's official train.tsv some questions hold a line break, so that a few lines are
halves of an example. There, lines without all their columns, or with an empty question, are left
out and named in the task's notes, as long as they are at most one in `BROKEN_SHARE`.

The tokenizer's own template puts the special tokens around a sentence or a pair. What is longer
than the sequence length is cut on the right, of a pair the longer sentence first.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sklearn import metrics

from train.data import DataError
from train.tasks import Task
from train.tasks.encoding import Encoded, Text, encode
from train.tasks.files import lines, shorten
from train.tasks.overview import said_of_example, said_of_lengths
from train.tokenizer import Tokenizer

# Of QQP's 363,870 lines some 20 are broken. A file with many more is not that file.
BROKEN_SHARE = 1000
NAMED_LINES = 30

Score = Callable[[np.ndarray, np.ndarray], dict[str, float]]


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The share of the predictions `(n,)` that equal the labels `(n,)`."""
    return {"accuracy": float(metrics.accuracy_score(labels, predictions))}


def f1_and_accuracy(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """F1 of class 1, 0 if it was neither predicted nor there, and the accuracy."""
    f1 = metrics.f1_score(labels, predictions, zero_division=0.0)
    return {"f1": float(f1), **accuracy(predictions, labels)}


def matthews(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Matthews correlation in [-1, 1], 0 if all predictions or all labels are the same."""
    return {"matthews": float(metrics.matthews_corrcoef(labels, predictions))}


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
    """How the files of a task look, and what counts."""

    folder: str  # the task's name in GLUE's download
    sentences: tuple[str, ...]  # names of their columns
    label: str  # name of its column
    labels: Mapping[str, str]  # what the file says: the name of the class, in the order of the ids
    score: Score
    best: str
    layouts: tuple[Files, ...] = (_PLAIN,)
    columns: tuple[str, ...] | None = None  # of files without a header
    skips_broken: bool = False  # in the training file


FORMATS: Mapping[str, Format] = {
    "sst2": Format(
        folder="SST-2",
        sentences=("sentence",),
        label="label",
        labels={"0": "negative", "1": "positive"},
        score=accuracy,
        best="accuracy",
    ),
    "cola": Format(
        folder="CoLA",
        sentences=("sentence",),
        label="label",
        labels={"0": "unacceptable", "1": "acceptable"},
        score=matthews,
        best="matthews",
        layouts=(_PLAIN, _COLA_RELEASE),
        columns=("source", "label", "mark", "sentence"),
    ),
    "mrpc": Format(
        folder="MRPC",
        sentences=("#1 String", "#2 String"),
        label="Quality",
        labels={"0": "not_equivalent", "1": "equivalent"},
        score=f1_and_accuracy,
        best="f1",
    ),
    "qqp": Format(
        folder="QQP",
        sentences=("question1", "question2"),
        label="is_duplicate",
        labels={"0": "not_duplicate", "1": "duplicate"},
        score=f1_and_accuracy,
        best="f1",
        skips_broken=True,
    ),
    "rte": Format(
        folder="RTE",
        sentences=("sentence1", "sentence2"),
        label="label",
        labels={"entailment": "entailment", "not_entailment": "not_entailment"},
        score=accuracy,
        best="accuracy",
    ),
    "qnli": Format(
        folder="QNLI",
        sentences=("question", "sentence"),
        label="label",
        labels={"entailment": "entailment", "not_entailment": "not_entailment"},
        score=accuracy,
        best="accuracy",
    ),
    "mnli": Format(
        folder="MNLI",
        sentences=("sentence1", "sentence2"),
        label="gold_label",
        labels={
            "entailment": "entailment",
            "neutral": "neutral",
            "contradiction": "contradiction",
        },
        score=accuracy,
        best="matched/accuracy",
        layouts=(_MNLI,),
    ),
}


def make(name: str, data: Path, tokenizer: Tokenizer, *, sequence_length: int) -> Task:
    """A GLUE task.

    Args:
        name: One of `FORMATS`.
        data: The folder with the task's files, or the one above it that has them in a folder of
            GLUE's name for the task (`SST-2`, `CoLA`, ...).
        tokenizer: Of the model.
        sequence_length: Tokens of an example, T.

    Raises:
        DataError: If the task is unknown, or the files are missing, empty or not of its format;
            with the file and the line.
    """
    if name not in FORMATS:
        raise DataError(f"expected a GLUE task, one of {', '.join(FORMATS)}, got {name!r}.")
    fmt = FORMATS[name]
    special = tokenizer.tokens.num_special_tokens_to_add(len(fmt.sentences) == 2)
    if sequence_length <= special:
        raise DataError(
            f"expected a `sequence_length` above {special}, the special tokens of an example, got "
            f"{sequence_length}. For {name} take 64 or more."
        )

    folder, layout = _find(name, fmt, data)
    sources: dict[str, Sentences] = {}
    notes = []
    for part, files in layout.items():
        labels: list[int] = []
        reader = _Reader(fmt, skips_broken=fmt.skips_broken and part == "train")
        texts = reader.read([folder / file for file in files], labels)
        encoded = encode(
            tokenizer.tokens,
            texts,
            vocabulary=tokenizer.vocabulary,
            special=True,
            longest=sequence_length,
        )
        sources[part] = Sentences(
            encoded, np.array(labels, np.int32), sequence_length=sequence_length, pad=tokenizer.pad
        )
        notes += reader.notes
    checksum = 0
    for source in sources.values():
        checksum = source.checksum(checksum)
    train = sources.pop("train")
    names = tuple(fmt.labels.values())
    return Task(
        name=name,
        kind="encoder",
        train=train,
        validation=sources,
        labels=names,
        score=fmt.score,
        best=fmt.best,
        checksum=checksum,
        notes=tuple(notes),
        overview=(train.said_of_lengths(), *said_of_example(train, tokenizer, labels=names)),
    )


class Sentences:
    """Sentences, or pairs of them, with their labels, as examples of a fixed length."""

    def __init__(self, encoded: Encoded, labels: np.ndarray, *, sequence_length: int, pad: int):
        self._encoded = encoded
        self._labels = labels
        self._length = self.longest = sequence_length
        self.lengths = np.diff(encoded.starts)
        self._pad = pad
        self._rows: np.ndarray | None = None  # those that are taken; None for all

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(f"expected an index from 0 to {len(self) - 1}, got {i}")
        i = i if self._rows is None else int(self._rows[i])
        span = self._encoded.span(i)
        n = span.stop - span.start
        tokens = np.full(self._length, self._pad, np.int32)
        types = np.zeros(self._length, np.uint8)
        mask = np.zeros(self._length, np.uint8)
        tokens[:n] = self._encoded.tokens[span]
        types[:n] = self._encoded.types[span]
        mask[:n] = 1
        return {"tokens": tokens, "types": types, "mask": mask, "label": self._labels[i, ...]}

    def some(self, chosen: np.ndarray) -> Sentences:
        """The examples with these indices, of all that there are."""
        other = copy.copy(self)
        other._rows, other.lengths = chosen, self.lengths[chosen]
        return other

    def said_of_lengths(self) -> str:
        """How long the texts are, all that there are."""
        whole = self._encoded.whole
        return said_of_lengths(whole, np.arange(len(whole)), self._length)

    def checksum(self, start: int) -> int:
        """CRC-32 of tokens, types, lengths, labels and choice, going on from `start`."""
        choice = () if self._rows is None else (self._rows,)
        for held in (*self._encoded[:3], self._labels, *choice):
            start = zlib.crc32(held, start)
        return start


def _find(name: str, fmt: Format, data: Path) -> tuple[Path, Files]:
    """The folder that has the task's files, and their names."""
    folders = [data, data / fmt.folder]
    for folder in folders:
        for layout in fmt.layouts:
            if all((folder / file).is_file() for files in layout.values() for file in files):
                return folder, layout
    wanted = " or ".join(
        ", ".join(file for files in layout.values() for file in files) for layout in fmt.layouts
    )
    if not data.is_dir():
        found = "a file" if data.exists() else "no such folder"
    else:
        names = sorted(path.name for path in data.iterdir())
        found = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") or "an empty folder"
    raise DataError(
        f"expected the files of {name} in {data} or in {fmt.folder} below it: {wanted}; found "
        f"{found}. They are those of GLUE's download, https://gluebenchmark.com/tasks."
    )


class _Reader:
    """Reads the files of one part of a task, line by line."""

    def __init__(self, fmt: Format, *, skips_broken: bool):
        self._fmt = fmt
        self._skips_broken = skips_broken
        self.notes: list[str] = []

    def read(self, paths: list[Path], labels: list[int]) -> Iterator[Text]:
        """Sentences or pairs of all files in order; the id of each label goes to `labels`."""
        for path in paths:
            before = len(labels)
            yield from self._read_file(path, labels)
            if len(labels) == before:
                raise DataError(
                    f"{path}: expected examples, found none. The file was cut off: fetch it again."
                )

    def _read_file(self, path: Path, labels: list[int]) -> Iterator[Text]:
        fmt, numbered = self._fmt, lines(path)
        names = fmt.columns or self._header(path, next(numbered, None))
        sentences = [names.index(column) for column in fmt.sentences]
        label = names.index(fmt.label)
        ids = {written: i for i, written in enumerate(fmt.labels)}
        broken: list[int] = []
        number = 0
        for number, line in numbered:
            cells = line.removesuffix("\n").split("\t")
            texts = [cells[i].strip() for i in sentences] if len(cells) == len(names) else []
            if self._skips_broken and not (texts and all(texts)):
                broken.append(number)
                continue
            if len(cells) != len(names):
                raise DataError(
                    f"{path}, line {number}: expected {len(names)} columns separated by tabs "
                    f"({', '.join(names)}), got {len(cells)}. Correct the line, or fetch the file "
                    "again."
                )
            if not all(texts):
                missing = fmt.sentences[texts.index("")]
                raise DataError(
                    f"{path}, line {number}: expected text in column {missing!r}, found it empty. "
                    "Correct the line, or take it out."
                )
            if cells[label] not in ids:
                raise DataError(
                    f"{path}, line {number}: expected a label of {', '.join(ids)} in column "
                    f"{fmt.label!r}, got {cells[label]!r}. Correct the line, or take it out."
                )
            labels.append(ids[cells[label]])
            yield (texts[0], texts[1]) if len(texts) == 2 else texts[0]
        self._note_broken(path, broken, number)

    def _header(self, path: Path, first: tuple[int, str] | None) -> tuple[str, ...]:
        needed = (*self._fmt.sentences, self._fmt.label)
        if first is None:
            raise DataError(
                f"{path}, line 1: expected a header with {', '.join(needed)}, found an empty file. "
                "Fetch it again."
            )
        header = first[1].removesuffix("\n")
        names = tuple(header.split("\t"))
        missing = [column for column in needed if column not in names]
        if missing:
            raise DataError(
                f"{path}, line 1: expected a header with the columns {', '.join(needed)}, "
                f"separated by tabs; {', '.join(missing)} is not in it: {shorten(header)!r}. Is "
                "this the file of another task, or without its header?"
            )
        return names

    def _note_broken(self, path: Path, broken: list[int], last: int) -> None:
        if not broken:
            return
        named = ", ".join(map(str, broken[:NAMED_LINES]))
        if len(broken) > NAMED_LINES:
            named += ", ..."
        if len(broken) * BROKEN_SHARE > last:
            raise DataError(
                f"{path}: expected at most one line in {BROKEN_SHARE} without its columns or "
                f"with an empty question, as in the official file; {len(broken)} of {last} are: "
                f"lines {named}. Correct them, or fetch the file again."
            )
        self.notes.append(
            f"{path.name}: left out {len(broken)} of {last} lines, which lack columns or a "
            f"question: lines {named}"
        )
