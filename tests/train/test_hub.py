"""Models from the Hub by name: from a local cache, and from a local Hub."""

import functools
import http.server
import json
import shutil
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.hf_models import write_model
from tests.processes import assert_ends, start
from tests.train.scripts import write
from train.huggingface.config import ModelError
from train.huggingface.hub import model_folder
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


@pytest.mark.usefixtures("cache")
def test_a_model_missing_from_the_cache_gives_one_line_and_a_wrong_path_is_not_requested(tmp_path):
    with pytest.raises(
        ModelError, match=r"org/other is neither a folder.*LocalEntryNotFound.*downl"
    ):
        read_folder("org/other")
    (tmp_path / "runs").mkdir()
    for path in ("runs/modl", "modl", "a/b/c"):
        assert str(model_folder(path)) == path
        with pytest.raises(ModelError, match="does not exist"):
            read_folder(path)


COMMIT = "1" * 40


class Hub(http.server.SimpleHTTPRequestHandler):
    """Serves the Hub's addresses, as files in a folder."""

    def end_headers(self):
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"of {self.path}"')
        super().end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_a_model_is_downloaded_once_and_without_pickles(tmp_path, monkeypatch):
    files = tmp_path / "org" / "name" / "resolve" / COMMIT
    write_model(files, "llama2")
    others = {"pytorch_model.bin", "consolidated.safetensors"}
    for name in (*others, "chat_template.jinja", "merges.txt"):
        write(files / name, name)
    of_api = tmp_path / "api" / "models" / "org" / "name"
    names = {path.name for path in files.iterdir()}
    listed = [
        {"type": "file", "path": n, "size": (files / n).stat().st_size, "oid": n} for n in names
    ]
    of_main = {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
    write(of_api / "revision" / "main", json.dumps(of_main))
    write(of_api / "tree" / COMMIT, json.dumps(listed))

    handler = functools.partial(Hub, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        code = """if True:
            import sys
            from train.plan.planning import folder_of_config
            from train.huggingface.loading import read_folder
            for _ in range(2):
                print(len([*folder_of_config("org/name").folder.iterdir()]))
                print(read_folder("org/name").folder, flush=True)
                sys.stdin.readline()  # until the test reads the rest
        """
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            process = start("-c", code)
            count, folder = (process.stdout.readline().strip() for _ in range(2))
        finally:
            server.shutdown()
            thread.join()
    names -= others
    assert count == "1"  # a plan fetches only config.json
    assert {path.name for path in Path(folder).iterdir()} == names
    for name in names:
        assert (Path(folder) / name).read_bytes() == (files / name).read_bytes()
    # From an unreachable Hub.
    assert assert_ends(process).splitlines() == [str(len(names)), folder]
