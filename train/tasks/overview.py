"""Lines about the examples before the first step: their lengths, and one of them as text.

That examples are cut, or that something else is learned than was meant, is to be seen here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from train.data import Padded, Source
from train.tokenizer import Tokenizer

#: Of the example so many parts are shown, learned or not, and of each so many characters.
PARTS, CHARACTERS = 8, 240


def describe_lengths(lengths: np.ndarray, kept: np.ndarray, longest: int) -> str:
    """Describes the lengths of examples, and how many did not fit.

    Args:
        lengths: Of all examples in the files, in tokens, before they were cut.
        kept: The indices of those that were not dropped.
        longest: Tokens that an example may have.
    """
    median, most = np.percentile(lengths, [50, 95])
    cut = np.count_nonzero(lengths[kept] > longest)
    return (
        f"{len(lengths)} examples: median {median:.0f} tokens, 95th percentile {most:.0f}, longest "
        f"{lengths.max()}; {cut} were cut to {longest}, {len(lengths) - len(kept)} dropped"
    )


def describe_example(
    source: Source, tokenizer: Tokenizer, *, labels: Sequence[str] = ()
) -> tuple[str, ...]:
    """One example as text, with marks around what is learned of it; () if there is none.

    Args:
        source: Of the examples that train.
        tokenizer: Made its tokens.
        labels: The names of the classes, if these are what is learned.
    """
    if not len(source):
        return ()
    example = source[0]
    tokens = example["tokens"]
    if labels:
        tokens = tokens[example["mask"] == 1]
        label = labels[int(example["label"])]
        text = f"{_text(tokens, np.zeros(len(tokens)), tokenizer)} ⟦{label}⟧"
    else:
        # The target of input j is token j + 1. Behind the last target is padding.
        weights = example.get("weights", np.ones(len(tokens) - 1))
        stop = source.lengths[0] + 1 if isinstance(source, Padded) else len(tokens)
        text = _text(tokens[:stop], np.append(0, weights)[:stop], tokenizer)
    return (f"an example, what is learned in ⟦⟧: {text!r}",)


def _text(tokens: np.ndarray, learned: np.ndarray, tokenizer: Tokenizer) -> str:
    """The text of the tokens, with marks around those that are learned."""
    borders = [0, *np.flatnonzero(np.diff(learned)) + 1, len(tokens)]
    shown = borders[: PARTS + 1]
    # From the beginning each time: alone, the first token of a part may lose its space.
    texts = [tokenizer.tokens.decode(tokens[:i].tolist(), skip_special_tokens=False) for i in shown]
    parts = []
    for start, (before, text) in zip(shown[:-1], itertools.pairwise(texts), strict=True):
        part = text[len(before) :]
        if len(part) > CHARACTERS:
            part = f"{part[: CHARACTERS // 2]} ... {part[-CHARACTERS // 2 :]}"
        parts.append(f"⟦{part}⟧" if learned[start] else part)
    return "".join(parts) + (" ..." if len(borders) > len(shown) else "")
