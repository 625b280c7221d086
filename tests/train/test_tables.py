"""Parquet and Arrow, as `datasets` writes them: the same examples as JSONL, and rejected files."""

import json
import sys

import pyarrow
import pyarrow.parquet
import pytest

from train.tasks import language, tables
from train.tasks.batches import DataError
from train.tasks.files import find_files, records

TEXTS = [f"the cat is in bin {i}" for i in range(9)]


def write_stream(path, table):
    """Writes as `save_to_disk` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as to:
        to.write_table(table, max_chunksize=2)
    return path


def write_file(path, table):
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as to:
        to.write_table(table, max_chunksize=2)


def save(folder, *tables):
    """A folder with one part, as `Dataset.save_to_disk` writes it."""
    files = [f"data-{i:05}-of-{len(tables):05}.arrow" for i in range(len(tables))]
    for file, table in zip(files, tables, strict=True):
        write_stream(folder / file, table)
    state = {"_data_files": [{"filename": file} for file in files], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    # `map` leaves such files behind.
    write_stream(folder / "cache-1a2b.arrow", pyarrow.table({"text": ["not of the data"]}))


WRITERS = {
    "a.parquet": lambda path, table: pyarrow.parquet.write_table(table, path),
    "a.arrow": write_stream,
    "b.arrow": write_file,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_row_equals_a_line_of_json(tmp_path, monkeypatch, name):
    monkeypatch.setattr(tables, "ROWS", 4)
    rows = [{"text": text, "n": i, "none": None} for i, text in enumerate(TEXTS)]
    # In a table, all of them have `a` and `b`.
    rows = [row | {"more": [{"in": {"ab"[row["n"] % 2]: 1}}]} for row in rows]
    path = tmp_path / name
    WRITERS[name](path, pyarrow.Table.from_pylist(rows))
    places, read = zip(*records(path), strict=True)
    assert list(read) == rows
    assert list(places) == [f"{path}, row {i}" for i in range(1, 10)]


def test_folders_from_datasets_have_their_parts_and_nothing_else(tmp_path, decoder):
    table = pyarrow.table({"text": TEXTS})
    save(tmp_path / "one", table.slice(0, 5), table.slice(5))
    files = find_files(tmp_path / "one", language.SUFFIXES)
    assert [path.name for path in files.train] == [f"data-0000{i}-of-00002.arrow" for i in (0, 1)]
    assert (files.validation, files.notes) == ([], [])

    several = tmp_path / "several"
    for part in ("train", "validation", "test"):
        save(several / part, table)
    (several / "dataset_dict.json").write_text('{"splits": ["train", "validation", "test"]}')
    files = find_files(several, language.SUFFIXES)
    assert files.train == [several / "train" / "data-00000-of-00001.arrow"]
    assert files.validation == [several / "validation" / "data-00000-of-00001.arrow"]
    assert files.notes == [f"{several}: left out the test data test"]
    task = language.make(several, decoder, sequence_length=9, validation_share=0.5, seed=0)
    assert len(task.train) == len(task.validation["validation"])

    def expect(match):
        with pytest.raises(DataError, match=match):
            find_files(several, language.SUFFIXES)

    (several / "dataset_dict.json").write_text('{"splits": ["test"]}')
    expect(r"has no training data \(train\*\), but test")
    (several / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (several / "train" / "state.json").unlink()
    expect("the file .*state.json cannot be read")
    (tmp_path / "one" / "state.json").unlink()
    with pytest.raises(
        DataError, match=r"the cache of .* without state\.json.*save_to_disk\(DIR\)"
    ):
        find_files(tmp_path / "one", language.SUFFIXES)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_files_that_are_not_tables_are_rejected(tmp_path, decoder, name):
    path = tmp_path / name
    for content in (b"version https://git-lfs.github.com/spec/v1\n", b"", b"PAR1"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: .* its {len(content)} bytes"):
            language.make(path, decoder, sequence_length=9, validation_share=0.5, seed=0)
    with pytest.raises(DataError, match=f"{name}: pyarrow cannot read a table"):
        tables.class_names(path, "label")


def test_without_pyarrow_the_error_names_its_installation(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"reading a\.parquet needs pyarrow.* pip install pyarrow"):
        next(records(tmp_path / "a.parquet"))
