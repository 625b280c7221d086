"""Fields of records that a task does not read.

Fields that control learning are obeyed or rejected. Other fields are counted, for a note.
docs/finetuning.md has the same table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from train.huggingface.chat_template import ASSISTANT, rename_roles
from train.huggingface.template_checks import listed
from train.tasks.batches import DataError
from train.tasks.files import shorten

_PAIRS = (
    "That is preference data (DPO, KTO), and training on preferences is not supported. Keep "
    "only the good answers, without that field"
)
_MEDIA = "Models here read only text. Leave out those examples"
_PARTS = "Answers are learned as a whole, or not at all with `weight` 0. Remove the field"
_KWARGS = "Templates do not receive it here. Remove the field, or write it into the messages"

REFUSED = {
    **dict.fromkeys(("chosen", "rejected", "preferred_output", "non_preferred_output"), _PAIRS),
    **dict.fromkeys(("rejected_response", "rejected_messages", "kto_tag", "label"), _PAIRS),
    **dict.fromkeys(("image", "images", "audio", "audios", "video", "videos"), _MEDIA),
    **dict.fromkeys(("loss_scale", "mask", "masked"), _PARTS),
    **dict.fromkeys(("train_detail", "training_detail"), _PARTS),
}
OF_CHATS = REFUSED | {
    "system": "Write it into a first message of the role 'system'",
    "functions": "Rename it to `tools`, each as {'type': 'function', 'function': ...}",
    **dict.fromkeys(("documents", "chat_template_kwargs"), _KWARGS),
}
OF_MESSAGES = REFUSED | {
    "function_call": "Write it into `tool_calls`, as [{'type': 'function', 'function': ...}]",
}
OF_INSTRUCTIONS = REFUSED | dict.fromkeys(
    ("system", "history"), "Alpaca has no such field. Write conversations and use --task chat"
)

# 1 or true if an example or message is learned, 0 or false if not.
WEIGHTS = ("weight", "loss_weight", "train")
OF_ANSWERS = (*WEIGHTS, "training", "loss")

# Names of instruction fields in formats like Alpaca's.
RENAMED = {"response": "output", "completion": "output", "answer": "output", "context": "input"}
RENAMED |= {"question": "instruction", "prompt": "instruction"}

# Fields of ShareGPT's messages.
_ITEMS = "`from` to `role` and `value` to `content`"
RENAME_ITEMS = f"Rename {_ITEMS}"


class Fields:
    """Rejects records with unsupported fields that control learning, and counts other fields.

    Tables have a column for each field, so an empty field counts as absent.
    """

    def __init__(self, *read: str, refused: Mapping[str, str] = REFUSED):
        self._read = read
        self._refused = refused
        self._others: Counter[str] = Counter()

    def check(self, where: str, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name in self._read or _is_empty(value):
                continue
            refuse(where, name, value, self._refused)
            if name not in WEIGHTS:
                self._others[name] += 1
            elif value != 1:
                problem = f"{where}: the field {name!r} must be 1, but is {shorten(repr(value))}."
                raise DataError(f"{problem} Leave out that example.")

    def notes(self, where: object) -> list[str]:
        """Returns a sentence that lists the other fields with their numbers of records."""
        others = self._others
        return [f"{where}: fields that are not read: {listed(others)}"] if others else []


def refuse(where: str, name: str, value: Any, refused: Mapping[str, str]) -> None:
    """Raises a `DataError` with a remedy if a field is in `refused`."""
    if name not in refused or _is_empty(value):
        return
    if name == "label" and not isinstance(value, bool):  # a class; a bool is a verdict (KTO)
        return
    got = shorten(repr(value))
    raise DataError(f"{where}: the field {name!r} ({got}) is not supported. {refused[name]}.")


def pop_learned(where: str, message: dict[str, Any]) -> bool:
    """Returns whether to learn a message; removes the fields that decide it."""
    learned = of_assistant = message["role"] == ASSISTANT
    for name in OF_ANSWERS:
        value = message.pop(name, None)
        if value is None:
            continue
        if not isinstance(value, int | float) or value not in (0, 1):
            got = shorten(repr(value))
            raise DataError(f"{where}: the field {name!r} must be 0 or 1, but is {got}.")
        if value and not of_assistant:
            raise DataError(
                f"{where}: the field {name!r} is {value!r}, but only messages of the role "
                f"{ASSISTANT!r} are learned. Remove the field."
            )
        learned = learned and bool(value)
    return learned


def check_instruction(where: str, record: Mapping[str, Any]) -> None:
    """Raises a `DataError` if a record lacks a field, or has it under another format's name."""
    misnamed = [
        to for name, to in RENAMED.items() if to not in record and not _is_empty(record.get(name))
    ]
    lacking = [name for name in ("instruction", "output") if name not in record]
    for name in misnamed + lacking:
        names = ", ".join(map(repr, record)) or "none"
        remedy = alpaca_remedy(record)
        raise DataError(f"{where}: the field {name!r} is missing (fields: {names}). {remedy}.")


def alpaca_remedy(record: Mapping[str, Any]) -> str:
    """Returns the remedy for a record that is not an instruction."""
    if "messages" in record or "conversations" in record:
        return "That is a conversation: use --task chat"
    pairs = {name: RENAMED[name] for name in RENAMED if name in record}
    names = [f"`{name}` to `{to}`" for name, to in pairs.items() if to not in record]
    return f"Rename {' and '.join(names)}" if names else "Rename the field"


def conversation_remedy(record: Mapping[str, Any]) -> str:
    """Returns the remedy for a record without `messages`."""
    if "conversations" in record:
        return _conversations_remedy(record["conversations"])
    if "message_tree_id" in record or {"message_id", "parent_id"} <= record.keys():
        return "That is a tree of messages (OASST): make a conversation of each path through it"
    if "instruction" in record:
        rename = alpaca_remedy(record).removesuffix("Rename the field")
        return "".join([rename, ", and use" if rename else "Use", " --task alpaca"])
    if "text" in record:
        return "That is text: use --task language"
    if "prompt" in record:
        return 'Write [{"role": "user", "content": PROMPT}, {"role": "assistant", ...}] into it'
    return "Rename the field"


def _conversations_remedy(messages: Any) -> str:
    messages = [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    roles = dict.fromkeys(str(message.get("from", message.get("role"))) for message in messages)
    steps = ["Rename it to `messages`"]
    if not messages or any("from" in message for message in messages):
        steps[0] += f", and in its items {_ITEMS}"
    if "function_call" in roles:
        del roles["function_call"]
        steps.append("Make each 'function_call' a message of the assistant with `tool_calls`")
    return ". ".join(filter(None, [*steps, rename_roles(*roles)]))


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)
