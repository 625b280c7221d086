"""Classifies texts with an encoder in a Hugging Face folder that has a classification head.

`generate.py` is the command. It prints a line per text: the class, a tab, and the probability of
the class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from train.cli.settings import PAIRS, SettingsError
from train.huggingface.config import TASK
from train.huggingface.loading import Pretrained
from train.huggingface.tokenizer import Tokenizer
from train.tasks.examples import Sentences

# The texts in a batch, and the multiple that lengths are padded to, because each length compiles a
# program.
BATCH, PART = 32, 64


def check_classifier(origin: Pretrained) -> None:
    """Rejects a folder whose model cannot classify a single text."""
    if origin.labels is None:
        raise SettingsError(
            f"`model`: {origin.folder} ({origin.raw['model_type']}) has no classification head. "
            "Pass a decoder, or a trained encoder: runs/NAME/model."
        )
    task = origin.raw.get(TASK)
    if task == PAIRS:
        raise SettingsError(
            f"`model`: {origin.folder} was trained on pairs of texts ({task}). Pass a model that "
            "classifies single texts."
        )


def classify_texts(
    origin: Pretrained,
    graphdef: nnx.GraphDef,
    params: Any,
    tokenizer: Tokenizer,
    texts: Sequence[str],
) -> Iterator[tuple[str, float]]:
    """Yields each text's class and its probability; texts that are too long are cut."""
    source = Sentences(texts, [0] * len(texts), tokenizer, origin.config.positions)
    shares_of = jax.jit(lambda params, *of: jax.nn.softmax(nnx.merge(graphdef, params)(*of)))
    for first in range(0, len(texts), BATCH):
        rows = range(first, min(first + BATCH, len(texts)))
        longest = math.ceil(int(source.lengths[list(rows)].max()) / PART) * PART
        examples = [source[i] for i in rows]
        inputs = [np.stack([e[n][:longest] for e in examples]) for n in ("tokens", "types", "mask")]
        for shares in np.asarray(shares_of(params, *inputs)):
            best = int(shares.argmax())
            yield origin.class_names[best], float(shares[best])
