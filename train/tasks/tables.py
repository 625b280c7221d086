"""Tables from Hugging Face's `datasets`: Parquet, and Arrow files from `save_to_disk`.

Needs `pyarrow`, in the extra `data`. A row is a dict by column, like a JSON object. Nested objects
lose their nulls, because a column gives all objects the fields of any object.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from train.huggingface.json_files import read_object
from train.tasks.batches import DataError

SUFFIXES = (".parquet", ".arrow")

# Names in the output of `save_to_disk`: parts of a folder, and files of a part.
PARTS, STATE = "dataset_dict.json", "state.json"
INFO = "dataset_info.json"  # also in its cache

# Number of rows that are converted at once; some have long texts.
ROWS = 256


def is_table(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES)


def rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of a table, each with its location: path and number, from 1."""
    number = 0
    with _opened(path) as (_, batches):
        for batch in batches:
            for start in range(0, len(batch), ROWS):
                for row in batch.slice(start, ROWS).to_pylist():
                    number += 1
                    where = f"{path}, row {number}"
                    yield where, {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    """Removes the null fields that an object has only because other objects have them."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def class_names(path: Path, column: str) -> list[str] | None:
    """Returns the class names that a column's schema lists, or None."""
    with _opened(path) as (schema, _):
        metadata = schema.metadata or {}
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        names = features[column]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


def saved_parts(folder: Path) -> dict[str, list[Path]] | None:
    """Returns the files from `save_to_disk` by part (a single part is ""), or None."""
    if (folder / PARTS).is_file():
        names = read_object(folder / PARTS, DataError)["splits"]
        return {name: _files_of(folder / name) for name in names}
    if (folder / STATE).is_file() and "_data_files" in read_object(folder / STATE, DataError):
        return {"": _files_of(folder)}
    if (folder / INFO).is_file() and any(folder.glob("*.arrow")):
        raise DataError(
            f"{folder} is in the cache of `datasets`, without {STATE}. Save the data and pass that "
            "folder: dataset.save_to_disk(DIR)."
        )
    return None


def _files_of(folder: Path) -> list[Path]:
    entries = read_object(folder / STATE, DataError)["_data_files"]
    return [folder / entry["filename"] for entry in entries]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Iterable[Any]]]:
    """Returns the schema and the batches of a table; Arrow files and streams alike."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"reading {path.name} needs pyarrow, which is not installed ({error}). Install it: pip "
            "install pyarrow"
        ) from error
    try:
        if path.name.lower().endswith(".parquet"):
            with pyarrow.parquet.ParquetFile(path) as table:
                yield table.schema_arrow, table.iter_batches(batch_size=ROWS)
            return
        with pyarrow.memory_map(str(path)) as file:
            begin = file.read(6)
            file.seek(0)
            if begin == b"ARROW1":
                reader = pyarrow.ipc.open_file(file)
                yield reader.schema, map(reader.get_batch, range(reader.num_record_batches))
            else:
                reader = pyarrow.ipc.open_stream(file)
                yield reader.schema, reader
    except (pyarrow.ArrowException, OSError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise DataError(
            f"{path}: pyarrow cannot read a table from its {size} bytes ({error}). A repository "
            "cloned without git-lfs has only pointers."
        ) from error
