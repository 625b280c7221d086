"""Renders conversations with chat templates, and finds the answers in the text.

A template is a Jinja program. It runs in a sandbox as in `transformers`, except that the date is
always `DATE`, so that examples stay the same. Some templates mark the assistant's text with `{%
generation %}`. In others, this text is found by rendering the conversation only up to an answer.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import tokenizers

from train.huggingface.marks import ASSISTANT, ConversationError, Marks
from train.huggingface.tokenizer import TokenizerError, read_entries

TEMPLATE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
DATE = datetime.datetime(2024, 7, 26)
# Other names for the assistant.
_ANSWERING = re.compile(
    r"(.*(assistant|gpt|bot|claude|llama|gemini).*|(language.?)?model|ai|llm|agent|answer|response)",
    re.IGNORECASE,
)

# Placed around the assistant's text while a template is rendered. Both are Unicode noncharacters,
# which texts do not contain.
_BEGIN, _END = "\ufdd0", "\ufdd1"

Message = Mapping[str, Any]  # "role", usually "content", and other fields that a template reads
Tools = Sequence[Any] | None


class Conversation(NamedTuple):
    text: str
    answers: list[tuple[int, int]]  # ranges of the answers in the text, ascending
    marks: Marks


class ChatTemplate:
    """A chat template. `special` maps special tokens' names to texts; `ends` lists all texts."""

    def __init__(self, text: str, special: Mapping[str, str], ends: Sequence[str], where: str):
        self.text = text
        self.where = where
        self.special = dict(special)
        self._ends = tuple(ends)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        # Jinja's own filter escapes HTML.
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = DATE.strftime
        try:
            self._template = environment.from_string(text)
            names = environment.parse(text).find_all(jinja2.nodes.Const)
        except jinja2.TemplateError as error:
            problem = f"Jinja cannot parse the chat template in {where}: {error}."
            raise TokenizerError(problem) from error
        texts = {name.value.strip() for name in names if isinstance(name.value, str)}
        words = [x for x in texts if len(x) > 2 and not x.replace(" ", "").isidentifier()]
        words.sort(key=len, reverse=True)
        self._words = re.compile("|".join(map(re.escape, words)) or "(?!)")

    def render(self, messages: Sequence[Message], *, ask: bool = False, tools: Tools = None) -> str:
        """Renders at least one message; `ask` adds the prompt for the next answer."""
        text = self._render(messages, ask, tools)
        return text.replace(_BEGIN, "").replace(_END, "")

    def conversation(
        self, messages: Sequence[Message], tools: Tools = None, skipped: Collection[int] = ()
    ) -> Conversation:
        """Renders the messages, and returns the ranges of the assistant's answers in the text.

        Messages whose index is in `skipped` are not treated as answers.
        """
        roles = [message["role"] for message in messages]
        answers = [i for i, role in enumerate(roles) if role == ASSISTANT]
        if not answers or any(map(_ANSWERING.fullmatch, {*roles} - {ASSISTANT})):
            got = ", ".join(map(repr, dict.fromkeys(roles)))
            problem = f"all answers must have the role {ASSISTANT!r}, but the roles are {got}"
            raise ConversationError(
                f"{problem}. Rename the roles to system, user, assistant and tool"
            )
        if any(x in json.dumps([messages, tools], ensure_ascii=False) for x in (_BEGIN, _END)):
            raise ConversationError("the text contains a noncharacter, U+FDD0 or U+FDD1")
        marks = Marks(self._render, messages, tools, self._words)
        for leaf in (leaf for leaf in marks.leaves if leaf.needed and not leaf.written):
            i, value = leaf.message, repr(str(leaf.value)[:100])
            place = f" of message {i + 1} (role {roles[i]!r})" if i >= 0 else ""
            raise ConversationError(
                f"the template in {self.where} skips `{leaf.field}`{place}: {value}. Rename other "
                "roles to system, user, assistant or tool, or pass another --chat-template"
            )
        if not marks.in_order():
            raise ConversationError(f"the template in {self.where} changes the order of messages")
        text, learned = marks.text, [i for i in answers if i not in skipped]
        if _BEGIN in text:
            parts = re.split(f"[{_BEGIN}{_END}]", text)  # every second part is marked
            ends = [*itertools.accumulate(map(len, parts))]
            text, spans = "".join(parts), [*zip(ends[::2], ends[1::2], strict=False)]
            if learned != answers:
                if len(spans) != len(answers):
                    problem = f"{len(spans)} `{{% generation %}}` for {len(answers)} answers"
                    raise ConversationError(
                        f"some answers do not count, but {self.where} has {problem}"
                    )
                spans = [spans[answers.index(i)] for i in learned]
            spans = [(start, stop) for start, stop in spans if start < stop]
        else:
            spans = [self._answer(marks, i, i == len(roles) - 1) for i in learned]
        return Conversation(text, spans, marks)

    def _answer(self, marks: Marks, i: int, is_last: bool) -> tuple[int, int]:
        """Returns the range of what a model writes: the answer in message `i`, and its end."""
        start, stop, text = -1, -1, marks.text
        with contextlib.suppress(ConversationError):  # the template may need more messages
            start = self._start(marks, i)
            stop = len(text) if is_last else self._stop(marks, i, start)
        if not marks.holds(i, start, stop):
            raise ConversationError(
                f"the template in {self.where} hides the answer in message {i + 1}. Pass one with "
                "`{% generation %}` and `{% endgeneration %}` around it with --chat-template"
            )
        answer = text[start:stop].rstrip()
        return start, start + len(answer) if answer.endswith(self._ends) else stop

    def _start(self, marks: Marks, i: int) -> int:
        """Returns the end of the prompt for an answer; -1 if unknown."""
        if i == 0:  # many templates need at least one message
            prompt = marks.behind(None, ask=True)[1].removeprefix(marks.behind(None)[1])
            place = marks.text.rfind(prompt, 0, marks.begin(i)) if prompt else -1
            return place + len(prompt) if place >= 0 else marks.begin(i)
        place, prompt = marks.behind(i, ask=True)
        text = marks.text[place : place + len(prompt)]
        if text == prompt:
            return place + len(prompt)
        # The prompt may start a thought, which the answer does not contain.
        start = min(place + len(os.path.commonprefix([prompt, text])), marks.begin(i))
        place, ended = marks.behind(i)
        return start if start >= place + len(ended) else -1

    def _stop(self, marks: Marks, i: int, start: int) -> int:
        """Returns the end of an answer; -1 if unknown.

        The last message may be rendered differently, such as with an end-of-text token after the
        answer's ending. So the ending is whatever both texts share after the answer.
        """
        place, ended = marks.behind(i + 1)
        text = marks.text[place : place + len(ended)]
        if text == ended:
            return place + len(ended)
        shared = os.path.commonprefix([ended, text])
        stops = [place + shared.rfind(end) + len(end) for end in self._ends if end in shared]
        # An empty answer ends where it starts.
        stops += [start + len(end) for end in self._ends if marks.text.startswith(end, start)]
        return max((stop for stop in stops if stop > start), default=-1)

    def _render(self, messages: Sequence[Message], ask: bool, tools: Any) -> str:
        try:
            options = {"tools": tools, "documents": None, "add_generation_prompt": ask}
            return self._template.render(
                **self.special, messages=[_with_reasoning(x) for x in messages], **options
            )
        # A template may fail like any other program.
        except Exception as error:
            problem = f"the template in {self.where} rejects the messages: {error}"
            raise ConversationError(problem) from error


def read_template(
    folder: Path, tokens: tokenizers.Tokenizer, file: Path | None = None
) -> ChatTemplate:
    """Returns the chat template of a model's folder, or the template in `file`."""
    config = read_entries(folder / CONFIG)
    special = {
        name: token["content"] if isinstance(token, dict) else token
        for source in (read_entries(folder / "special_tokens_map.json"), config)
        for name, token in source.items()
        if name.endswith("_token") and isinstance(token, str | dict)
    }
    ends = [t.content for t in tokens.get_added_tokens_decoder().values() if t.special]
    file = file or (folder / TEMPLATE if (folder / TEMPLATE).is_file() else None)
    if file is not None:
        return ChatTemplate(read_template_text(file), special, ends, str(file))
    for path in (folder / CONFIG, folder / "chat_template.json"):
        text = read_entries(path).get("chat_template")
        if isinstance(text, list):  # several named templates
            text = {entry.get("name"): entry.get("template") for entry in text}.get("default")
        if isinstance(text, str):
            return ChatTemplate(text, special, ends, str(path))
    problem = f"{folder} has no chat template, neither {TEMPLATE} nor `chat_template` in {CONFIG}"
    raise TokenizerError(f"{problem}. Add one, or train with --chat-template FILE.")


def read_template_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"The chat template {file} cannot be read: {error}.") from error


def _with_reasoning(message: Message) -> Message:
    """Returns a message with its thoughts under all names, as in transformers 5.24."""
    for name in ("reasoning_content", "thinking", "reasoning"):
        if message.get(name) is not None:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


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
