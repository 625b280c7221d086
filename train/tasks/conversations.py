"""Reads conversations from files, checks messages, and renders them with a chat template."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.huggingface.chat_template import ChatTemplate, Conversation, ConversationError
from train.huggingface.json_files import documents
from train.tasks import fields
from train.tasks.batches import DataError
from train.tasks.files import records, shorten, text_field

MESSAGES, TOOLS = "messages", "tools"


class Conversations:
    """Reads conversations, and counts fields that are not read."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._fields = fields.Fields(MESSAGES, TOOLS, refused=fields.OF_CHATS)
        self._lost: Counter[str] = Counter()
        self._changes, self._change = 0, ("", "")

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
            self._lost.update(conversation.marks.lost())
            for self._change in conversation.marks.changed():
                self._changes += 1
            yield conversation

    def notes(self, where: Path) -> list[str]:
        """Returns sentences about fields that are not read, and texts that the template changes."""
        notes = self._fields.notes(where)
        if self._lost:
            thoughts = re.compile("reason|think|thought|analysis", re.IGNORECASE)
            names = sorted(self._lost, key=lambda x: (not thoughts.search(x), -self._lost[x]))
            lost = ", ".join(f"{name!r} {self._lost[name]}" for name in names[:12])
            notes.append(f"{where}: fields of messages that the template does not write: {lost}")
        if self._changes:
            pair = " to ".join(shorten(repr(text)) for text in self._change)
            notes.append(f"{where}: the template changes {self._changes} texts of messages: {pair}")
        return notes

    def _rendered(
        self, where: str, messages: list[dict], tools: list | None, skipped: set[int]
    ) -> Conversation:
        parsed = [dict(message) for message in messages]
        for n, message in enumerate(parsed, 1):
            if calls := message.get("tool_calls"):  # OpenAI's arguments are JSON text
                message["tool_calls"] = [_parsed(f"{where}, message {n}", call) for call in calls]
        # Templates write JSON text as it is, or inside JSON with quotes, or expect an object.
        quoted, problem = None, ConversationError()
        for attempt in (messages, parsed):
            try:
                conversation = self._template.conversation(attempt, tools, skipped)
            except ConversationError as error:
                problem = error
            else:
                if conversation.marks.as_given():
                    return conversation
                quoted = conversation
        if quoted is None:
            raise problem
        return quoted


class _Object(dict):
    """Is printed as JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    __repr__ = __str__


class _Array(list):
    __str__ = __repr__ = _Object.__str__


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return _Object({name: _as_json(part) for name, part in value.items()})
    return _Array(map(_as_json, value)) if isinstance(value, list) else value


def _messages(where: str, record: dict[str, Any]) -> tuple[list[dict[str, Any]], set[int]]:
    """Returns a record's messages, and the indices of messages that are excluded from training."""
    if MESSAGES not in record:
        names = ", ".join(map(repr, record)) or "none"
        remedy = "Rename the field (docs/finetuning.md has the format)"
        raise DataError(f"{where}: the field {MESSAGES!r} is missing (fields: {names}). {remedy}.")
    messages = record[MESSAGES]
    if not isinstance(messages, list) or not messages:
        got = shorten(repr(messages))
        raise DataError(f"{where}: {MESSAGES!r} must be a list of messages, but is {got}.")
    places = [f"{where}, message {n}" for n in range(1, len(messages) + 1)]
    checked = [*map(_message, places, messages)]
    learned = [*map(fields.pop_learned, places, checked)]
    return checked, {i for i, counts in enumerate(learned) if not counts}


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        got = shorten(repr(message))
        raise DataError(f'{where}: must be {{"role": ..., "content": ...}}, but is {got}.')
    # In files made from tables, every message has all fields that occur in any message.
    message = {name: value for name, value in message.items() if value is not None}
    for name in message.keys() - {"role", "content", "tool_calls"}:
        fields.refuse(where, name, message[name], fields.OF_MESSAGES)
    text_field(where, message, "role")
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    else:
        _expect_objects(where, "tool_calls", message["tool_calls"])
        message.setdefault("content", "")
        for function in (call.get("function", call) for call in message["tool_calls"]):
            if function.get("arguments") == "":
                function["arguments"] = "{}"
    text_field(where, message, "content")
    return message


def _expect_objects(where: str, field: str, items: Any) -> None:
    """Raises a `DataError` if tools or calls are not a list of objects with functions."""
    if not isinstance(items, list) or not all(
        isinstance(item, dict) and isinstance(item.get("function", item), dict) for item in items
    ):
        expected = 'a list of objects {"type": "function", "function": {...}}'
        got = shorten(repr(items))
        raise DataError(f"{where}: the field {field!r} must be {expected}, but is {got}.")


def _parsed(where: str, call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(arguments := function.get("arguments"), str):
        return call
    value = _loaded(where, "the arguments of a call", arguments)
    parsed = function | {"arguments": _as_json(value)}
    return call | {"function": parsed} if "function" in call else parsed


def _loaded(where: str, subject: str, text: str) -> Any:
    """Returns the value of JSON text in a field."""
    try:
        [(_, value)] = documents(text)
    except ValueError as error:
        got = shorten(repr(text))
        raise DataError(f"{where}: {subject} are not valid JSON ({error}): {got}.") from error
    return value
