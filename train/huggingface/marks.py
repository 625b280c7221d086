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
_ESCAPED = re.compile(r"\\u(3[4-9a-f]|4[0-9a-d])[0-9a-f]{2}")
_LETTER, _PRINTED = re.compile(r"[^\W_]"), re.compile(r"\S")
_THOUGHT = re.compile("(/|end).*(think|thought|reason)", re.IGNORECASE)  # the end of one
_FIRST = ("system", "developer")  # roles whose contents templates may move
_NUMBER = 900_000_000_000_000

ASSISTANT = "assistant"
THOUGHTS = "<think>"  # stands for an answer's thoughts in the names of fields


class ConversationError(ValueError):
    """A template cannot render a conversation. The caller adds the conversation's location."""


@dataclasses.dataclass(eq=False)
class Leaf:
    """A number, a truth value or a text, or a part of a text between a template's words."""

    path: tuple[Any, ...]
    value: Any
    needed: bool
    part: int = 0  # index of the part in the text
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
        return self.path[2] if self.needed or self.path[2] != "content" else THOUGHTS

    @property
    def text(self) -> str:
        return self.value[self.first : self.last + 1] if self.marks else str(self.value)


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
        found: list[tuple[Any, Any]] = []
        _mapped(self._conversation, lambda path, value: found.append((path, value)) or value)
        for path, value in found:
            needed = _needed(path)
            if needed is None:
                continue
            if not isinstance(value, str):
                self.leaves.append(Leaf(path, value, needed))
                continue
            parts = [*_parts(value, words)]
            message = messages[path[1]] if path[0] == "messages" else {}
            for part, first, last, thought in parts:
                pair = "".join(next(marks, "") for _ in {first, last})
                # Templates may drop the thoughts before an answer or a call.
                free = thought and (not parts[-1][3] or "tool_calls" in message)
                need = needed and not (free and message["role"] == ASSISTANT)
                self.leaves.append(Leaf(path, value, need, part, first, last, pair))
        if len(self.leaves) > len(_MARKS) // 4:
            raise ConversationError(f"there are more than {len(_MARKS) // 4} texts and numbers")
        texts = [leaf for leaf in self.leaves if leaf.marks]
        self.marked = self.text
        followed = self._follow(texts)
        if len(followed) < len(texts):
            known = {*followed}
            self._search([leaf for leaf in texts if leaf not in known], followed)
            if not self._is_aligned(marked := self._marked(followed)):
                marked, followed = self.text, []
            self.marked = marked
        self._followed = followed
        self._owners = {mark: leaf for leaf in followed for mark in leaf.marks}
        self._exchange([leaf for leaf in self.leaves if not leaf.marks])
        self.places = [(m.start(), self._owners[m[0]]) for m in self._found(self.marked)]

    def around(self, i: int) -> tuple[int, int, int, int]:
        """Returns the mark before message `i`, its begin and last mark, and the mark after it.

        A message without marks begins at the mark after it.
        """
        own = [leaf for leaf in self._followed if leaf.message == i and leaf.written]
        first = min(own, key=lambda leaf: leaf.begin, default=None)
        earlier = [
            n for n, leaf in self.places if (n < first.begin if first else -1 < leaf.message < i)
        ]
        before = max(earlier, default=-1)
        last = max((leaf.end for leaf in own), default=before)
        after = min((n for n, _ in self.places if n > last), default=len(self.text))
        if first is None:
            return before, after, last, after
        # A text may begin with other characters than letters.
        start = first.value[first.part : first.first].lstrip()[::-1]
        start = os.path.commonprefix([start, self.text[before + 1 : first.begin][::-1]])
        return before, first.begin - len(start), last, after

    def holds(self, i: int, start: int, stop: int) -> bool:
        """Returns whether a range holds message `i`, and no other."""
        inside = {leaf.message for place, leaf in self.places if start <= place < stop}
        return (
            start <= stop
            and inside <= {i}
            and all(
                start <= leaf.begin < stop or leaf.text in self.text[start:stop]
                for leaf in self.leaves
                if leaf.message == i and leaf.marks and leaf.written and leaf.needed
            )
        )

    def in_order(self) -> bool:
        """Returns whether contents, except of system messages, and calls come one after another."""
        places: dict[str, list[int]] = {"content": [], "name": []}
        for leaf in self.leaves:
            role = self._conversation["messages"][leaf.message]["role"]
            if min(leaf.begin, leaf.message) >= 0 and leaf.needed and role not in _FIRST:
                if "arguments" not in leaf.path:
                    places[leaf.path[-1]].append(leaf.begin)
        return all(kind == sorted(kind) for kind in places.values())

    def prompt(self) -> str:
        """Returns what the template writes behind all messages to ask for an answer."""
        text = self._marked(self._followed, ask=True)
        return text.removeprefix(self.marked) if text.startswith(self.marked) else ""

    def lost(self) -> list[str]:
        """Returns the other fields that are not written, once for each message."""
        fields: dict[tuple[int, str], bool] = {}
        for leaf in self.leaves:
            if not leaf.needed:
                key = leaf.message, leaf.field
                fields[key] = leaf.written or fields.get(key, False)
        return [field for (_, field), written in fields.items() if not written]

    def changed(self) -> list[tuple[str, str]]:
        """Returns contents that the template writes differently, and its versions."""
        pairs = [
            (leaf.text, self.text[leaf.begin : leaf.end + 1])
            for leaf in self.leaves
            if leaf.needed and leaf.begin >= 0 and leaf.path[2:] == ("content",)
        ]
        return [(x, y) for x, y in pairs if y not in (x, json.dumps(x, ensure_ascii=False)[1:-1])]

    def as_given(self) -> bool:
        """Returns whether arguments that are JSON text are written without changes or quotes."""
        for leaf in self.leaves:
            if leaf.path[-1] == "arguments" and leaf.marks:
                text = leaf.value.strip()
                start = leaf.begin - len(leaf.value[: leaf.first].lstrip())
                around = self.text[max(start - 1, 0) : start + len(text) + 1]
                if leaf.begin < 0 or text not in around or around == f'"{text}"':
                    return False
        return True

    def rest(self, place: int, count: int, *, ask: bool = False) -> str | None:
        """Renders `count` messages; returns the text after the mark at `place`, the last one."""
        try:
            text = self._marked(self._followed, count, ask)
        except ConversationError:
            return None
        *_, last = None, *self._found(text)
        if last is None or place < 0:
            return text if last is None and place < 0 else None
        return text[last.end() :] if last[0] == self.marked[place] else None

    def _found(self, text: str) -> list[re.Match[str]]:
        return [match for match in _MARK.finditer(text) if match[0] in self._owners]

    def _marked(self, leaves: list[Leaf], count: int | None = None, ask: bool = False) -> str:
        new: dict[Any, Any] = {}
        for leaf in leaves:
            text = new.get(leaf.path, leaf.value)
            for i, mark in zip((leaf.first, leaf.last), leaf.marks, strict=False):
                text = text[:i] + mark + text[i + 1 :]
            new[leaf.path] = text
        text = self._rendered(new, count, ask)
        return _ESCAPED.sub(lambda m: chr(int(m[0][2:], 16)), text) if "\\u" in text else text

    def _rendered(self, new: dict[Any, Any], count: int | None = None, ask: bool = False) -> str:
        changed = _mapped(self._conversation, lambda path, value: new.get(path, value))
        return self._render(changed["messages"][:count], ask, changed["tools"])

    def _is_aligned(self, marked: str) -> bool:
        return len(marked) == len(self.text) and self.text == _MARK.sub(
            lambda m: self.text[m.start()], marked
        )

    def _follow(self, leaves: list[Leaf]) -> list[Leaf]:
        """Finds the leaves in the text; returns those whose marks change nothing else."""
        try:
            marked = self._marked(leaves)
        except ConversationError:
            marked = ""
        if self._is_aligned(marked):
            places = {m[0]: m.start() for m in reversed([*_MARK.finditer(marked)])}
            for leaf in leaves:
                leaf.begin, leaf.end = (places.get(leaf.marks[i], -1) for i in (0, -1))
                leaf.written = min(leaf.begin, leaf.end) >= 0
            self.marked = marked
            return leaves
        half = len(leaves) // 2
        return self._follow(leaves[:half]) + self._follow(leaves[half:]) if half else []

    def _search(self, leaves: list[Leaf], followed: list[Leaf]) -> None:
        """Looks for leaves in the text outside those that are followed."""
        letters = list(self.text)
        for leaf in followed:
            if leaf.written:
                letters[leaf.begin : leaf.end + 1] = "\0" * (leaf.end + 1 - leaf.begin)
        rest = "".join(letters)
        for leaf in sorted(leaves, key=lambda leaf: -len(leaf.text)):
            for text in (leaf.text, *(json.dumps(leaf.text, ensure_ascii=x)[1:-1] for x in (0, 1))):
                if text in rest and not leaf.written:
                    leaf.written, rest = True, rest.replace(text, "\0", 1)

    def _exchange(self, leaves: list[Leaf]) -> None:
        """Finds out which numbers and truth values the text depends on."""
        new = {leaf.path: _NUMBER + n for n, leaf in enumerate(leaves)}
        try:
            shown = self._rendered(new) if new else ""
        except ConversationError:
            shown = ""
        for leaf in leaves:
            is_bool = isinstance(leaf.value, bool)
            leaf.written = True
            if leaf.value and not is_bool and str(new[leaf.path]) in shown:
                continue
            try:
                other = self._rendered(
                    {leaf.path: leaf.value + 7 if not is_bool else not leaf.value}
                )
            except ConversationError:  # the template reads it
                continue
            # Something must be written at the only place where the texts differ.
            shared = len(os.path.commonprefix([self.text, other]))
            behind = os.path.commonprefix([self.text[shared:][::-1], other[shared:][::-1]])
            leaf.written = len(self.text) > shared + len(behind)


def _mapped(value: Any, change: Callable[[Any, Any], Any], path: tuple[Any, ...] = ()) -> Any:
    """Returns a copy with other leaves, and other names in arguments, whose path ends in None."""
    if isinstance(value, list):
        new = [_mapped(item, change, (*path, i)) for i, item in enumerate(value)]
        return type(value)(new)
    if not isinstance(value, dict):
        return value if value is None else change(path, value)
    new = {name: _mapped(item, change, (*path, name)) for name, item in value.items()}
    if "arguments" not in path:
        return new
    return type(value)((change((*path, name, None), name), item) for name, item in new.items())


def _needed(path: tuple[Any, ...]) -> bool | None:
    """Returns whether a template must write a leaf; None if the leaf has another purpose."""
    match [name for name in path if name != "function"]:
        case ["tools", _, "name"] | ["messages", _, "tool_calls", _, "name"]:
            return True
        case ["messages", _, "content"] | ["messages", _, "content", _, "text"]:
            return True
        case ["messages", _, "tool_calls", _, "arguments", *_]:
            return True
        case ["messages", _, "role" | "content" | "tool_calls" | "tool_call_id", *_]:
            return None
        case ["tools", *_]:
            return None if path[-1] != "description" else False
    return False


def _parts(text: str, words: re.Pattern[str]) -> Iterator[tuple[int, int, int, bool]]:
    """Yields each part's index, first and last letter, and whether the end of a thought follows."""
    found = [*words.finditer(text)]
    thought = max((m.start() for m in found if _THOUGHT.search(m[0])), default=-1)
    begin = 0
    for end, following in [*(m.span() for m in found), (len(text), len(text))]:
        part = text[begin:end]
        for kind in (_LETTER, _PRINTED):
            if (first := kind.search(part)) and (last := kind.search(part[::-1])):
                yield begin, begin + first.start(), end - last.end(), end <= thought
                break
        begin = following
