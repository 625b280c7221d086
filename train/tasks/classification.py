"""Classifies texts or pairs of texts from a user's file: CSV or TSV with a header, JSON, a table.

The classes are the model's head's, if they include all labels; else those that a table lists; else
the labels that occur, with numbers in ascending order and other labels in alphabetical order.

CSV: columns are separated by commas, or by semicolons, tabs or pipes if only those yield the needed
columns. TSV: a line is a row; quotation marks around a text are those of spreadsheets.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from train.huggingface.tokenizer import Tokenizer
from train.tasks import Task, tables
from train.tasks.batches import DataError
from train.tasks.encoding import Text
from train.tasks.examples import Sentences, task_of
from train.tasks.files import find_files, lines, records, shorten, text_field

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", tables.SUFFIX)

# Above this number, whether labels are accepted as classes depends on the number of examples.
MANY_CLASSES = 20


class Columns(NamedTuple):
    text: str
    label: str
    second: str | None = None  # the column with a pair's second text

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,) if self.second is None else (self.text, self.second)


class Rows(NamedTuple):
    """The rows of the training or validation files."""

    texts: list[Text]
    labels: list[str]
    places: list[str]  # path and line of each label


def score(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns the accuracy, the mean F1 of the classes that occur, and Matthews correlation."""
    classes = np.union1d(predictions, labels)
    predicted, true = (np.sum(ids[:, None] == classes, axis=0) for ids in (predictions, labels))
    hits = np.sum((predictions == labels)[:, None] & (labels[:, None] == classes), axis=0)
    n = len(labels)
    # 0 if all predictions or all labels are the same; then so is the numerator.
    spread = math.sqrt((n**2 - np.sum(predicted**2)) * (n**2 - np.sum(true**2)))
    matthews = (n * np.sum(hits) - np.sum(predicted * true)) / (spread or 1)
    f1s = 2 * hits / (predicted + true)
    return {
        "accuracy": float(np.sum(hits) / n),
        "macro_f1": float(np.mean(f1s)),
        "matthews": float(matthews),
    }


def make(
    data: Path,
    tokenizer: Tokenizer,
    columns: Columns,
    *,
    sequence_length: int,
    known: Sequence[str] = (),
    **options: Any,
) -> Task:
    """Creates the task of classifying a file's texts, with the arguments of `task_of_answers`.

    `known` are the classes of the model's head, compared without case.
    """
    files = find_files(data, SUFFIXES)
    notes = list(files.notes)
    rows = [_read(paths, columns, notes) for paths in (files.train, files.validation) if paths]
    named = tables.class_names(files.train[0], columns.label)
    folded = {label.lower() for label in named or rows[0].labels}
    # Files may have a head's indices as labels, if its names are like LABEL_0.
    heads, indices = [list(known)], [str(i) for i in range(len(known))]
    heads += [indices] * any(f"LABEL_{i}" in known for i in indices)
    fitting = (names for names in heads if folded <= {name.lower() for name in names})
    classes = next(fitting, named) or _classes(rows[0].labels, columns.label, data)
    ids = [_ids(split, classes, known, columns.label) for split in rows]
    splits = [
        Sentences(split.texts, labels, tokenizer, sequence_length)
        for split, labels in zip(rows, ids, strict=True)
    ]
    options |= {"checksum": zlib.crc32(json.dumps(classes).encode()), "labels": classes}
    task = task_of(splits, data, tokenizer, notes=notes, **options)
    order = f"classes by index: {by_index(classes)}"
    if len(known) == len(classes) and classes not in heads and len(heads) > 1:
        order += ". If the model's LABEL_0 is another, correct `id2label` in its config.json"
    return task._replace(overview=(_balance(classes, ids[0]), order, *task.overview))


def by_index(classes: Sequence[str]) -> str:
    return shorten(", ".join(f"{i} {name!r}" for i, name in enumerate(classes)), 1000)


def _balance(classes: Sequence[str], ids: list[int]) -> str:
    """Returns a line about the classes' shares."""
    counts = np.bincount(ids, minlength=len(classes))
    # The rarest first, because misspelled labels are among them.
    order = np.argsort(counts, kind="stable")
    counted = ", ".join(f"{classes[i]!r} {counts[i]} ({counts[i] / len(ids):.1%})" for i in order)
    return f"{len(classes)} classes, with example counts: {shorten(counted)}"


def _classes(labels: list[str], column: str, data: Path) -> list[str]:
    """Returns the labels that occur, sorted."""
    classes = sorted(set(labels))
    if all(label.removeprefix("-").isdecimal() for label in classes):
        classes.sort(key=int)
    if not 2 <= len(classes) <= max(MANY_CLASSES, len(labels) // 2):
        listed = ", ".join(shorten(repr(label)) for label in classes[:3])
        problem = f"{column!r} has {len(classes)} classes in {len(labels)} rows: {listed}"
        raise DataError(f"{data}: column {problem}. Pass a column of classes to --label-column.")
    return classes


def _ids(split: Rows, classes: list[str], known: Sequence[str], column: str) -> list[int]:
    """Returns the id of each label; case matters only if the file defines the classes."""
    exact = {name: i for i, name in enumerate(classes)}
    folded = {name.lower(): i for i, name in enumerate(known)} if classes == list(known) else {}
    ids = []
    for label, place in zip(split.labels, split.places, strict=True):
        ids.append(exact.get(label, folded.get(label.lower(), -1)))
        if ids[-1] < 0:
            listed = shorten(", ".join(map(repr, exact)))
            problem = f"the label {label!r} in column {column!r}"
            raise DataError(f"{place}: {problem} is not in the training data's classes: {listed}.")
    return ids


def _read(paths: list[Path], columns: Columns, notes: list[str]) -> Rows:
    """Returns the files' rows; adds sentences about omitted rows to `notes`."""
    rows = Rows([], [], [])
    for path in paths:
        names = tables.class_names(path, columns.label)
        before, blank = len(rows.labels), []
        for where, record in _records(path, columns):
            record |= {x: "" for x in columns.texts if record.get(x, "") is None}
            remedy = "Pass its name with --text-column"
            texts = [text_field(where, record, x, remedy=remedy).strip() for x in columns.texts]
            if all(texts):
                rows.texts.append((texts[0], texts[1]) if len(texts) == 2 else texts[0])
                rows.labels.append(_label(where, record, columns.label, names))
                rows.places.append(where)
            else:
                blank.append(where.rpartition(" ")[2])
        if len(rows.labels) == before:
            raise DataError(f"{path}: the file has no examples.")
        if blank:
            listed = shorten(", ".join(blank))
            notes.append(f"{path.name}: left out {len(blank)} rows without text: {listed}")
    return rows


def _label(where: str, record: dict[str, Any], column: str, names: list[str] | None) -> str:
    """Returns a label as text, the same for 1 and "1.0", or true and "True"; `names` name ids."""
    if isinstance(label := record.get(column, ""), str):
        remedy = "Pass its name with --label-column"
        label = text_field(where, record, column, remedy=remedy).strip()
        label = float(label) if re.fullmatch(r"-?\d+\.\d*", label) else label
    match label:
        case bool():
            return str(label).lower()
        case float() if label.is_integer():  # columns of numbers with gaps contain floats
            return _label(where, {column: int(label)}, column, names)
        case int() if names is None:
            return str(label)
        case int() if 0 <= label < len(names):
            return names[label]
        case str() if label:
            return label.lower() if label.lower() in ("true", "false") else label
        case -1 | "" | None:  # -1 marks rows without a label
            raise DataError(f"{where}: column {column!r} has no label.")
    problem = f"column {column!r} must contain a class, but contains {shorten(repr(label))}"
    raise DataError(f"{where}: {problem}. Pass another column with --label-column.")


def _records(path: Path, columns: Columns) -> Iterator[tuple[str, dict[str, Any]]]:
    name = path.name.lower()
    if not name.endswith((".csv", ".tsv")):
        yield from records(path)
        return
    is_tsv = name.endswith(".tsv")
    remedy = "Put quotation marks around a text that contains a separator"
    remedy = "Save texts that contain tabs or line breaks as CSV" if is_tsv else remedy
    rows = _rows(path, columns, is_tsv)
    names = [cell.strip() for cell in next(rows, (1, []))[1]]
    # `_text` and `_label` report missing columns.
    for column in (*columns.texts, columns.label):
        if names.count(column) > 1:
            raise DataError(f"{path}, line 1: column {column!r} is repeated. Rename all but one.")
    for number, cells in rows:
        where = f"{path}, line {number}"
        if len(cells) != len(names):
            problem = f"the row has {len(cells)} columns, but the header has {len(names)}"
            raise DataError(f"{where}: {problem}. {remedy}.")
        yield where, dict(zip(names, cells, strict=True))


def _rows(path: Path, columns: Columns, is_tsv: bool) -> Iterator[tuple[int, list[str]]]:
    """Yields the cells of each nonblank row, and the number of its first line."""
    options: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    if not is_tsv:
        first, needed = next(lines(path), (1, ""))[1], {*columns.texts, columns.label}
        headers = {s: {cell.strip(' "\n') for cell in first.split(s)} for s in ",;\t|"}
        options = {"delimiter": next((s for s in headers if needed <= headers[s]), ",")}
    longest = csv.field_size_limit(sys.maxsize)  # for texts of more than 131,072 characters
    # Does not read ahead, so that an error names the first invalid row.
    reader = csv.reader((line for _, line in lines(path)), strict=True, **options)
    begin = 1
    try:
        for cells in reader:
            number, begin = begin, reader.line_num + 1
            if cells:
                yield number, [_unquoted(cell) for cell in cells] if is_tsv else cells
    except csv.Error as error:
        problem = f"the row that ends on line {reader.line_num} is not valid CSV ({error})"
        remedy = 'Write each `"` inside a text as `""`'
        raise DataError(f"{path}, line {begin}: {problem}. {remedy}.") from error
    finally:
        csv.field_size_limit(longest)


def _unquoted(cell: str) -> str:
    """Removes the quotation marks that spreadsheets put around a cell: `"a ""b"" c"`."""
    is_quoted = re.fullmatch('"([^"]|"")*"', cell)
    return cell[1:-1].replace('""', '"') if is_quoted else cell
