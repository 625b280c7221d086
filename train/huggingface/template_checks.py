"""Finds the parts of a conversation that a chat template skips.

A template skips everything that it does not support: other roles, tools and their calls, thoughts.
So the conversation is rendered again, with a mark in place of each text. A mark that is missing
from the result indicates a skipped part. Because marks replace all texts, one rendering covers all
conversations of the same form: the same roles, fields, calls and tools.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from train.huggingface.chat_template import ChatTemplate, ConversationError, Message, rename_roles

USUAL = ("system", "user", "assistant", "tool")

# Placed around the name of a marked part. Python prints them unchanged, also in dicts.
_LEFT, _RIGHT = "\u29fc", "\u29fd"
_MARK = re.compile(f"{_LEFT}([0-9.]+) ([^{_RIGHT}]*){_RIGHT}")

# A call's id is not text, and some templates require exactly nine letters and digits.
_ID = "call00000"

#: Number of forms to remember.
FORMS = 1024

_REMEDY = "Pass another template with --chat-template, or leave it out"


class TemplateChecks:
    """Rejects conversations that a template renders incompletely; counts other fields and roles."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._fields: Counter[str] = Counter()
        self._roles: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._of_form = functools.lru_cache(FORMS)(self._render)

    def check(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> None:
        """Raises a `ConversationError` if the text lacks content, calls or tools."""
        self._roles.update(m["role"] for m in messages if m["role"] not in USUAL)
        form = [[_marked(i, m) for i, m in enumerate(messages)], _named("0", "tools", tools or [])]
        missing, failure = self._of_form(json.dumps(form, ensure_ascii=False, default=str))
        self._failures.update(failure)
        for number, name in missing:
            i, where = int(number.partition(".")[0]), self._template.where
            problem = f"the template in {where} skips `{name}`"
            if name == "tools":
                raise ConversationError(f"{problem}. {_REMEDY}")
            if name in ("content", "tool_calls", "arguments"):
                role = messages[i]["role"]
                renamed = rename_roles(role)
                remedy = renamed or _REMEDY
                raise ConversationError(f"{problem} of message {i + 1} (role {role!r}). {remedy}")
            self._fields[name] += 1

    def notes(self) -> list[str]:
        """Returns sentences with the counts."""
        where = self._template.where
        counts = {
            "fields of messages that it does not write": self._fields,
            f"roles besides {', '.join(USUAL)}, which zenflow-generate does not use": self._roles,
            "conversations that it rejects with marks for texts, so that no check shows skipped "
            "parts": self._failures,
        }
        return [f"{where}: {label}: {listed(count)}" for label, count in counts.items() if count]

    def _render(self, form: str) -> tuple[list[tuple[str, str]], list[str]]:
        """Returns unwritten fields with the numbers of their messages, and failures."""
        messages, tools = json.loads(form)
        try:
            text = self._template.render(messages, tools=tools or None).lower()
        except ConversationError as error:
            return [], [str(error)]
        marks = {mark.group(): mark.groups() for mark in _MARK.finditer(form)}
        return [place for mark, place in marks.items() if mark.lower() not in text], []


def listed(counts: Counter[str]) -> str:
    """Returns the 12 most frequent names with their counts."""
    common = [f"{name!r} {count}" for name, count in counts.most_common(12)]
    return ", ".join(common + ["..."] * (len(counts) > 12))


def _mark(number: int | str, name: str) -> str:
    return f"{_LEFT}{number} {name}{_RIGHT}"


def _marked(number: int, message: Message) -> dict[str, Any]:
    marked: dict[str, Any] = {}
    for name, value in message.items():
        if name == "tool_calls":
            marked[name] = _named(f"{number}", name, value)
        elif name == "tool_call_id":
            marked[name] = _ID
        else:
            marked[name] = value if name == "role" else _replaced(value, _mark(number, name))
    return marked


def _named(number: str, name: str, items: Sequence[Any]) -> list[Any]:
    """Returns tools or calls with marks in place of their names and arguments."""
    named = []
    for k, item in enumerate(items):
        function = item.get("function", item) | {"name": _mark(f"{number}.{k}", name)}
        if arguments := function.get("arguments"):
            mark = _mark(f"{number}.{k}", "arguments")
            function["arguments"] = {mark: mark} if isinstance(arguments, dict) else mark
        whole = item | {"function": function} if "function" in item else function
        named.append(whole | {"id": _ID} if "id" in item else whole)
    return named


def _replaced(value: Any, mark: str) -> Any:
    """Replaces texts and numbers with the mark, in one entry of each list."""
    if isinstance(value, dict):
        return {name: _replaced(part, mark) for name, part in value.items()}
    if isinstance(value, list):
        return [_replaced(part, mark) for part in value[:1]]
    blank = value is None or isinstance(value, bool) or not str(value).strip()
    return value if blank else mark
