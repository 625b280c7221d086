"""Tokenizers for many tests, and small disks."""

import contextlib
import shutil
import subprocess

import pytest

from tests.tiny_tokenizer import write_byte_level, write_wordpiece
from train.huggingface.tokenizer import read_tokenizer


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    return read_tokenizer(folder, vocabulary=write_wordpiece(folder))


@pytest.fixture(scope="session")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    return read_tokenizer(folder, vocabulary=write_byte_level(folder))


@pytest.fixture
def small_disk(tmp_path):
    """Yields a function that mounts a disk with a size, such as "2m", and returns its folder."""
    folder = tmp_path / "disk"
    with contextlib.ExitStack() as mounted:

        def mount(size):
            folder.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
            missing = shutil.which("mount") is None
            if missing or subprocess.run(command, capture_output=True).returncode:
                pytest.skip("this user may not mount a file system")
            mounted.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=True)
            return folder

        yield mount
