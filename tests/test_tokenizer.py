"""Reading the tokenizer of a Hugging Face folder, and refusing what does not fit."""

import json

import pytest

from tests.tiny_tokenizer import BEGIN, END, write_byte_level, write_wordpiece
from train.tokenizer import TokenizerError, end_token, read_tokenizer


def edit(path, **entries):
    held = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(held | entries))


def test_an_encoder_has_padding_and_no_begin_or_end(tmp_path):
    vocabulary = write_wordpiece(tmp_path)
    tokenizer = read_tokenizer(tmp_path, vocabulary=vocabulary)
    assert tokenizer[1:] == (None, None, 0, vocabulary)
    with pytest.raises(TokenizerError, match="needs_end=True"):
        end_token(tokenizer)


def test_a_decoder_pads_with_its_end_token(tmp_path):
    vocabulary = write_byte_level(tmp_path)
    tokenizer = read_tokenizer(tmp_path, vocabulary=vocabulary, needs_end=True)
    begin, end = (tokenizer.tokens.token_to_id(name) for name in (BEGIN, END))
    assert tokenizer[1:] == (begin, end, end, vocabulary)
    assert end_token(tokenizer) == end


def test_lengths_in_the_file_are_switched_off(tmp_path):
    # The file cuts at 3 tokens and pads to 7.
    tokenizer = read_tokenizer(tmp_path, vocabulary=write_wordpiece(tmp_path))
    assert len(tokenizer.tokens.encode("the movie is so good").ids) == 7
    assert len(tokenizer.tokens.encode("good").ids) == 3


def test_the_model_may_have_room_for_more_ids(tmp_path):
    vocabulary = write_byte_level(tmp_path)
    assert read_tokenizer(tmp_path, vocabulary=vocabulary + 100).vocabulary == vocabulary


def test_no_begin_token_in_the_tokenizer_outweighs_a_number_in_the_config(tmp_path):
    vocabulary = write_byte_level(tmp_path, begin=False)
    edit(tmp_path / "config.json", bos_token_id=3)
    assert read_tokenizer(tmp_path, vocabulary=vocabulary).begin is None
    # Newer folders leave the entry out instead of writing null.
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    assert read_tokenizer(tmp_path, vocabulary=vocabulary).begin is None


def test_a_begin_token_that_is_not_to_be_added_is_none(tmp_path):
    vocabulary = write_byte_level(tmp_path)
    edit(tmp_path / "tokenizer_config.json", add_bos_token=False)
    assert read_tokenizer(tmp_path, vocabulary=vocabulary).begin is None


def test_numbers_of_the_config_count_where_the_tokenizer_names_nothing(tmp_path):
    vocabulary = write_byte_level(tmp_path)
    edit(tmp_path / "tokenizer_config.json", eos_token=None)
    edit(tmp_path / "config.json", bos_token_id=4, pad_token_id=-1)  # some write -1 for none
    edit(tmp_path / "generation_config.json", eos_token_id=[5, 6], pad_token_id=7)
    tokenizer = read_tokenizer(tmp_path, vocabulary=vocabulary)
    assert tokenizer[1:4] == (tokenizer.tokens.token_to_id(BEGIN), 5, 7)
    (tmp_path / "tokenizer_config.json").unlink()
    assert read_tokenizer(tmp_path, vocabulary=vocabulary)[1:4] == (4, 5, 7)


def test_an_id_for_padding_that_only_the_model_has_is_counted(tmp_path):
    vocabulary = write_byte_level(tmp_path)
    edit(tmp_path / "config.json", pad_token_id=vocabulary + 4)
    tokenizer = read_tokenizer(tmp_path, vocabulary=vocabulary + 5)
    assert (tokenizer.pad, tokenizer.vocabulary) == (vocabulary + 4, vocabulary + 5)


def _without_file(folder):
    (folder / "tokenizer.json").rename(folder / "vocab.txt")


def _cut_off(folder):
    (folder / "tokenizer.json").write_text('{"version": "1.0", "mod')


def _foreign_end(folder):
    edit(folder / "tokenizer_config.json", eos_token="</s>")


def _no_end(folder):
    edit(folder / "tokenizer_config.json", eos_token=None, pad_token=BEGIN)


def _no_padding(folder):
    edit(folder / "tokenizer_config.json", eos_token=None)


def _config_is_a_list(folder):
    (folder / "config.json").write_text("[]")


def _config_cut_off(folder):
    (folder / "config.json").write_text('{"bos')


def _id_out_of_range(folder):
    (folder / "tokenizer_config.json").unlink()
    edit(folder / "config.json", eos_token_id=10_000)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (_without_file, r"expected .*tokenizer\.json, found only vocab\.txt"),
        (_cut_off, r"expected a tokenizer in .*tokenizer\.json, but `tokenizers`"),
        (_foreign_end, r"tokenizer_config\.json: expected `eos_token` .* got '</s>'"),
        (_no_end, "expected a token that ends a text"),
        (_no_padding, "expected a token that ends a text"),
        (_config_is_a_list, r"expected a JSON object in .*config\.json, got list"),
        (_config_cut_off, r"expected JSON in .*config\.json"),
        (_id_out_of_range, r"config\.json: expected `eos_token_id` to be an id from 0 to"),
    ],
)
def test_a_folder_that_does_not_fit_is_named_with_the_reason(tmp_path, damage, match):
    vocabulary = write_byte_level(tmp_path)
    damage(tmp_path)
    with pytest.raises(TokenizerError, match=match):
        read_tokenizer(tmp_path, vocabulary=vocabulary, needs_end=True)


def test_a_tokenizer_that_can_neither_pad_nor_end_is_refused(tmp_path):
    vocabulary = write_byte_level(tmp_path)
    _no_padding(tmp_path)
    with pytest.raises(TokenizerError, match="expected a token to pad with"):
        read_tokenizer(tmp_path, vocabulary=vocabulary)


def test_more_ids_than_the_model_has_are_refused_with_both_numbers(tmp_path):
    vocabulary = write_byte_level(tmp_path)
    with pytest.raises(TokenizerError, match=rf"ids below {vocabulary - 1}.* is {vocabulary - 1}"):
        read_tokenizer(tmp_path, vocabulary=vocabulary - 1)
