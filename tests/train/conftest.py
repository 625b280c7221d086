"""Tokenizers for many tests."""

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
