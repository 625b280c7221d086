"""Checks the fields that a task does not read.

Those that control training are honoured or rejected, the rest are counted for a note.
docs/finetuning.md has the same table.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from train.huggingface.chat_template import ASSISTANT
from train.tasks.batches import DataError
from train.tasks.files import shorten

_PAIRS = "It is for training on preferences (DPO, KTO). Keep only the good answers, without it"
_MEDIA = "The models read only text. Leave out these examples"
_PARTS = "An answer is used as a whole or, with its message's `weight` 0, not at all. Use that"
_KWARGS = "Templates do not receive this field. Remove it, or put it into the messages"

REFUSED = {
    **dict.fromkeys(("chosen", "rejected", "preferred_output", "non_preferred_output"), _PAIRS),
    **dict.fromkeys(("rejected_response", "rejected_messages", "kto_tag", "label"), _PAIRS),
    **dict.fromkeys(("files", "attachments"), _MEDIA),
}
OF_CHATS = REFUSED | {
    "system": "Put it into a first message with the role 'system'",
    "functions": "Rename it to `tools`, each as {'type': 'function', 'function': ...}",
    **dict.fromkeys(("documents", "chat_template_kwargs"), _KWARGS),
}
OF_MESSAGES = REFUSED | {
    "function_call": "Put it into `tool_calls`, as [{'type': 'function', 'function': ...}]",
    **dict.fromkeys(("file", "attachment", "documents"), _MEDIA),
}
OF_INSTRUCTIONS = REFUSED | dict.fromkeys(
    ("system", "history"), "Alpaca has no such field. Write conversations, and use --task chat"
)

_EMPTY = (None, "", [], {})
# Names are compared in lower case, without `_` and `-`.
_MEDIUM = re.compile("(input)?(image|audio|video|picture|photo)s?(url|path|data|file|base64)?s?")
# 1 or true to train on an example or message, 0 or false not to.
_WEIGHT = re.compile(
    "(loss|train|sample|step)?weights?|loss(mask)?|train(ing|able|on(this|turn)?)?|istrainable"
    "|(step|message|turn)lossmask|learn(able)?|(compute|calculate|calc|has|use)loss"
)
# Other combinations of these words also control training.
_CONTROL = re.compile(
    "(?=.*(mask|loss|weight|train|learn|ignore|skip|exclude))(is|no|not|dont|has|in|on|with|only|"
    "step|turn|token|message|msg|sample|example|label|target|completion|response|assistant|answer|"
    "user|prompt|input|output|history|role|detail|scale|ignore|skip|exclude|compute|calculate|"
    "mask(ed|ing)?|loss(es)?|weight|train(ing|able|ed)?|learn(able|ed)?|s)+"
)

# Names of instruction fields in formats like Alpaca's.
RENAMED = {"response": "output", "completion": "output", "answer": "output", "context": "input"}
RENAMED |= {"question": "instruction", "prompt": "instruction"}

# Remedies for the fields of ShareGPT's messages, and for records without `messages`.
RENAME_ITEMS = "Rename `from` to `role` and `value` to `content`"
REMEDIES = {
    "conversations": f"Rename `conversations` to `messages`. In its items: {RENAME_ITEMS}",
    "instruction": "This is an instruction: use --task alpaca",
    "text": "This is text: use --task language",
}


class Fields:
    """Rejects records with unsupported fields that control training, and counts other fields.

    Tables have a column for each field, so an empty field is treated as absent.
    """

    def __init__(self, *read: str, refused: Mapping[str, str] = REFUSED):
        self._read = read
        self._refused = refused
        self._others: Counter[str] = Counter()

    def check(self, where: str, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name in self._read or value in _EMPTY:
                continue
            refuse(where, name, value, self._refused)
            if not _WEIGHT.fullmatch(_fold(name)):
                self._others[name] += 1
            elif value != 1:
                problem = f"{where}: the field {name!r} must be 1, but is {shorten(repr(value))}."
                raise DataError(f"{problem} Leave out this example, or weigh its messages.")

    def notes(self, where: object) -> list[str]:
        """Returns a sentence that lists the 12 most frequent other fields with their counts."""
        common = [f"{name!r} {count}" for name, count in self._others.most_common(12)]
        common += ["..."] * (len(self._others) > 12)
        return [f"{where}: fields that are not read: {', '.join(common)}"] if common else []


def refuse(where: str, name: str, value: Any, refused: Mapping[str, str]) -> None:
    """Raises a `DataError` with a remedy if a field is in `refused`, or controls training."""
    folded = _fold(name)
    is_class = folded == "label" and not isinstance(value, bool)  # a bool is a verdict (KTO)
    if not refused or is_class or value in _EMPTY:
        return
    remedy = {_fold(key): text for key, text in refused.items()}.get(folded)
    if _MEDIUM.fullmatch(folded):
        remedy = _MEDIA
    elif _CONTROL.fullmatch(folded) and not _WEIGHT.fullmatch(folded):
        remedy = _PARTS
    if remedy is not None:
        got = shorten(repr(value))
        raise DataError(f"{where}: the field {name!r} ({got}) is not supported. {remedy}.")
    for inner, part in _nested(value):
        zeros = part if isinstance(part, list) else [part]
        if _CONTROL.fullmatch(_fold(inner)) and any(x in (0, "0") for x in zeros):
            problem = f"{inner!r} in {name!r} is {shorten(repr(part))}, but is not read there"
            raise DataError(f"{where}: the field {problem}. Remove it, or use `weight`.")


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


def check_instruction(where: str, record: Mapping[str, Any]) -> None:
    """Raises a `DataError` if a record uses another format's name for a field."""
    if "instruction" not in record and ("messages" in record or "conversations" in record):
        raise DataError(f"{where}: the record is a conversation. Use --task chat.")
    for old, new in RENAMED.items():
        if new not in record and record.get(old) not in _EMPTY:
            raise DataError(f"{where}: the field {new!r} is missing. Rename {old!r} to {new!r}.")


def _fold(name: str) -> str:
    return re.sub("[-_ ]", "", name.lower())


def _nested(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of all fields of objects inside a value."""
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield str(name), part
            yield from _nested(part)
