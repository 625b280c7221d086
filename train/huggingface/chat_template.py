"""Renders conversations with chat templates, and finds the answers in the text.

A template is a Jinja program. It runs in a sandbox as in `transformers`, except that the date is
always `DATE`, so that examples stay the same. Some templates mark the assistant's text with `{%
generation %}`. In others, this text is found by rendering the conversation only up to an answer.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import tokenizers

from train.huggingface.json_files import read_object
from train.huggingface.tokenizer import TokenizerError

TEMPLATE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"

DATE = datetime.datetime(2024, 7, 26)

ASSISTANT = "assistant"

# Placed around the assistant's text while a template is rendered. Both are Unicode noncharacters,
# which texts do not contain.
_BEGIN, _END = "\ufdd0", "\ufdd1"
# Replaces an answer to find its position, because the answer's text may also occur elsewhere.
_PLACE = "\ufdd2"

Message = Mapping[str, Any]  # "role", usually "content", and other fields that a template reads


class ConversationError(ValueError):
    """A template cannot render a conversation. The caller adds the conversation's location."""


class Conversation(NamedTuple):
    text: str
    answers: list[tuple[int, int]]  # ranges of the answers in the text, ascending


class ChatTemplate:
    """A chat template. `special` maps special tokens' names to texts; `marks` lists all texts."""

    def __init__(self, text: str, special: Mapping[str, str], marks: Sequence[str], where: str):
        self.text = text
        self.where = where
        self.special = dict(special)
        self._marks = tuple(marks)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        # Jinja's own filter escapes HTML.
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = DATE.strftime
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise TokenizerError(
                f"Jinja cannot parse the chat template in {where}: {error}."
            ) from error

    def render(
        self, messages: Sequence[Message], *, ask: bool = False, tools: Sequence[Any] | None = None
    ) -> str:
        """Renders at least one message; `ask` adds the prompt for the next answer."""
        marked = self._render(messages, ask, tools)
        return marked.replace(_BEGIN, "").replace(_END, "")

    def conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        skipped: Collection[int] = (),
    ) -> Conversation:
        """Renders the messages, and returns the ranges of the assistant's answers in the text.

        Messages whose index is in `skipped` are not treated as answers.
        """
        roles = [message["role"] for message in messages]
        if ASSISTANT not in roles:
            got = ", ".join(map(repr, dict.fromkeys(roles)))
            raise ConversationError(
                f"no message has the role {ASSISTANT!r}, only {got}. Rename the roles to system, "
                "user, assistant and tool"
            )
        text = json.dumps([messages, tools], ensure_ascii=False, default=str)
        if any(x in text for x in (_BEGIN, _END, _PLACE)):
            raise ConversationError("the text contains a noncharacter from U+FDD0 to U+FDD2")
        whole = self._render(messages, False, tools)
        _check_written(whole, messages, tools or (), self.where)
        assistant_turns = [i for i, role in enumerate(roles) if role == ASSISTANT]
        learned = [i for i in assistant_turns if i not in skipped]
        if _BEGIN in whole:
            parts = re.split(f"[{_BEGIN}{_END}]", whole)  # every second part is marked
            ends = [*itertools.accumulate(map(len, parts))]
            text, spans = "".join(parts), [*zip(ends[::2], ends[1::2], strict=False)]
            if learned != assistant_turns:
                if len(spans) != len(assistant_turns):
                    raise ConversationError(
                        f"some answers are excluded from training, but {self.where} has "
                        f"{len(spans)} `{{% generation %}}` for {len(assistant_turns)} answers"
                    )
                spans = [spans[assistant_turns.index(i)] for i in learned]
            return Conversation(text, [(start, stop) for start, stop in spans if start < stop])
        answers = [self._answer(whole, messages, i, tools) for i in learned]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(answers)), answers
        return Conversation(whole, answers)

    def _answer(self, whole, messages, i, tools) -> tuple[int, int]:
        content = str(messages[i].get("content") or "")
        # Templates of reasoning models drop the thoughts from all answers but the last.
        content = content.rpartition("</think>")[2].strip()
        placed = [*messages[:i], {**messages[i], "content": _PLACE}, *messages[i + 1 :]]

        def rendered(count: int, ask: bool = False) -> str:
            return self._render(messages[:count], ask, tools)

        def with_place(count: int) -> str:
            return self._render(placed[:count], False, tools)

        start = _start(whole, rendered, with_place, i, len(messages))
        stop = len(whole)
        if start is not None and i < len(messages) - 1:
            ended = rendered(i + 1)
            stop = len(ended) if whole.startswith(ended) else None
            if stop is None:
                stop = self._stop(whole, with_place(i + 1), with_place(len(messages)))
        if start is None or stop is None or content not in whole[start:stop]:
            raise ConversationError(
                f"the template in {self.where} hides the answer in message {i + 1}. Put "
                "`{% generation %}` and `{% endgeneration %}` around the assistant's text, and "
                "pass the template with --chat-template"
            )
        answer = whole[start:stop].rstrip()
        return start, start + len(answer) if answer.endswith(self._marks) else stop

    def _stop(self, whole: str, ended: str, placed: str) -> int | None:
        """Returns the end of an answer, found with a placeholder in its place.

        The last message may be rendered differently: with a thought before it, or with an
        end-of-text token after the answer's ending. So the ending is whatever both texts share
        after the answer.
        """
        behind, rest = (text.rpartition(_PLACE)[2] for text in (ended, placed))
        if _PLACE not in ended or _PLACE not in placed or not whole.endswith(rest):
            return None
        shared = os.path.commonprefix([behind, rest])
        marks = [shared.rfind(mark) + len(mark) for mark in self._marks if mark in shared]
        return len(whole) - len(rest) + max(marks) if marks else None

    def _render(self, messages: Sequence[Message], ask: bool, tools: Any) -> str:
        try:
            options = {"tools": tools, "documents": None, "add_generation_prompt": ask}
            return self._template.render(**self.special, messages=list(messages), **options)
        # A template may fail like any other program.
        except Exception as error:
            raise ConversationError(
                f"the template in {self.where} rejects the messages: {error}"
            ) from error


def read_template(
    folder: Path, tokens: tokenizers.Tokenizer, file: Path | None = None
) -> ChatTemplate:
    """Returns the chat template of a model's folder, or the template in `file`."""
    config = _read_json(folder / CONFIG)
    special = {
        name: token["content"] if isinstance(token, dict) else token
        for source in (_read_json(folder / "special_tokens_map.json"), config)
        for name, token in source.items()
        if name.endswith("_token") and isinstance(token, str | dict)
    }
    marks = [t.content for t in tokens.get_added_tokens_decoder().values() if t.special]
    file = file or (folder / TEMPLATE if (folder / TEMPLATE).is_file() else None)
    if file is not None:
        return ChatTemplate(read_template_text(file), special, marks, str(file))
    for path in (folder / CONFIG, folder / "chat_template.json"):
        text = _read_json(path).get("chat_template")
        if isinstance(text, list):  # several named templates
            text = {entry.get("name"): entry.get("template") for entry in text}.get("default")
        if isinstance(text, str):
            return ChatTemplate(text, special, marks, str(path))
    raise TokenizerError(
        f"{folder} has no chat template, neither {TEMPLATE} nor `chat_template` in "
        f"{CONFIG}. Add one as {TEMPLATE}, or train with --chat-template FILE."
    )


def read_template_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"The chat template {file} cannot be read: {error}.") from error


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path, TokenizerError) if path.is_file() else {}


def _check_written(
    whole: str, messages: Sequence[Message], tools: Sequence[Any], where: str
) -> None:
    """Raises an error if the text lacks a tool, a call, or a user or system message's text."""
    remedy = "Pass another template with --chat-template, or leave this part out"
    if not all(name in whole for name in _functions(tools)):
        raise ConversationError(f"the template in {where} skips `tools`. {remedy}")
    for number, message in enumerate(messages, 1):
        role, calls = message["role"], _functions(message.get("tool_calls") or ())
        # Answers are located later, and templates may encode a tool's result.
        text = "" if role in (ASSISTANT, "tool") else str(message.get("content") or "").strip()
        lost = [] if text in whole else ["content"]
        lost += ["tool_calls" for name in calls if name not in whole]
        if lost:
            raise ConversationError(
                f"the template in {where} skips `{lost[0]}` of message {number} (role {role!r}). "
                f"Rename the role if it is not system, user, assistant or tool. {remedy}"
            )


def _functions(items: Sequence[Any]) -> list[str]:
    """Returns the names of the functions in tools or calls."""
    return [str(item.get("function", item).get("name", "")) for item in items]


def _start(
    whole: str,
    rendered: Callable[..., str],
    with_place: Callable[[int], str],
    i: int,
    messages: int,
) -> int | None:
    """Returns the start of the answer in message `i`."""
    if i == 0:  # many templates need at least one message
        placed = with_place(messages)
        return len(os.path.commonprefix([placed, whole])) if _PLACE in placed else None
    prompt = rendered(i, ask=True)
    if whole.startswith(prompt):
        return len(prompt)
    # The prompt may start a thought, which the answer does not contain.
    before = rendered(i)
    shared = len(os.path.commonprefix([prompt, whole]))
    if not whole.startswith(before) or shared < len(before):
        return None
    # The answer may begin with the same characters as the thought.
    return min(shared, len(os.path.commonprefix([with_place(messages), whole])))


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: marks the assistant's text."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
