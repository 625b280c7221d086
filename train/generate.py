"""Writes a model's continuation of a prompt, or the class of a text.

    python -m train.generate --model runs/NAME/model "The cat"
    python -m train.generate --model runs/NAME/model "The cat" --temperature 0.8 --top-p 0.95
    python -m train.generate --model DIR "The cat" --format text --max-tokens 20

The text is written to stdout as it is generated, everything else to stderr. `model/sampling.py`
chooses the tokens.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers.decoders import DecodeStream

from train import Failure, command_of
from train.cli.arguments import option, read_arguments
from train.cli.settings import PAIRS, SettingsError
from train.huggingface import loading
from train.huggingface.chat_template import ConversationError, read_template
from train.huggingface.config import CONFIG, TASK, ModelError
from train.huggingface.end_tokens import answer_end_tokens
from train.huggingface.hub import model_folder
from train.huggingface.json_files import read_object
from train.huggingface.loading import Pretrained, read_folder
from train.huggingface.saving import dtype_of
from train.huggingface.tokenizer import Tokenizer, all_end_tokens, read_tokenizer
from train.model.sampling import Sampling, continue_tokens
from train.run import models
from train.tasks import answers
from train.tasks.examples import Sentences

PROGRAM = command_of("generate")

# Number of texts in a batch, and the multiple that lengths are padded to, because each length is
# compiled.
BATCH, PART = 32, 64


@dataclass(frozen=True, kw_only=True)
class Options:
    """Continues a prompt with a decoder in a Hugging Face folder, or classifies texts with BERT."""

    prompt: str = option(
        help="Text to continue or classify, or an instruction; -: a text per line of stdin (BERT).",
        positional=True,
    )
    model: str = option(help="Model folder, such as runs/NAME/model, or org/name on the Hub.")
    format: Literal["auto", "text", "alpaca", "chat"] = option(
        "auto", "Use of the prompt: text, an instruction or a user's message; auto: as in training."
    )
    system: str | None = option(None, "chat: system message before the prompt.")
    max_tokens: int = option(256, "Maximum number of tokens to write.", least=1)
    temperature: float | None = option(
        None, "Divides the logits; 0: greedy. Default: 0, or 1 with --top-k or --top-p.", least=0
    )
    top_k: int | None = option(None, "Number of the most likely tokens to sample from.", least=1)
    top_p: float | None = option(None, "Total probability of the tokens to sample from.", above=0)
    seed: int = option(0, "Seed for sampling.", least=0)
    dtype: Literal["bfloat16", "float32"] | None = option(
        None, "Dtype of weights and products. Default: the folder's."
    )

    def __post_init__(self):
        if self.top_p is not None and self.top_p > 1:
            raise SettingsError(f"`top_p`: must be a share of at most 1, but is {self.top_p}.")

    @property
    def sampling(self) -> Sampling:
        temperature = self.temperature
        if temperature is None:
            temperature = 0.0 if self.top_k is None and self.top_p is None else 1.0
        return Sampling(temperature, self.top_k, self.top_p)


class Prompt(NamedTuple):
    tokens: list[int]
    ends: frozenset[int]  # tokens that end the continuation
    description: str  # how the prompt was made


def generate(options: Options, write: Callable[[str], None], say: Callable[[str], None]) -> None:
    """Writes the prompt's continuation in pieces; `say` shows messages about it."""
    folder = model_folder(options.model)
    options = dataclasses.replace(options, model=str(folder))
    origin = read_folder(folder)
    tokenizer = read_tokenizer(folder, vocabulary=origin.config.vocabulary)
    if origin.architecture == "encoder":
        _check_classifier(origin)
        lines = sys.stdin if options.prompt == "-" else [options.prompt]
        texts = [line.rstrip("\n") for line in lines]  # str.splitlines also ends a line at U+2028
        for name, share in _classify(origin, *_load(origin, options.dtype), tokenizer, texts):
            write(f"{name}\t{share:.4f}\n")
        return
    prompt = read_prompt(options, tokenizer)
    room = origin.config.positions - len(prompt.tokens)
    if room < 1 or not prompt.tokens:
        raise SettingsError(
            f"`prompt`: must have 1 to {origin.config.positions - 1} tokens, to fit the model in "
            f"{folder}, but has {len(prompt.tokens)}."
        )
    say(f"{len(prompt.tokens)} prompt tokens, {prompt.description}")
    graphdef, params = _load(origin, options.dtype)
    most = min(options.max_tokens, room)
    begin = time.perf_counter()
    numbers: list[int] = []
    stream, written = DecodeStream(skip_special_tokens=True), ""
    choice = {"ends": prompt.ends, "sampling": options.sampling, "seed": options.seed}
    for number in continue_tokens(graphdef, params, prompt.tokens, most=most, **choice):
        numbers.append(number)
        if text := stream.step(tokenizer.tokens, number):  # only whole characters
            write(text)
            written += text
    # Shows a final incomplete character.
    write(tokenizer.tokens.decode(numbers, skip_special_tokens=True)[len(written) :] + "\n")
    if numbers[-1] in prompt.ends:
        reason = f"ended by {tokenizer.tokens.id_to_token(numbers[-1])}"
    elif most < options.max_tokens:
        reason = f"cut off where the model's {origin.config.positions} positions end"
    else:
        reason = f"cut off by --max-tokens {options.max_tokens}"
    say(f"{len(numbers)} tokens in {time.perf_counter() - begin:.1f} s: {reason}")


def read_prompt(options: Options, tokenizer: Tokenizer) -> Prompt:
    """Returns the prompt as tokens, in the format of the options or else of the folder's run."""
    folder = Path(options.model)
    form, reason = options.format, ""
    if form == "auto":
        task = read_object(folder / CONFIG, ModelError).get(TASK)
        form, reason = "text", "" if task else "; --format chat puts it into the chat template"
        if task in ("alpaca", "chat"):
            form, reason = task, f", as in training ({task})"
    if form == "chat":
        return _chat_prompt(options, tokenizer, reason)
    if options.system is not None:
        raise SettingsError(
            f"`system`: --format {form} has no system message. Leave out {options.system!r}, or "
            "pass --format chat for a model with a chat template."
        )
    text, form_of_prompt = options.prompt, "as it is"
    if form == "alpaca":
        text, form_of_prompt = answers.prompt(options.prompt), "in Alpaca's template"
    tokens = tokenizer.tokens.encode(text, add_special_tokens=False).ids
    begin = [] if tokenizer.begin is None else [tokenizer.begin]
    return Prompt(begin + tokens, all_end_tokens(folder, tokenizer), form_of_prompt + reason)


def _chat_prompt(options: Options, tokenizer: Tokenizer, reason: str) -> Prompt:
    folder = Path(options.model)
    template = read_template(folder, tokenizer.tokens)
    messages = [{"role": "user", "content": options.prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    try:
        text = template.render(messages, ask=True)
        # The special tokens that end an answer may differ from those that end a text.
        ends = answer_end_tokens(template, tokenizer, messages)
    except ConversationError as error:
        raise SettingsError(f"`format`: {error}, or pass --format text.") from error
    return Prompt(
        tokenizer.tokens.encode(text, add_special_tokens=False).ids,
        all_end_tokens(folder, tokenizer) | ends,
        f"in the chat template of {folder}{reason}",
    )


def _check_classifier(origin: Pretrained) -> None:
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


def _classify(
    origin: Pretrained,
    graphdef: nnx.GraphDef,
    params: Any,
    tokenizer: Tokenizer,
    texts: Sequence[str],
) -> Iterator[tuple[str, float]]:
    """Yields each text's class and its probability; texts that are too long are cut."""
    source = Sentences(texts, [0] * len(texts), tokenizer, origin.config.positions)
    classify = jax.jit(lambda params, *args: jax.nn.softmax(nnx.merge(graphdef, params)(*args)))
    for first in range(0, len(texts), BATCH):
        rows = range(first, min(first + BATCH, len(texts)))
        longest = math.ceil(int(source.lengths[list(rows)].max()) / PART) * PART
        examples = [source[i] for i in rows]
        inputs = [np.stack([e[n][:longest] for e in examples]) for n in ("tokens", "types", "mask")]
        for shares in np.asarray(classify(params, *inputs)):
            best = int(shares.argmax())
            yield origin.class_names[best], float(shares[best])


def _load(origin: Pretrained, dtype: str | None) -> tuple[nnx.GraphDef, dict]:
    if dtype is None:
        # These dtypes cannot overflow where float16 does.
        dtype = "bfloat16" if dtype_of(origin) == jnp.bfloat16 else "float32"
    options = {"weight_dtype": np.dtype(dtype), "compute_dtype": np.dtype(dtype)}
    options |= {"scan_layers": True, "labels": origin.labels or 0}

    def build():
        return loading.make_model(origin.config, rngs=nnx.Rngs(0), **options)

    graphdef, shapes = jax.eval_shape(lambda: models.split(build()))
    return graphdef, loading.load_weights(origin, shapes)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 after an error with a message."""

    def say(line: str) -> None:
        sys.stderr.write(f"[{line}]\n")

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        kinds, about = [Options], Options.__doc__
        (options,) = read_arguments(kinds, argv, program=PROGRAM, description=about)
        generate(options, write, say)
    except Failure as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        write("\n")
        return 130
    except BrokenPipeError:  # the reader has ended, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's flush at exit
        return 128 + signal.SIGPIPE
    return 0


if __name__ == "__main__":
    sys.exit(main())
