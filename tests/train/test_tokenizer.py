"""Reading a Hugging Face folder's tokenizer, and rejecting unsuitable ones."""

import json

import pytest

from tests.make_tokenizer_fixtures import CASES, FILE, TEXT, template, write_case
from tests.tiny_tokenizer import BEGIN, END, write_byte_level, write_wordpiece
from train.huggingface.tokenizer import TokenizerError, read_tokenizer


def edit(path, **entries):
    held = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(held | entries))


def test_an_encoder_pads_and_a_decoder_has_begin_and_end_and_pads_with_the_latter(tmp_path):
    vocabulary = write_wordpiece(tmp_path)
    tokenizer = read_tokenizer(tmp_path, vocabulary=vocabulary)
    assert tokenizer[1:] == (tokenizer.tokens.token_to_id("[CLS]"), None, 0, vocabulary)
    # The file cuts at 3 tokens and pads to 7.
    assert len(tokenizer.tokens.encode("the movie is so good").ids) == 7
    assert len(tokenizer.tokens.encode("good").ids) == 3

    folder = tmp_path / "decoder"
    folder.mkdir()
    vocabulary = write_byte_level(folder)
    tokenizer = read_tokenizer(folder, vocabulary=vocabulary, needs_end=True)
    begin, end = (tokenizer.tokens.token_to_id(name) for name in (BEGIN, END))
    assert tokenizer[1:] == (begin, end, end, vocabulary)


@pytest.mark.parametrize("name", CASES)
def test_the_begin_token_is_the_one_that_transformers_puts_first(tmp_path, name):
    tokenizer = read_tokenizer(tmp_path, vocabulary=write_case(tmp_path, *CASES[name]))
    front = [] if tokenizer.begin is None else [tokenizer.tokens.id_to_token(tokenizer.begin)]
    assert front == json.loads(FILE.read_text())["fronts"][name]
    text = tokenizer.tokens.encode(TEXT, add_special_tokens=False).tokens
    assert tokenizer.tokens.encode(TEXT).tokens[: len(front + text)] == front + text


def test_a_begin_token_is_requested_by_name_and_is_a_single_token(tmp_path):
    vocabulary = write_byte_level(tmp_path, begin=False)
    edit(tmp_path / "config.json", bos_token_id=3)
    for asked, begin in ((None, None), (False, None), (True, BEGIN)):
        edit(tmp_path / "tokenizer_config.json", bos_token=BEGIN, add_bos_token=asked)
        tokenizer = read_tokenizer(tmp_path, vocabulary=vocabulary)
        assert tokenizer.begin == (begin and tokenizer.tokens.token_to_id(begin))
    write_case(tmp_path, template(END, BEGIN, "$A"), {})
    with pytest.raises(TokenizerError, match=r"the 2 tokens <\|end\|>, <\|begin\|> in front"):
        read_tokenizer(tmp_path, vocabulary=vocabulary)


def test_config_ids_apply_where_the_tokenizer_names_nothing(tmp_path):
    vocabulary = write_byte_level(tmp_path)
    edit(tmp_path / "tokenizer_config.json", eos_token=None)
    edit(tmp_path / "config.json", pad_token_id=-1)  # some write -1 for none
    edit(tmp_path / "generation_config.json", eos_token_id=[5, 6], pad_token_id=7)
    assert read_tokenizer(tmp_path, vocabulary=vocabulary)[2:4] == (5, 7)
    (tmp_path / "tokenizer_config.json").unlink()
    assert read_tokenizer(tmp_path, vocabulary=vocabulary)[2:4] == (5, 7)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("tokenizer.json", None, r"tokenizer\.json does not exist"),
        ("tokenizer.json", "{", r"`tokenizers` .* cannot read a tokenizer from .*tokenizer\.json"),
        ("tokenizer_config.json", {"eos_token": "</s>"}, r"`eos_token` is '</s>', which"),
        ("tokenizer_config.json", {"eos_token": None, "pad_token": BEGIN}, "no end token"),
        ("config.json", '{"bos', r"config\.json is not valid JSON"),
        ("config.json", {"pad_token_id": 10_000}, r"`pad_token_id` must be from 0 to"),
    ],
    ids=str,
)
def test_an_unsuitable_folder_is_named_with_the_reason(tmp_path, name, change, match):
    vocabulary = write_byte_level(tmp_path)
    if change is None:
        (tmp_path / name).unlink()
    elif isinstance(change, str):
        (tmp_path / name).write_text(change)
    else:
        edit(tmp_path / name, **change)
    with pytest.raises(TokenizerError, match=match):
        read_tokenizer(tmp_path, vocabulary=vocabulary, needs_end=True)


def test_missing_padding_or_too_few_rows_are_rejected_and_extra_rows_are_not(tmp_path):
    vocabulary = write_byte_level(tmp_path)
    assert read_tokenizer(tmp_path, vocabulary=vocabulary + 100).vocabulary == vocabulary
    with pytest.raises(TokenizerError, match=rf"below {vocabulary - 1}.* is {vocabulary - 1}"):
        read_tokenizer(tmp_path, vocabulary=vocabulary - 1)
    edit(tmp_path / "tokenizer_config.json", eos_token=None)
    with pytest.raises(TokenizerError, match="no padding token"):
        read_tokenizer(tmp_path, vocabulary=vocabulary)
