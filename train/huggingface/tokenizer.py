"""Reads a Hugging Face folder's tokenizer, and its begin, end and padding tokens.

The begin token is the token that the post-processor in tokenizer.json puts before a text. Like
`transformers` 5, this file does not read `add_bos_token`.

The end and padding tokens come from the first of the files below that contains one.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import NamedTuple

import tokenizers

from train import Failure
from train.huggingface.json_files import foreign, read_object

TOKENIZER = "tokenizer.json"
# With `eos_token` and `pad_token`, or with `eos_token_id` and `pad_token_id`.
_NAMED = ("tokenizer_config.json", "special_tokens_map.json")
_NUMBERED = ("config.json", "generation_config.json")


class TokenizerError(Failure):
    """A folder lacks a usable tokenizer."""


read_entries = partial(read_object, error=TokenizerError, optional=True)


class Tokenizer(NamedTuple):
    tokens: tokenizers.Tokenizer  # from tokenizer.json, without truncation and padding
    begin: int | None  # put before a text; None if the tokenizer adds no token
    end: int | None  # put after a text; None if missing, as in most encoders
    pad: int  # pads short examples; `end` if there is no padding token
    vocabulary: int  # all ids are smaller


def read_tokenizer(folder: Path, *, vocabulary: int, needs_end: bool = False) -> Tokenizer:
    """Reads the tokenizer of a folder, for a model with `vocabulary` rows in its embedding."""
    tokens = _read_tokens(folder)
    last = max(tokens.get_vocab(with_added_tokens=True).values(), default=-1)
    if last >= vocabulary:
        limit = f"below {vocabulary}, the model's `vocab_size`, but the last id is {last}"
        raise TokenizerError(f"{folder / TOKENIZER}: ids must be {limit}. Use the model's own.")
    begin = _front(folder, tokens)
    end, pad = (_special(kind, folder, tokens, vocabulary) for kind in ("eos", "pad"))
    pad = end if pad is None else pad
    lacks = "eos_token" if end is None and needs_end else "pad_token" if pad is None else None
    if lacks:
        files = " or ".join(_NAMED + _NUMBERED)
        raise TokenizerError(f"{folder}: no `{lacks}` in {files}. Add it to tokenizer_config.json.")
    # A model may have a padding id that its tokenizer lacks.
    named = [number for number in (begin, end, pad) if number is not None]
    return Tokenizer(tokens, begin, end, pad, vocabulary=max(last, *named) + 1)


def all_end_tokens(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the ids of all tokens that end a text or a turn."""
    ends = {tokenizer.end} - {None}
    for name in _NUMBERED:
        numbers = read_entries(folder / name).get("eos_token_id")
        ends |= {n for n in (numbers if isinstance(numbers, list) else [numbers]) if type(n) is int}
    return frozenset(ends)


def _read_tokens(folder: Path) -> tokenizers.Tokenizer:
    path = folder / TOKENIZER
    if not path.is_file():
        remedy = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        raise TokenizerError(f"{path} does not exist. Create it with transformers: {remedy}")
    try:
        tokens = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no exception class
        problem = f"{tokenizers.__version__} cannot read a tokenizer from {path}: {error}"
        raise TokenizerError(f"`tokenizers` {problem}. {foreign(path)}") from error
    # The task sets lengths; some files contain lengths that are meant for other uses.
    tokens.no_truncation()
    tokens.no_padding()
    return tokens


def _front(folder: Path, tokens: tokenizers.Tokenizer) -> int | None:
    """Returns the token that the post-processor puts before a text, or None."""
    encoded = tokens.encode("a")
    pairs = zip(encoded.ids, encoded.sequence_ids, strict=True)
    front = [number for number, _ in itertools.takewhile(lambda pair: pair[1] is None, pairs)]
    if len(front) > 1:
        listed = ", ".join(map(str, map(tokens.id_to_token, front)))
        problem = f"puts the {len(front)} tokens {listed} in front of a text. Leave at most one"
        raise TokenizerError(f"{folder / TOKENIZER}: `post_processor` {problem}.")
    return front[0] if front else None


def _special(kind: str, folder: Path, tokens: tokenizers.Tokenizer, vocabulary: int) -> int | None:
    """Returns the id of the `eos` or `pad` token, or None if there is none."""
    for name in _NAMED:
        token = read_entries(folder / name).get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token  # with its flags
        if token is not None:
            number = tokens.token_to_id(token) if isinstance(token, str) else None
            if number is None:
                problem = f"`{kind}_token` is {token!r}, which {TOKENIZER} lacks"
                raise TokenizerError(f"{folder / name}: {problem}. Use a token from that file.")
            return number
    for name in _NUMBERED:
        number = read_entries(folder / name).get(f"{kind}_token_id")
        if isinstance(number, list) and number:  # the first end token is the usual one
            number = number[0]
        if number is not None and number != -1:  # some configs write -1 for none
            if type(number) is not int or not 0 <= number < vocabulary:
                limit = f"must be from 0 to {vocabulary - 1}, but is {number!r}"
                raise TokenizerError(f"{folder / name}: `{kind}_token_id` {limit}.")
            return number
    return None
