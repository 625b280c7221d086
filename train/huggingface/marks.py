"""Follows each text of a conversation through a chat template.

The conversation is rendered again with marks in place of each text's first and last letter: rare
letters that it does not contain. If nothing else changes, the marks show where each text is, or
that it is missing. A template's own words, such as `</think>`, are not marked, because it may
search texts for them, or cut texts there. If something else changes, ever smaller groups are
marked. A text that changes something else even alone must occur outside all others. Numbers and
truth values are replaced by others, and must change the text.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Ideographs are letters without case, which Python and JSON print as they are.
_MARKS = [*map(chr, (*range(0x3400, 0x4DC0), *range(0x20000, 0x2A6E0)))]
_MARK = re.compile("[\u3400-\u4dbf\U00020000-\U0002a6df]")
_LETTER, _PRINTED = re.compile(r"[^\W_]"), re.compile(r"\S")
_THOUGHT = re.compile("(/|end).*(think|thought|reason)", re.IGNORECASE)  # the end of one
_FIRST = ("system", "developer")  # roles whose contents templates may move

ASSISTANT = "assistant"


class ConversationError(ValueError):
    """A template cannot render a conversation. The caller adds the conversation's location."""


@dataclasses.dataclass(eq=False)
class Leaf:
    """A number, a truth value or a text, or a part of a text between a template's words."""

    path: tuple[Any, ...]
    value: Any
    needed: bool
    first: int = 0  # indices in the text that are marked
    last: int = 0
    marks: str = ""  # for both
    begin: int = -1  # indices of the marks in the rendered text
    end: int = -1
    written: bool = False

    @property
    def message(self) -> int:
        return self.path[1] if self.path[0] == "messages" else -1

    @property
    def field(self) -> str:
        if self.message < 0:
            return "tools" if self.needed else "description of a tool"
        return self.path[2] if self.needed or self.path[2] != "content" else "<think>"

    @property
    def text(self) -> str:
        return self.value[self.first : self.last + 1]


class Marks:
    """A rendered conversation, its leaves, and a copy in which leaves are marked."""

    def __init__(
        self, render: Callable[..., str], messages: Sequence[Any], tools: Any, words: re.Pattern
    ):
        self._render = render
        self._conversation = {"messages": list(messages), "tools": tools}
        self.text = render(messages, False, tools)
        self.leaves: list[Leaf] = []
        marks = (mark for mark in _MARKS if mark not in self.text)

        def add(path: tuple[Any, ...], value: Any) -> Any:
            needed = _needed(path)
            if needed is not None and not isinstance(value, str):
                self.leaves.append(Leaf(path, value, needed))
            elif needed is not None:
                parts = [*_parts(value, words)]
                message = messages[path[1]] if path[0] == "messages" else {"role": None}
                for first, last, thought in parts:
                    pair = "".join([next(marks) for _ in {first, last}])
                    # Templates may drop the thoughts before an answer or a call.
                    free = thought and (not parts[-1][2] or "tool_calls" in message)
                    need = needed and not (free and message["role"] == ASSISTANT)
                    self.leaves.append(Leaf(path, value, need, first, last, pair))
            return value

        _mapped(self._conversation, add)
        texts = [leaf for leaf in self.leaves if leaf.marks]
        followed = self._follow(texts)
        if len(followed) < len(texts):
            known = {*followed}
            self._search([leaf for leaf in texts if leaf not in known], followed)
            if not self._is_aligned(self._rendered(self._marked(followed))):
                followed = []
        self._copy = self._marked(followed)
        self._marked_text = self._rendered(self._copy)
        self._owners = {mark: leaf for leaf in followed for mark in leaf.marks}
        for leaf in self.leaves:
            leaf.written = leaf.written or (not leaf.marks and self._is_shown(leaf))

    def behind(self, count: int | None, *, ask: bool = False) -> tuple[int, str]:
        """Renders `count` messages; returns where their last mark ends, and the text after it.

        The place is that in the whole conversation. `ask` adds the prompt for the next answer.
        """
        text = self._rendered(self._copy, count, ask)
        last = max((n for n, x in enumerate(text) if x in self._owners), default=None)
        if last is None:
            return 0, text
        # A template may write a text several times.
        places = [n for n, x in enumerate(self._marked_text) if x == text[last]]
        if (count := text.count(text[last])) > len(places):
            raise ConversationError("the template drops the last text")
        return places[count - 1] + 1, text[last + 1 :]

    def begin(self, i: int) -> int:
        """Returns where the text changes if message `i` has another content."""
        other = self._rendered(self._changed({("messages", i, "content"): "\0"}))
        return len(os.path.commonprefix([self.text, other]))

    def holds(self, i: int, start: int, stop: int) -> bool:
        """Returns whether a range holds message `i`, and no other."""
        inside = {*self._marked_text[start:stop]} & self._owners.keys()
        own = [x for x in self.leaves if x.message == i and x.marks and x.needed]
        return (
            0 <= start <= stop
            and {self._owners[mark].message for mark in inside} <= {i}
            and all(start <= x.begin < stop or x.text in self.text[start:stop] for x in own)
        )

    def in_order(self) -> bool:
        """Returns whether contents, except of system messages, and calls come one after another."""
        places: dict[str, list[int]] = {"content": [], "name": []}
        for leaf in (x for x in self.leaves if x.needed and min(x.begin, x.message) >= 0):
            role = self._conversation["messages"][leaf.message]["role"]
            if role not in _FIRST and "arguments" not in leaf.path:
                places[leaf.path[-1]].append(leaf.begin)
        return all(kind == sorted(kind) for kind in places.values())

    def lost(self) -> list[str]:
        """Returns the other fields that are not written, once for each message."""
        fields = {(leaf.message, leaf.field): False for leaf in self.leaves if not leaf.needed}
        fields |= {(leaf.message, leaf.field): True for leaf in self.leaves if leaf.written}
        return [field for (_, field), written in fields.items() if not written]

    def changed(self) -> list[tuple[str, str]]:
        """Returns contents that the template writes differently, and its versions."""
        contents = [x for x in self.leaves if x.needed and x.path[2:] == ("content",)]
        pairs = [(x.text, self._shown(x)) for x in contents if x.begin >= 0]
        return [(x, y) for x, y in pairs if y not in (x, json.dumps(x, ensure_ascii=False)[1:-1])]

    def as_given(self) -> bool:
        """Returns whether arguments that are JSON text are written without changes or quotes."""
        arguments = [x for x in self.leaves if x.path[-1] == "arguments" and x.marks]
        same = all(x.begin >= 0 and self._shown(x) == x.text for x in arguments)
        return same and not any(f'"{x.value.strip()}"' in self.text for x in arguments)

    def _shown(self, leaf: Leaf) -> str:
        return self.text[leaf.begin : leaf.end + 1]

    def _marked(self, leaves: list[Leaf]) -> dict[str, Any]:
        """Returns the conversation with the marks of some leaves."""
        new: dict[Any, Any] = {}
        for leaf in leaves:
            text = new.get(leaf.path, leaf.value)
            for i, mark in zip((leaf.first, leaf.last), leaf.marks, strict=False):
                text = text[:i] + mark + text[i + 1 :]
            new[leaf.path] = text
        return self._changed(new)

    def _changed(self, new: dict[Any, Any]) -> dict[str, Any]:
        return _mapped(self._conversation, lambda path, value: new.get(path, value))

    def _rendered(
        self, conversation: dict[str, Any], count: int | None = None, ask: bool = False
    ) -> str:
        return self._render(conversation["messages"][:count], ask, conversation["tools"])

    def _is_aligned(self, marked: str) -> bool:
        return len(marked) == len(self.text) and self.text == _MARK.sub(
            lambda m: self.text[m.start()], marked
        )

    def _follow(self, leaves: list[Leaf]) -> list[Leaf]:
        """Finds the leaves in the text; returns those whose marks change nothing else."""
        try:
            marked = self._rendered(self._marked(leaves))
        except ConversationError:
            marked = ""
        if self._is_aligned(marked):
            for leaf in leaves:
                leaf.begin, leaf.end = (marked.find(leaf.marks[i]) for i in (0, -1))
                leaf.written = min(leaf.begin, leaf.end) >= 0
            return leaves
        half = len(leaves) // 2
        return self._follow(leaves[:half]) + self._follow(leaves[half:]) if half else []

    def _search(self, leaves: list[Leaf], followed: list[Leaf]) -> None:
        """Looks for leaves in the text outside those that are followed."""
        rest = self.text
        for leaf in followed:
            if leaf.written:
                hidden = "\0" * len(self._shown(leaf))
                rest = rest[: leaf.begin] + hidden + rest[leaf.end + 1 :]
        for leaf in sorted(leaves, key=lambda leaf: -len(leaf.text)):
            for text in (leaf.text, *(json.dumps(leaf.text, ensure_ascii=x)[1:-1] for x in (0, 1))):
                if text in rest and not leaf.written:
                    leaf.written, rest = True, rest.replace(text, "\0", 1)

    def _is_shown(self, leaf: Leaf) -> bool:
        """Returns whether the text has something in the only place that depends on a number."""
        other = not leaf.value if isinstance(leaf.value, bool) else leaf.value + 7
        try:
            text = self._rendered(self._changed({leaf.path: other}))
        except ConversationError:  # the template reads it
            return True
        shared = len(os.path.commonprefix([self.text, text]))
        behind = os.path.commonprefix([self.text[shared:][::-1], text[shared:][::-1]])
        return len(self.text) > shared + len(behind)


def _mapped(value: Any, change: Callable[[Any, Any], Any], path: tuple[Any, ...] = ()) -> Any:
    """Returns a copy with other leaves, and other names in arguments, whose path ends in None."""
    if isinstance(value, list):
        return type(value)(_mapped(item, change, (*path, i)) for i, item in enumerate(value))
    if not isinstance(value, dict):
        return value if value is None else change(path, value)
    new = {name: _mapped(item, change, (*path, name)) for name, item in value.items()}
    if "arguments" in path:
        new = {change((*path, name, None), name): item for name, item in new.items()}
    return type(value)(new)


def _needed(path: tuple[Any, ...]) -> bool | None:
    """Returns whether a template must write a leaf; None if the leaf has another purpose."""
    match [name for name in path if name != "function"]:
        case ["tools", _, "name"] | ["messages", _, "tool_calls", _, "name"]:
            return True
        case ["messages", _, "content"] | ["messages", _, "tool_calls", _, "arguments", *_]:
            return True
        case ["messages", _, "role" | "tool_calls" | "tool_call_id", *_]:
            return None
        case ["tools", *_]:
            return None if path[-1] != "description" else False
    return False


def _parts(text: str, words: re.Pattern[str]) -> Iterator[tuple[int, int, bool]]:
    """Yields each part's first and last letter, and whether the end of a thought follows."""
    matches = [*words.finditer(text)]
    thought = max((m.start() for m in matches if _THOUGHT.search(m[0])), default=-1)
    begin = 0
    for end, following in [*(m.span() for m in matches), (len(text), len(text))]:
        part = text[begin:end]
        for kind in (_LETTER, _PRINTED):
            if (first := kind.search(part)) and (last := kind.search(part[::-1])):
                yield begin + first.start(), end - last.end(), end <= thought
                break
        begin = following
