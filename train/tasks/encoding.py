"""Texts to tokens, kept flat: one array of all tokens, and where each text begins in it.

A tokenizer's results take hundreds of bytes per token: of each chunk of texts only ids are kept.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from train.tokenizer import Tokenizer

# A chunk ends with the text that reaches one of these. It is encoded on all cores, a text on each,
# so it should be of several texts; a million characters take about 150 MB in here.
CHUNK_TEXTS = 4096
CHUNK_CHARACTERS = 2**20

Text = str | tuple[str, str]

_flat = itertools.chain.from_iterable


class Encoded(NamedTuple):
    """The tokens of n texts."""

    tokens: np.ndarray  # (total,), unsigned
    marks: np.ndarray  # (total,) uint8: 1 for the second sentence of a pair, or for answers
    starts: np.ndarray  # (n + 1,) int64; text i has tokens[starts[i] : starts[i + 1]]
    whole: np.ndarray  # (n,) int64: how many tokens each had before it was cut


def encode(
    tokenizer: Tokenizer, texts: Iterable[Text], *, special: bool, longest: int | None = None
) -> Encoded:
    """The texts, all one text or all a pair, as tokens; second texts of pairs are marked.

    The tokenizer puts its `special` tokens around them, and cuts what is longer than `longest`.
    """
    tokens, cutting = tokenizer.tokens, None
    if longest is not None:
        cutting = copy.deepcopy(tokens)
        cutting.enable_truncation(longest, strategy="longest_first")
    dtype = smallest_dtype(tokenizer.vocabulary)
    ids, types = [np.empty(0, dtype)], [np.empty(0, np.uint8)]
    lengths, whole = [np.zeros(1, np.int64)], [np.empty(0, np.int64)]
    for chunk in chunks(texts, lambda text: sum(map(len, text if type(text) is tuple else [text]))):
        encodings = tokens.encode_batch_fast(chunk, add_special_tokens=special)
        whole.append(np.array([len(e) for e in encodings], np.int64))
        if cutting is not None:
            long = np.flatnonzero(whole[-1] > longest)
            cut = cutting.encode_batch_fast([chunk[i] for i in long], add_special_tokens=special)
            for i, encoding in zip(long, cut, strict=True):
                encodings[i] = encoding
        lengths.append(np.array([len(e) for e in encodings], np.int64))
        total = int(lengths[-1].sum())
        ids.append(np.fromiter(_flat(e.ids for e in encodings), dtype, total))
        types.append(np.fromiter(_flat(e.type_ids for e in encodings), np.uint8, total))
    starts = np.cumsum(np.concatenate(lengths))
    return Encoded(np.concatenate(ids), np.concatenate(types), starts, np.concatenate(whole))


def smallest_dtype(vocabulary: int) -> np.dtype:
    """The smallest unsigned dtype that holds every id below `vocabulary`."""
    return np.min_scalar_type(max(vocabulary - 1, 0))


def enclose(
    tokens: np.ndarray, starts: np.ndarray, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Texts with a begin (if any) and an end token around each: all tokens, and their starts."""
    around = [tokenizer.end] if tokenizer.begin is None else [tokenizer.begin, tokenizer.end]
    # Of several tokens for one place `insert` keeps the order: an end, then the next begin.
    places = np.stack([starts[:-1], starts[1:]][-len(around) :], axis=1).reshape(-1)
    enclosed = np.insert(tokens, places, np.tile(np.array(around), len(starts) - 1))
    return enclosed, starts + len(around) * np.arange(len(starts))


def chunks(items: Iterable[Any], size: Callable[[Any], int]) -> Iterator[list[Any]]:
    """The items in lists for the tokenizer; `size` says how many characters one has."""
    chunk, characters = [], 0
    for item in items:
        chunk.append(item)
        characters += size(item)
        if len(chunk) >= CHUNK_TEXTS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk
