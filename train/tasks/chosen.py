"""Creates the task that the settings choose."""

from __future__ import annotations

from pathlib import Path

from train.cli.settings import Settings, SettingsError
from train.huggingface.chat_template import read_template
from train.huggingface.loading import Pretrained
from train.huggingface.tokenizer import read_tokenizer
from train.tasks import Task, answers, classification, language, standard_library

KINDS = {"decoder": "a decoder, such as a Llama or Qwen", "encoder": "an encoder, such as a BERT"}


def make_task(settings: Settings, origin: Pretrained | None) -> Task:
    """Reads the settings' data; `origin` is the model's folder, with its tokenizer.

    The classes are those of the model's head, if all labels are among them.
    """
    task, path = settings.task, settings.data and Path(settings.data)
    options = settings.subset(("sequence_length", "validation_share", "seed"))
    if task == "standard_library":
        return standard_library.make(corpus_megabytes=settings.corpus_megabytes, **options)
    kind = "encoder" if task == "classification" else "decoder"
    if origin.architecture != kind:
        other = f"{origin.folder} is {KINDS[origin.architecture]}. Pass another --model or --task"
        raise SettingsError(f"`model`: the task {task} needs {KINDS[kind]}, but {other}.")
    check_length(settings.sequence_length, origin)
    vocabulary, needs_end = origin.config.vocabulary, task in ("language", "alpaca")
    tokenizer = read_tokenizer(origin.folder, vocabulary=vocabulary, needs_end=needs_end)
    if task == "language":
        return language.make(path, tokenizer, field=settings.text_column, **options)
    if task == "alpaca":
        return answers.make_alpaca(path, tokenizer, **options)
    if task == "chat":
        file = settings.chat_template and Path(settings.chat_template)
        template = read_template(origin.folder, tokenizer.tokens, file)
        return answers.make_chat(path, tokenizer, template, **options)
    columns = classification.Columns(
        settings.text_column, settings.label_column, settings.second_text_column
    )
    return classification.make(path, tokenizer, columns, known=origin.class_names, **options)


def check_length(sequence_length: int, origin: Pretrained) -> None:
    """Rejects sequences that exceed the model's positions."""
    longest = origin.config.positions
    if sequence_length > longest:
        problem = f"{sequence_length} exceeds the {longest} positions of the model {origin.folder}"
        raise SettingsError(f"`sequence_length`: {problem}. Pass --sequence-length {longest}.")
