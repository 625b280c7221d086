"""Finds files with examples, reads their lines, and selects validation examples."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from train.huggingface.json_files import POINTER, documents, foreign
from train.tasks import tables
from train.tasks.batches import DataError

# Words in a name that indicate a file's purpose, as in the `datasets` library.
_SPLITS = {
    "train": r"train(ing)?",
    "validation": r"val(id(ation)?)?|dev",
    "test": r"test(ing)?|eval(uation)?",
}
# The beginning of names that are not data: hidden files, and those that `datasets` adds or ignores.
_NO_DATA = (".", "config.json", "dataset_dict", "dataset_info")


class Files(NamedTuple):
    """The files of a task, each split sorted by name."""

    train: list[Path]
    validation: list[Path]  # empty if a share of the training files is used for validation
    notes: list[str]


def find_files(data: Path, suffixes: tuple[str, ...]) -> Files:
    """Finds a task's files in a file or folder; their names end in one of `suffixes`.

    In a folder, names decide which files are for training or validation (`_split_of`); test data is
    left out. If no name marks training data, files without a split are used for training.
    """
    if data.is_file() and data.name.lower().endswith(suffixes):
        return Files([data], [], [])
    kinds = " or ".join("*" + suffix for suffix in suffixes)
    if not data.is_dir():
        problem = "has another suffix" if data.exists() else "does not exist"
        raise DataError(f"`data`: {data} {problem}. Pass a {kinds} file, or a folder of them.")
    present = sorted(path.name for path in data.iterdir())
    names = [x for x in present if x.lower().endswith(suffixes) and not x.startswith(_NO_DATA)]
    if "dataset_dict.json" in present or any(name.endswith(".arrow") for name in present):
        remedy = "datasets.load_from_disk(...).to_parquet('train.parquet')"
        raise DataError(f"{data} has Arrow files of `save_to_disk`. Write Parquet: {remedy}.")
    splits: dict[str | None, list[str]] = {None: [], "train": [], "validation": [], "test": []}
    for name in names:
        if not (data / name).is_file():
            raise DataError(f"{data / name} is a folder or a broken link. Rename or remove it.")
        splits[_split_of(name)].append(name)
    notes, unnamed = [], splits[None]
    if splits["train"] and unnamed:
        notes.append(f"{data}: left out {', '.join(unnamed)}, because there are train* files")
    if splits["test"]:
        notes.append(f"{data}: left out the test data {', '.join(splits['test'])}")
    train = splits["train"] or unnamed
    if not train:
        listed = ", ".join(present[:12]) or "nothing"
        raise DataError(f"{data} has no training data (train*, {kinds}). It contains {listed}.")
    return Files([data / x for x in train], [data / x for x in splits["validation"]], notes)


def _split_of(name: str) -> str | None:
    """Returns the split that a word in a name indicates, or None.

    `train-00000-of-00002` and `chat_train2` indicate one; `trains` does not.
    """
    splits = {
        split
        for word in re.split("[-._ 0-9]", name.lower())
        for split, pattern in _SPLITS.items()
        if re.fullmatch(f"({pattern})(set|data)?", word)
    }
    if len(splits) > 1:
        raise DataError(f"`data`: {name} could be training or other data. Rename it.")
    return splits.pop() if splits else None


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields lines of UTF-8 text, numbered from 1; only a newline ends a line."""
    # Opened in binary mode: in text mode, Python would also split lines at carriage returns, and
    # could not report which line has the wrong encoding.
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                problem = "there is a NUL byte" if "\0" in text else ""  # UTF-16, or a damaged file
            except UnicodeDecodeError as error:
                byte = f"{line[error.start]:#x} at byte {error.start + 1} of the line"
                text, problem = "", f"the text is not UTF-8: {byte} ({error.reason})"
            if problem:
                raise DataError(f"{path}, line {number}: {problem}. Convert the text to UTF-8.")
            if number == 1 and line.startswith(POINTER):
                raise DataError(f"{path}: there are no examples. {foreign(path)}")
            yield number, text[:-2] + "\n" if text.endswith("\r\n") else text


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields at least one JSON object in a table or in a file, each with its location.

    A file contains an object per line, objects of several lines, or a list of objects.
    """
    rows = tables.rows(path) if tables.is_table(path) else _objects(path)
    if (first := next(rows, None)) is None:
        raise DataError(f"{path}: the file has no examples.")
    yield first
    yield from rows


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    values = _values(path)
    head = list(itertools.islice(values, 2))
    if len(head) == 1 and isinstance(value := head[0][1], list):
        head = [(f"item {number}", item) for number, item in enumerate(value, 1)]
    for place, item in itertools.chain(head, values):
        if not isinstance(item, dict):
            got = shorten(json.dumps(item))
            raise DataError(f'{path}, {place}: must be an object {{"field": ...}}, but is {got}.')
        yield f"{path}, {place}", item


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the JSON values in a file, each with its line."""
    numbered = lines(path)
    first, start = next((pair for pair in numbered if pair[1].strip()), (1, ""))
    if start.rstrip()[-1:] not in ("}", "]"):  # the first value has more lines
        start += "".join(line for _, line in numbered)
    for number, text in itertools.chain([(first, start)], numbered):
        try:
            values = documents(text)
        except json.JSONDecodeError as error:
            where = f"{path}, line {number + error.lineno - 1}, column {error.colno}"
            got = shorten(text.split("\n")[error.lineno - 1].strip())
            problem = f"the text is not valid JSON ({error.msg}): {got!r}"
            raise DataError(f"{where}: {problem}.") from error
        before = 0
        for place, value in values:
            number, before = number + text.count("\n", before, place), place
            yield f"line {number}", value


def common_path(paths: Sequence[Path]) -> Path:
    """Returns the only file, or the folder that contains all files."""
    return paths[0] if len(paths) == 1 else paths[0].parent


def text_field(
    where: str, record: dict[str, Any], field: str, *, remedy: str = "Rename the field"
) -> str:
    """Returns the text in a record's field; raises `DataError` with the `remedy` if missing."""
    if field not in record:
        names = shorten(", ".join(map(repr, record))) or "none"
        raise DataError(f"{where}: the field {field!r} is missing (fields: {names}). {remedy}.")
    if not isinstance(record[field], str):
        got = shorten(json.dumps(record[field], default=repr))
        raise DataError(f"{where}: the field {field!r} must be text, but is {got}.")
    return record[field]


def split(
    sizes: np.ndarray, *, validation_share: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of training and validation examples; neither is empty if n > 1.

    Goes through the examples in random order, and uses each for validation if its entry in `sizes`
    `(n,)` still fits in the share.
    """
    if validation_share == 1:
        return np.arange(0), np.arange(len(sizes))
    order = np.random.default_rng(seed).permutation(len(sizes))
    room, smallest = validation_share * float(sizes.sum()), sizes.min()
    in_validation = np.zeros(len(sizes), bool)
    for i in order:  # an array, because a list of 100 million numbers takes gigabytes
        if room < smallest:
            break
        if sizes[i] <= room:
            in_validation[i] = True
            room -= sizes[i]
    # Examples of size 0 may all have fit.
    if in_validation.all():
        in_validation[order[-1]] = False
    if not in_validation.any():
        in_validation[np.argmin(sizes)] = True
    return np.flatnonzero(~in_validation), np.flatnonzero(in_validation)


def shorten(text: str, most: int = 100) -> str:
    """Returns the text, cut off with an ellipsis for a message."""
    return text if len(text) <= most else text[:most] + "..."
