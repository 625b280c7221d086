"""Models of the Hub by their name: a cache in the Hub's layout, and no network."""

import shutil

import pytest
from huggingface_hub import constants

from tests.hf_models import write_model
from train.hf_config import ModelError
from train.hub import model_folder
from train.planning import folder_of_config
from train.pretrained import read_folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of a snapshot in a cache that has the model `org/name` alone."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    repository = tmp_path / "hub" / "models--org--name"
    commit = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return write_model(repository / "snapshots" / commit, "llama2")


def test_a_name_is_a_folder_in_the_hubs_cache_unless_there_is_one_of_that_name(cache, tmp_path):
    assert read_folder("org/name").folder == cache
    assert folder_of_config("org/name").config == read_folder(cache).config
    shutil.copytree(cache, tmp_path / "org" / "name")
    assert read_folder("org/name").folder.absolute() == tmp_path / "org" / "name"


@pytest.mark.usefixtures("cache")
def test_a_model_that_the_cache_lacks_is_one_line_and_a_wrong_path_is_not_asked_for(tmp_path):
    with pytest.raises(ModelError, match=r"org/other is no folder.*LocalEntryNotFound.*download"):
        read_folder("org/other")
    (tmp_path / "runs").mkdir()
    for path in ("runs/modl", "modl", "a/b/c"):
        assert str(model_folder(path)) == path
        with pytest.raises(ModelError, match="where there is none"):
            read_folder(path)
