"""Files as `datasets` names and writes them."""

import datasets
import pytest
from datasets.data_files import get_data_patterns

from train.tasks import files, tables
from train.tasks.batches import DataError

NAMES = (
    "a train training val valid validation dev test testing eval evaluation trains my_eval_file "
    "data_test_v2 train2 2test how-to-train-a-dog chat.dev.v1 contest latest value devices a-val "
    "train-00000-of-00002 a_validation-00000-of-00001-0a1b test3set evaluate x.test a__dev__b"
).split()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_indicates_the_split_that_datasets_gives_it(tmp_path, name):
    (tmp_path / f"{name}.jsonl").touch()
    patterns = get_data_patterns(str(tmp_path))
    expected = None if patterns == {"train": ["**"]} else [str(split) for split in patterns]
    split = files._split_of(f"{name}.jsonl")
    assert (split and [split]) == expected


def test_names_of_two_splits_which_datasets_uses_for_both_are_rejected(tmp_path):
    (tmp_path / "train_test.jsonl").touch()
    assert {*map(str, get_data_patterns(str(tmp_path)))} == {"train", "test"}
    with pytest.raises(DataError, match="Rename it"):
        files.find_files(tmp_path, (".jsonl",))


def test_tables_of_datasets_have_their_rows_and_class_names_and_saved_folders_say_how(tmp_path):
    rows = {"text": ["a", "b"], "label": [1, 0], "more": [[{"x": "c"}], []]}
    features = datasets.Features(
        text=datasets.Value("string"),
        label=datasets.ClassLabel(names=["no", "yes"]),
        more=datasets.List({"x": datasets.Value("string")}),
    )
    data = datasets.Dataset.from_dict(rows, features=features)
    path = tmp_path / "a.parquet"
    data.to_parquet(path)
    assert [record for _, record in files.records(path)] == list(data)
    assert tables.class_names(path, "label") == ["no", "yes"]
    assert tables.class_names(path, "text") is tables.class_names(path, "more") is None
    data.to_json(tmp_path / "a.json", lines=False)
    assert [record for _, record in files.records(tmp_path / "a.json")] == list(data)
    for saved in (data, datasets.DatasetDict(train=data)):
        saved.save_to_disk(tmp_path / "saved")
        with pytest.raises(DataError, match=r"Arrow files.*to_parquet"):
            files.find_files(tmp_path / "saved", (".json",))
