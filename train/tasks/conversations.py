"""Reads conversations from files, checks messages, and renders them with a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.huggingface.chat_template import ChatTemplate, Conversation, ConversationError
from train.huggingface.json_files import documents
from train.tasks import fields
from train.tasks.batches import DataError
from train.tasks.files import records, shorten, text_field

MESSAGES, TOOLS = "messages", "tools"
SYSTEM = "system"  # the role


class Conversations:
    """Reads conversations, and counts unread fields and system messages."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._fields = fields.Fields(MESSAGES, TOOLS, refused=fields.OF_CHATS)
        self._conversations = self._with_system = 0

    def read(self, path: Path) -> Iterator[Conversation]:
        for where, record in records(path):
            self._fields.check(where, record)
            messages, skipped = _messages(where, record)
            if (tools := record.get(TOOLS) or None) and isinstance(tools, str):
                tools = _loaded(where, "the tools", tools) or None
            _expect_objects(where, TOOLS, tools or [])
            try:
                conversation = self._rendered(where, messages, tools, skipped)
            except ConversationError as error:
                raise DataError(f"{where}: {error}.") from error
            self._conversations += 1
            self._with_system += messages[0]["role"] == SYSTEM
            yield conversation

    def notes(self, where: Path) -> list[str]:
        """Returns sentences about fields that are not read, and about system messages."""
        notes = self._fields.notes(where)
        if self._with_system:
            notes.append(
                f"{where}: {self._with_system} of {self._conversations} conversations begin with a "
                "system message, so prompt the model with one (zenflow-generate --system)"
            )
        return notes

    def _rendered(
        self, where: str, messages: list[dict], tools: list | None, skipped: set[int]
    ) -> Conversation:
        parsed = [dict(message) for message in messages]
        for n, message in enumerate(parsed, 1):
            if calls := message.get("tool_calls"):  # OpenAI's arguments are JSON text
                message["tool_calls"] = [_parsed(f"{where}, message {n}", call) for call in calls]
        try:
            return self._template.conversation(parsed, tools, skipped)
        except ConversationError:
            if parsed == messages:
                raise
            # Some templates, such as DeepSeek R1's, only accept arguments as text.
            return self._template.conversation(messages, tools, skipped)


def _messages(where: str, record: dict[str, Any]) -> tuple[list[dict[str, Any]], set[int]]:
    """Returns a record's messages, and the indices of messages that are excluded from training."""
    if MESSAGES not in record:
        names = ", ".join(map(repr, record)) or "none"
        remedies = (text for name, text in fields.REMEDIES.items() if name in record)
        remedy = next(remedies, "Rename the field")
        raise DataError(f"{where}: the field {MESSAGES!r} is missing (fields: {names}). {remedy}.")
    messages = record[MESSAGES]
    if not isinstance(messages, list) or not messages:
        got = shorten(repr(messages))
        raise DataError(f"{where}: {MESSAGES!r} must be a list of messages, but is {got}.")
    checked, skipped = [], set()
    for i, message in enumerate(messages):
        place = f"{where}, message {i + 1}"
        checked.append(_message(place, message))
        if not fields.pop_learned(place, checked[-1]):
            skipped.add(i)
    return checked, skipped


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        got = shorten(repr(message))
        raise DataError(f'{where}: must be {{"role": ..., "content": ...}}, but is {got}.')
    # In files made from tables, every message has all fields that occur in any message.
    message = {name: value for name, value in message.items() if value is not None}
    for name, value in message.items():
        fields.refuse(where, name, value, fields.OF_MESSAGES)
    remedy = fields.RENAME_ITEMS if "from" in message else "Rename the field"
    text_field(where, message, "role", remedy=remedy)
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    _expect_objects(where, "tool_calls", message.get("tool_calls", []))
    if "content" in message or "tool_calls" not in message:
        text_field(where, message, "content")
    return message


def _expect_objects(where: str, field: str, items: Any) -> None:
    """Raises a `DataError` if tools or calls are not a list of objects with functions."""
    valid = isinstance(items, list) and all(
        isinstance(item, dict) and isinstance(item.get("function", item), dict) for item in items
    )
    if not valid:
        raise DataError(
            f"{where}: the field {field!r} must be a list of objects "
            f'{{"type": "function", "function": {{...}}}}, but is {shorten(repr(items))}.'
        )


def _parsed(where: str, call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(arguments := function.get("arguments"), str):
        return call
    value = _loaded(where, "the arguments of a call", arguments or "{}")
    parsed = function | {"arguments": value}
    return call | {"function": parsed} if "function" in call else parsed


def _loaded(where: str, subject: str, text: str) -> Any:
    """Returns the value of JSON text in a field."""
    try:
        [(_, value)] = documents(text)
    except ValueError as error:
        got = shorten(repr(text))
        raise DataError(f"{where}: {subject} are not valid JSON ({error}): {got}.") from error
    return value
