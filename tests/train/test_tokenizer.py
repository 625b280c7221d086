"""Reading a Hugging Face folder's tokenizer, and rejecting unsuitable ones."""

import json

import pytest

from tests.tiny_tokenizer import BEGIN, END, write_byte_level, write_wordpiece
from train.huggingface.tokenizer import TokenizerError, read_tokenizer


def edit(path, **entries):
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | entries))


def test_an_encoder_pads_and_a_decoder_has_begin_and_end_tokens_and_pads_with_the_latter(tmp_path):
    vocabulary = write_wordpiece(tmp_path)
    tokenizer = read_tokenizer(tmp_path, vocabulary=vocabulary)
    assert tokenizer[1:] == (tokenizer.tokens.token_to_id("[CLS]"), None, 0, vocabulary)
    # The file cuts at 3 tokens and pads to 7.
    assert len(tokenizer.tokens.encode("the movie is so good").ids) == 7
    assert len(tokenizer.tokens.encode("good").ids) == 3

    vocabulary = write_byte_level(tmp_path / "decoder")
    tokenizer = read_tokenizer(tmp_path / "decoder", vocabulary=vocabulary, needs_end=True)
    begin, end = (tokenizer.tokens.token_to_id(name) for name in (BEGIN, END))
    assert tokenizer[1:] == (begin, end, end, vocabulary)


def test_a_begin_token_comes_only_from_the_post_processor(tmp_path):
    vocabulary = write_byte_level(tmp_path, begin=False)
    edit(tmp_path / "tokenizer_config.json", bos_token=BEGIN, add_bos_token=True)
    assert read_tokenizer(tmp_path, vocabulary=vocabulary).begin is None


def test_config_ids_apply_where_the_tokenizer_names_no_token(tmp_path):
    vocabulary = write_byte_level(tmp_path)
    edit(tmp_path / "tokenizer_config.json", eos_token=None)
    edit(tmp_path / "config.json", pad_token_id=-1)  # some configs write -1 for none
    edit(tmp_path / "generation_config.json", eos_token_id=[5, 6], pad_token_id=7)
    assert read_tokenizer(tmp_path, vocabulary=vocabulary)[2:4] == (5, 7)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("tokenizer_config.json", {"eos_token": "</s>"}, r"`eos_token` is '</s>', which"),
        ("tokenizer_config.json", {"eos_token": None, "pad_token": BEGIN}, "no `eos_token` in tok"),
        ("config.json", {"pad_token_id": 10_000}, r"`pad_token_id` must be from 0 to"),
    ],
    ids=str,
)
def test_an_unsuitable_folder_is_named_with_the_reason(tmp_path, name, change, match):
    vocabulary = write_byte_level(tmp_path)
    edit(tmp_path / name, **change)
    with pytest.raises(TokenizerError, match=match):
        read_tokenizer(tmp_path, vocabulary=vocabulary, needs_end=True)


def test_too_few_rows_are_rejected_and_extra_rows_are_not(tmp_path):
    vocabulary = write_byte_level(tmp_path)
    assert read_tokenizer(tmp_path, vocabulary=vocabulary + 100).vocabulary == vocabulary
    with pytest.raises(TokenizerError, match=rf"below {vocabulary - 1}.* is {vocabulary - 1}"):
        read_tokenizer(tmp_path, vocabulary=vocabulary - 1)
