"""Parquet: the same examples as JSONL, and rejected files."""

import sys

import pyarrow
import pyarrow.parquet
import pytest

from train.tasks import language, tables
from train.tasks.batches import DataError
from train.tasks.files import records

TEXTS = [f"the cat is in bin {i}" for i in range(9)]


def test_a_row_equals_a_line_of_json(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROWS", 4)
    rows = [{"text": text, "n": i, "none": None} for i, text in enumerate(TEXTS)]
    # In a table, all of them have `a` and `b`.
    rows = [row | {"more": [{"in": {"ab"[row["n"] % 2]: 1}}]} for row in rows]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    places, read = zip(*records(path), strict=True)
    assert list(read) == rows
    assert list(places) == [f"{path}, row {i}" for i in range(1, 10)]


def test_files_that_are_not_tables_are_rejected(tmp_path, decoder):
    path = tmp_path / "a.parquet"
    for content in (b"version https://git-lfs.github.com/spec/v1\n", b"", b"PAR1"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"a\.parquet: .* its {len(content)} bytes"):
            language.make(path, decoder, sequence_length=9, validation_share=0.5, seed=0)
    with pytest.raises(DataError, match=r"a\.parquet: pyarrow cannot read a table"):
        tables.class_names(path, "label")


def test_without_pyarrow_the_error_names_its_installation(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"reading a\.parquet needs pyarrow.* pip install pyarrow"):
        next(records(tmp_path / "a.parquet"))
