"""Models from the Hub by name: from a local cache, and the downloaded files."""

import shutil

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

from tests.hf_models import write_model
from train.huggingface.loading import read_folder
from train.plan.planning import folder_of_config


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Returns the snapshot folder of a cache that has only the model `org/name`."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    repository = tmp_path / "hub" / "models--org--name"
    commit = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return write_model(repository / "snapshots" / commit, "llama2")


def test_a_name_is_a_folder_in_the_hubs_cache_unless_a_local_folder_has_that_name(cache, tmp_path):
    assert read_folder("org/name").folder == cache
    assert folder_of_config("org/name").config == read_folder(cache).config
    shutil.copytree(cache, tmp_path / "org" / "name")
    assert read_folder("org/name").folder.absolute() == tmp_path / "org" / "name"


def test_a_download_contains_no_pickles_and_a_plan_requests_only_the_config(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "model", "llama2")
    needed = ["config.json", "model.safetensors", "chat_template.jinja", "merges.txt"]
    unneeded = ["pytorch_model.bin", "consolidated.safetensors", "original/params.json"]
    downloads = []

    def download(name, **patterns):
        assert name == "org/name"
        downloads.append(list(filter_repo_objects(needed + unneeded, **patterns)))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert read_folder("org/name").folder == folder_of_config("org/name").folder == folder
    assert downloads == [needed, ["config.json"]]
