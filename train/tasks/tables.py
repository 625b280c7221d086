"""Reads Parquet tables, as written by Hugging Face's `datasets`.

Needs `pyarrow`, in the extra `data`. A row is a dict with an entry per column, like a JSON object.
Nested objects lose their nulls, because all objects in a column have the same fields.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.huggingface.json_files import documents, foreign
from train.tasks.batches import DataError

SUFFIX = ".parquet"

# Number of rows that are converted at once; some have long texts.
ROWS = 256


def is_table(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIX)


def rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of a table, each with its location: path and number, from 1."""
    with _opened(path) as table:
        batches = table.iter_batches(batch_size=ROWS)
        every = (cells for batch in batches for cells in zip(*batch.columns, strict=True))
        for number, cells in enumerate(every, 1):
            row, where = {}, f"{path}, row {number}"
            for name, cell in zip(table.schema_arrow.names, cells, strict=True):
                try:
                    row[name] = _without_nulls(cell.as_py())
                except ValueError as error:  # such as text that is not UTF-8
                    raise DataError(f"{where}, column {name!r}: {error}.") from error
            yield where, row


def _without_nulls(value: Any) -> Any:
    """Removes the null fields that an object has only because other objects have them."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def class_names(path: Path, column: str) -> list[str] | None:
    """Returns the class names that a column's schema lists; None without names or a table."""
    if not is_table(path):
        return None
    with _opened(path) as table:
        metadata = table.schema_arrow.metadata or {}
    try:
        [(_, about)] = documents(metadata[b"huggingface"].decode())
        names = about["info"]["features"][column]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            yield table
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: pyarrow cannot read it ({error}). {foreign(path)}") from error
