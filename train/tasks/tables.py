"""Tables as Hugging Face `datasets` has them: Parquet, and Arrow as `save_to_disk` writes it.

Needs `pyarrow`, the extra `data`. A table's row is as an object of JSON: a dict by column.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from train.data import DataError

SUFFIXES = (".parquet", ".arrow")

# Of what `save_to_disk` writes: which parts a folder has, and which files a part.
PARTS, STATE = "dataset_dict.json", "state.json"
INFO = "dataset_info.json"  # also in its cache

# Rows that are made into objects at a time: some have long texts.
ROWS = 256


def is_table(path: Path) -> bool:
    """Whether the name of a file is that of a table."""
    return path.name.lower().endswith(SUFFIXES)


def rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a table, each with where it is: path and number, from 1.

    Raises:
        DataError: If pyarrow is not there, or the file is no table.
    """
    number = 0
    for batch in _batches(path):
        for row in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", row


def class_names(path: Path, column: str) -> list[str] | None:
    """The names of the classes whose numbers a column holds; None if it says none.

    Raises:
        DataError: As `rows`.
    """
    metadata = _schema(path).metadata or {}
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        names = features[column]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


def saved_parts(folder: Path) -> dict[str, list[Path]] | None:
    """The files of a folder that `save_to_disk` has written, by part.

    Returns:
        For several parts (`DatasetDict`) by their names, for a single one (`Dataset`) by "";
        None if it has not written the folder.

    Raises:
        DataError: If a part is missing, it is not said which files it has, or the folder is one of
            the cache of `datasets`.
    """
    if (folder / PARTS).is_file():
        names = _listed(folder / PARTS, "splits")
        return {str(name): _files_of(folder / str(name)) for name in names}
    if (folder / STATE).is_file() and "_data_files" in _object(folder / STATE):
        return {"": _files_of(folder)}
    if (folder / INFO).is_file() and any(folder.glob("*.arrow")):
        raise DataError(
            f"expected a folder that `save_to_disk` of `datasets` has written, got {folder}, which "
            f"has Arrow files and {INFO} but no {STATE}: a part of its cache. Save it to a folder "
            "of its own: dataset.save_to_disk(DIR)."
        )
    return None


def _files_of(folder: Path) -> list[Path]:
    entries = _listed(folder / STATE, "_data_files")
    files = [folder / str(entry.get("filename")) for entry in entries if isinstance(entry, dict)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise DataError(f"expected {', '.join(missing)} in {folder}, as {STATE} says, found none.")
    return files


def _listed(path: Path, key: str) -> list[Any]:
    listed = _object(path).get(key)
    if not isinstance(listed, list):
        raise DataError(
            f"{path}: expected a list `{key}`, as `save_to_disk` of `datasets` writes it, got "
            f"{listed!r}."
        )
    return listed


def _object(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"expected {path}, as `save_to_disk` of `datasets` writes it, got: {error}."
        ) from error
    return held if isinstance(held, dict) else {}


def _batches(path: Path) -> Iterator[Any]:
    arrow = _pyarrow(path)
    try:
        if path.name.lower().endswith(".parquet"):
            with arrow.parquet.ParquetFile(path) as file:
                yield from file.iter_batches(batch_size=ROWS)
            return
        with arrow.memory_map(str(path)) as file:
            for batch in _opened(arrow, file)[1]:
                for start in range(0, len(batch), ROWS):
                    yield batch.slice(start, ROWS)
    except (arrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _schema(path: Path) -> Any:
    arrow = _pyarrow(path)
    try:
        if path.name.lower().endswith(".parquet"):
            return arrow.parquet.read_schema(path)
        with arrow.memory_map(str(path)) as file:
            return _opened(arrow, file)[0]
    except (arrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _opened(arrow: Any, file: Any) -> tuple[Any, Iterable[Any]]:
    """The schema and the batches of an Arrow file of either kind; `datasets` writes streams."""
    begin = file.read(6)
    file.seek(0)
    if begin == b"ARROW1":
        reader = arrow.ipc.open_file(file)
        return reader.schema, map(reader.get_batch, range(reader.num_record_batches))
    reader = arrow.ipc.open_stream(file)
    return reader.schema, reader


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"expected pyarrow, which reads {path.name}, got an environment without it ({error}). "
            "It is the extra `data`: python -m pip install -e '.[train,data]'."
        ) from error
    return pyarrow


def _damaged(path: Path, error: Exception) -> DataError:
    size = path.stat().st_size if path.exists() else 0
    return DataError(
        f"{path}: expected a table, got {size} bytes that pyarrow cannot read ({error}). Fetch the "
        "file again: of a repository that was cloned without git-lfs there are only pointers."
    )
