"""The task that the settings ask for."""

from __future__ import annotations

from pathlib import Path

from train.chat_template import read_template
from train.pretrained import Pretrained
from train.settings import Settings, SettingsError
from train.tasks import Task, alpaca, chat, classification, glue, language, standard_library
from train.tokenizer import read_tokenizer

OF_DECODERS = ("standard_library", "language", "alpaca", "chat")


def make_task(settings: Settings, origin: Pretrained | None) -> Task:
    """Reads the data of a run's task; `origin` is the folder of the model, with its tokenizer."""
    length = settings.sequence_length
    share = {"seed": settings.seed, "validation_share": settings.validation_share}
    if settings.task == "standard_library":
        return standard_library.make(
            sequence_length=length, corpus_megabytes=settings.corpus_megabytes, **share
        )
    path = Path(settings.data)
    kind = "decoder" if settings.task in OF_DECODERS else "encoder"
    if origin.architecture != kind:
        raise SettingsError(
            f"`model`: expected a folder with a model of the kind {kind}, as the task "
            f"{settings.task} needs, got {settings.model}, which has one of the kind "
            f"{origin.architecture}. Name another --model or another --task."
        )
    check_length(length, origin)
    tokenizer = read_tokenizer(
        origin.folder,
        vocabulary=origin.config.vocabulary,
        needs_end=settings.task in ("language", "alpaca"),
    )
    if settings.task == "language":
        joined = settings.packing == "joined"
        options = {"joined": joined, "field": settings.text_column}
        return language.make(path, tokenizer, sequence_length=length, **options, **share)
    if settings.task == "alpaca":
        return alpaca.make(path, tokenizer, sequence_length=length, **share)
    if settings.task == "chat":
        file = settings.chat_template and Path(settings.chat_template)
        template = read_template(origin.folder, tokenizer.tokens, file)
        return chat.make(path, tokenizer, template, sequence_length=length, **share)
    if settings.task == "classification":
        columns = classification.Columns(
            settings.text_column, settings.label_column, settings.second_text_column
        )
        known = class_names(origin)
        return classification.make(
            path, tokenizer, columns, sequence_length=length, known=known, **share
        )
    return glue.make(settings.task, path, tokenizer, sequence_length=length)


def labels_and_best(task: str) -> tuple[tuple[str, ...], str]:
    """The names of a task's classes, if they need no data, and the figure that is to be best."""
    if task in OF_DECODERS:
        return (), "loss"
    if task == "classification":
        return (), classification.BEST
    return tuple(glue.FORMATS[task].labels.values()), glue.FORMATS[task].best


def class_names(origin: Pretrained) -> tuple[str, ...]:
    """The names of the classes of the folder's head; () if it has none or does not name them."""
    names = origin.class_names
    return () if any(name == f"LABEL_{i}" for i, name in enumerate(names)) else names


def check_length(sequence_length: int, origin: Pretrained) -> None:
    """Refuses sequences for which the model has no positions."""
    longest = origin.config.positions
    if sequence_length > longest:
        raise SettingsError(
            f"`sequence_length`: expected at most {longest}, for which the model in "
            f"{origin.folder} has positions, got {sequence_length}."
        )
