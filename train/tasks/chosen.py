"""Creates the task that the settings name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from train.cli.settings import Settings, SettingsError
from train.huggingface.chat_template import read_template
from train.huggingface.loading import Pretrained
from train.huggingface.tokenizer import read_tokenizer
from train.tasks import Task, answers, classification, glue, language, standard_library
from train.tasks.token_files import store_tokens

OF_DECODERS = ("standard_library", "language", "alpaca", "chat")
KINDS = {"decoder": "a decoder, such as a Llama or Qwen", "encoder": "an encoder, such as a BERT"}


def make_test(
    settings: Settings, origin: Pretrained, task: Task, say: Callable[[str], None]
) -> Task:
    """Returns the task with `test_data` as validation examples, and no training examples."""
    file = Path(settings.test_data)
    if not file.is_file():
        raise SettingsError(f"`test_data`: {file} is not a file. Name a file.")
    # Without steps, all examples may be used for validation.
    whole = dataclasses.replace(settings, data=str(file), validation_share=1.0, steps=0)
    test = make_task(whole, origin, say, known=task.labels)
    if test.labels != task.labels:
        raise SettingsError(
            f"`test_data`: {file} has the labels {', '.join(test.labels)}, but the training data "
            f"{', '.join(task.labels)}. Use the same labels."
        )
    return test


def make_task(
    settings: Settings,
    origin: Pretrained | None,
    say: Callable[[str], None],
    known: Sequence[str] = (),
) -> Task:
    """Reads the settings' data; `origin` is the model's folder, with its tokenizer.

    The classes are the `known` classes, or else those of the model's head, if all labels are among
    them.
    """
    task, path = settings.task, settings.data and Path(settings.data)
    options = settings.subset(("sequence_length", "validation_share", "seed"))
    if task == "standard_library":
        return standard_library.make(corpus_megabytes=settings.corpus_megabytes, **options)
    kind = "decoder" if task in OF_DECODERS else "encoder"
    if origin.architecture != kind:
        raise SettingsError(
            f"`model`: the task {task} needs {KINDS[kind]}, but {origin.folder} is "
            f"{KINDS[origin.architecture]}. Name another --model or --task."
        )
    check_length(settings.sequence_length, origin)
    vocabulary, needs_end = origin.config.vocabulary, task in ("language", "alpaca")
    tokenizer = read_tokenizer(origin.folder, vocabulary=vocabulary, needs_end=needs_end)
    store = partial(
        store_tokens, cache=settings.token_cache and Path(settings.token_cache), say=say
    )
    if task == "language":
        joined = settings.packing == "joined"
        return language.make(
            path, tokenizer, joined=joined, field=settings.text_column, store=store, **options
        )
    if task == "alpaca":
        return answers.make_alpaca(path, tokenizer, store=store, **options)
    if task == "chat":
        file = settings.chat_template and Path(settings.chat_template)
        template = read_template(origin.folder, tokenizer.tokens, file)
        return answers.make_chat(path, tokenizer, template, store=store, **options)
    if task == "classification":
        columns = classification.Columns(
            settings.text_column, settings.label_column, settings.second_text_column
        )
        known = known or class_names(origin)
        return classification.make(path, tokenizer, columns, known=known, **options)
    return glue.make(task, path, tokenizer, sequence_length=settings.sequence_length)


def with_best(task: Task, best: str | None) -> Task:
    """Returns the task with `best`, if given, as the metric that decides which weights are best."""
    if best is None:
        return task
    if best not in task.metrics:
        raise SettingsError(
            f"`best`: the task {task.name} has no metric {best}. Use one of: "
            f"{', '.join(task.metrics)}."
        )
    return task._replace(best=best)


def labels_and_best(task: str) -> tuple[tuple[str, ...], str]:
    """Returns a task's class names, if they need no data, and the metric that decides."""
    if task in OF_DECODERS:
        return (), "loss"
    if task == "classification":
        return (), classification.BEST
    return tuple(glue.FORMATS[task].labels.values()), glue.FORMATS[task].best


def class_names(origin: Pretrained) -> tuple[str, ...]:
    """Returns the class names of the folder's head; () if it has none or does not name them."""
    names = origin.class_names
    return () if any(name == f"LABEL_{i}" for i, name in enumerate(names)) else names


def check_length(sequence_length: int, origin: Pretrained) -> None:
    """Rejects sequences that exceed the model's positions."""
    longest = origin.config.positions
    if sequence_length > longest:
        raise SettingsError(
            f"`sequence_length`: {sequence_length} exceeds the {longest} positions of the model in "
            f"{origin.folder}. Pass --sequence-length {longest}."
        )
