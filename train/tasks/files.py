"""Finds files with examples, reads their lines, and selects validation examples."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from train.tasks import tables
from train.tasks.batches import DataError

# Words that indicate a file's purpose, as in the `datasets` library.
_SPLITS = {
    "train": r"train(ing)?",
    "validation": r"val(id(ation)?)?|dev",
    "test": r"test(ing)?|eval(uation)?",
}
# The end of a shard's name: `train-00000-of-00003-0a1b`.
_SHARD = re.compile(r"-\d+-of-\d+.*")

Example = TypeVar("Example")


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
    names = sorted(
        path.name
        for path in data.iterdir()
        # Omits files that `datasets` adds.
        if path.name.lower().endswith(suffixes) and not path.name.startswith((".", "dataset_info"))
    )
    splits: dict[str | None, list[str]] = {None: [], "train": [], "validation": [], "test": []}
    for name in names:
        splits[_split_of(name)].append(name)
    notes, unnamed = [], splits[None]
    if splits["train"] and unnamed:
        notes.append(f"{data}: left out {', '.join(unnamed)}, because there are train* files")
    if splits["test"]:
        notes.append(f"{data}: left out the test data {', '.join(splits['test'])}")
    train = splits["train"] or unnamed
    if not train:
        present = ", ".join(sorted(path.name for path in data.iterdir())[:12]) or "nothing"
        raise DataError(f"{data} has no training data (train*, {kinds}). It contains {present}.")
    return Files([data / x for x in train], [data / x for x in splits["validation"]], notes)


def _split_of(name: str) -> str | None:
    """Returns the split that a name's first or last word indicates, or None.

    `train-00000-of-00002` and `chat_train` indicate one; `trains` and `how-to-train-a-dog` do not.
    """
    words = re.findall(r"[^-_. \d]+", _SHARD.sub("", Path(name).stem.lower()))
    splits = {
        split
        for word in (words[:1] + words[-1:])
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
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: the text is not UTF-8: {line[error.start]:#x} at byte "
                    f"{error.start + 1} of the line ({error.reason})."
                ) from error
            if "\0" in text:  # usually UTF-16, or a damaged file
                raise DataError(
                    f"{path}, line {number}: there is a NUL byte. Convert the text to UTF-8."
                )
            yield number, text[:-2] + "\n" if text.endswith("\r\n") else text


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the JSON objects in a list, in lines or in a table, each with its location."""
    if tables.is_table(path):
        yield from tables.rows(path)
        return
    if path.name.lower().endswith(".json"):
        text = "".join(line for _, line in lines(path))
        if text.lstrip().startswith("["):
            for number, item in enumerate(_parse(str(path), text), 1):
                yield _object(f"{path}, item {number}", item)
            return
    for number, line in lines(path):
        if line.strip():
            where = f"{path}, line {number}"
            yield _object(where, _parse(where, line.removesuffix("\n")))


def common_path(paths: Sequence[Path]) -> Path:
    """Returns the only file, or the folder that contains all files."""
    return paths[0] if len(paths) == 1 else paths[0].parent


def expect_examples(
    paths: list[Path], read: Callable[[Path], Iterator[Example]]
) -> Iterator[Example]:
    """Yields the results of `read` for each file; raises `DataError` if a file has none."""
    for path in paths:
        empty = True
        for example in read(path):
            yield example
            empty = False
        if empty:
            raise DataError(f"{path}: the file has no examples.")


def text_field(
    where: str, record: dict[str, Any], field: str, *, remedy: str = "Rename the field"
) -> str:
    """Returns the text in a record's field; raises `DataError` with the `remedy` if missing."""
    if field not in record:
        names = ", ".join(map(repr, record)) or "none"
        raise DataError(f"{where}: the field {field!r} is missing (fields: {names}). {remedy}.")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(
            f"{where}: the field {field!r} must be text, but is "
            f"{shorten(json.dumps(text, default=repr))}."
        )
    return text


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


def shorten(text: str) -> str:
    """Returns the text, cut off with an ellipsis for a message."""
    return text if len(text) <= 100 else text[:100] + "..."


def _parse(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        got = shorten(text.strip())
        raise DataError(f"{where}: the text is not valid JSON ({error}): {got!r}.") from error


def _object(where: str, item: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(item, dict):
        raise DataError(
            f'{where}: must be an object {{"field": ...}}, but is {shorten(json.dumps(item))}.'
        )
    return where, item
