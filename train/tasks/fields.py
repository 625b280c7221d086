"""Checks the fields that a task does not read.

Those that control training are honoured or rejected, the rest are counted for a note.
docs/finetuning.md has the supported forms.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from train.huggingface.chat_template import ASSISTANT
from train.tasks.batches import DataError
from train.tasks.files import shorten

# Fields that change an example's meaning.
OF_CHATS = {"system", "functions", "documents", "files", "chat_template_kwargs"}
OF_MESSAGES = {"function_call", "documents", "files", "file"}
OF_INSTRUCTIONS = {"system", "history", "files", "context"}

_EMPTY = (None, "", [], {})
# 1 or true to train on an example or message, 0 or false not to. Names are compared in lower case,
# without `_` and `-`.
_WEIGHT = re.compile(
    "(loss|train|sample|step)?weights?|loss(mask)?|train(ing|able|on(this|turn)?)?|istrainable"
    "|(step|message|turn)lossmask|learn(able)?|(compute|calculate|calc|has|use)loss"
)
# Beginnings of words in the names of fields that control training in other ways (masks, scores for
# training on preferences), or contain more than text.
_CONTROL = re.compile(
    "(mask|loss|weight|train|learn|ignore|chosen|reject|prefer|kto|image|audio|video|attach).*",
    re.IGNORECASE,
)


class Fields:
    """Rejects records with unsupported fields that control training, and counts other fields.

    Tables have a column for each field, so an empty field is treated as absent. With None as
    `refused`, a record may have any field.
    """

    def __init__(self, *read: str, refused: Collection[str] | None = None):
        self._read = read
        self._refused = refused
        self._counts: Counter[str] = Counter()

    def check(self, where: str, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name in self._read or value in _EMPTY:
                continue
            if self._refused is not None:
                refuse(where, name, value, self._refused)
            if not _WEIGHT.fullmatch(_fold(name)):
                self._counts[name] += 1
            elif value != 1:
                problem = f"{where}: the field {name!r} must be 1, but is {shorten(repr(value))}."
                raise DataError(f"{problem} Leave out this example, or weigh its messages.")

    def notes(self, where: object) -> list[str]:
        """Returns a sentence that lists the 12 most frequent other fields with their counts."""
        common = [f"{name!r} {count}" for name, count in self._counts.most_common(12)]
        common += ["..."] * (len(self._counts) > 12)
        return [f"{where}: fields that are not read: {', '.join(common)}"] if common else []


def refuse(where: str, name: str, value: Any, refused: Collection[str]) -> None:
    """Raises a `DataError` for a field that is in `refused` or seems to control training."""
    words = re.split("[-_ ]|(?<=[a-z])(?=[A-Z])", name)
    controls = any(map(_CONTROL.fullmatch, words)) and not _WEIGHT.fullmatch(_fold(name))
    is_verdict = name == "label" and isinstance(value, bool)  # other labels are classes
    if (name in refused or controls or is_verdict) and value not in _EMPTY:
        got = shorten(repr(value))
        remedy = 'docs/finetuning.md, "Other fields", has the supported forms'
        raise DataError(f"{where}: the field {name!r} ({got}) is not supported. {remedy}.")


def pop_learned(where: str, message: dict[str, Any]) -> bool:
    """Returns whether to train on a message, and removes the fields that decide this."""
    learned = is_answer = message["role"] == ASSISTANT
    for name in [name for name in message if _WEIGHT.fullmatch(_fold(name))]:
        value = message.pop(name)
        if not isinstance(value, int | float) or value not in (0, 1):
            got = shorten(repr(value))
            raise DataError(f"{where}: the field {name!r} must be 0 or 1, but is {got}.")
        if value and not is_answer:
            problem = f"is {value!r}, but the role is not {ASSISTANT!r}. Remove the field"
            raise DataError(f"{where}: the field {name!r} {problem}.")
        learned = learned and bool(value)
    return learned


def _fold(name: str) -> str:
    return re.sub("[-_ ]", "", name.lower())
