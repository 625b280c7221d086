"""Parts of conversations that chat templates skip: rejected, or listed with their number."""

import json
from pathlib import Path

import pytest

from train.huggingface.chat_template import ChatTemplate, ConversationError
from train.huggingface.template_checks import TemplateChecks

FIXTURES = Path(__file__).parents[1] / "fixtures" / "chat"

TWO_ROLES = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
ALL = "{% for m in messages %}{{ m.content }}{% endfor %}"
BOTH = ALL.replace("{% endfor", "{{ m.tool_calls | default([]) | tojson }}{% endfor")
CALLS = ALL.replace("{% endfor", "{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor")
NAMES = CALLS.replace("CALL", "{{ c.name }}")
FIRST = BOTH.replace("default([])", "default([]) | first | default('')")
EITHER = "{% for m in messages %}{{ (m.tool_calls or m.content) | tojson }}{% endfor %}"

CALL = {"name": "a", "arguments": {"in": "a"}}


def said(role, **answer):
    """A message with a role, and an answer, with the same texts."""
    return [{"role": role, "content": "a"}, {"role": "assistant", "content": "a"} | answer]


def of(text):
    return TemplateChecks(ChatTemplate(text, {}, (), "here"))


def test_templates_that_write_everything_are_accepted():
    expected = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))
    del expected["transformers"]
    for name, cases in expected.items():
        unwritten = of((FIXTURES / f"{name}.jinja").read_text())
        for case in cases.values():
            unwritten.check(case["messages"], case.get("tools"))
        assert unwritten.notes() == []
    # Some require ids of nine letters and digits, and arguments as they are or one by one.
    wants_ids = "{% if c.id | length != 9 %}{{ raise_exception('No.') }}{% endif %}"
    for arguments in ("{{ c.function.arguments }}", "{{ c.function.arguments.items() | list }}"):
        text = CALLS.replace("CALL", wants_ids + "{{ c.function.name }}" + arguments)
        calls = [{"id": "abc123def", "type": "function", "function": CALL}]
        unwritten = of(text)
        unwritten.check(said("user", tool_calls=calls))
        assert unwritten.notes() == []


@pytest.mark.parametrize(
    ("template", "messages", "tools", "match"),
    [
        (TWO_ROLES, said("human"), None, r"skips .* 1 \(role 'human'\)\. .* 'human' to 'user'"),
        (TWO_ROLES, said("User"), None, r"`content` of message 1 .* 'User' to 'user'"),
        (TWO_ROLES, said("developer"), None, "'developer' to 'system'"),
        (TWO_ROLES, said("critic"), None, r"message 1 \(role 'critic'\)\. .* --chat-template, or"),
        (ALL, said("user", tool_calls=[CALL]), None, "skips `tool_calls` of message 2"),
        (ALL, said("user", tool_calls=[{"function": CALL}]), None, "`tool_calls` of message 2"),
        (NAMES, said("user", tool_calls=[CALL]), None, "skips `arguments` of message 2"),
        (FIRST, said("user", tool_calls=[CALL, CALL]), None, "skips `tool_calls` of message 2"),
        (EITHER, said("user", tool_calls=[CALL]), None, "skips `content` of message 2"),
        (ALL, said("user"), [{"function": {"name": "a"}}], "skips `tools`"),
    ],
)
def test_a_skipped_part_is_rejected(template, messages, tools, match):
    with pytest.raises(ConversationError, match=match):
        of(template).check(messages, tools)


def test_other_skipped_parts_are_listed_with_their_number(monkeypatch):
    unwritten = of(ALL)
    render, rendered = unwritten._template.render, []

    def counted(messages, **options):
        rendered.append(messages)
        return render(messages, **options)

    monkeypatch.setattr(unwritten._template, "render", counted)
    for text in "abc":
        unwritten.check(said("human", thinking=text, calls=[], prefix=True, tool_call_id=text))
    assert len(rendered) == 1  # all three have one form
    fields, roles = unwritten.notes()
    assert fields == "here: fields of messages that it does not write: 'thinking' 3"
    assert roles.endswith("which zenflow-generate does not use: 'human' 3")
    picky = of("{{ raise_exception('No.') if messages[0].content != 'a' }}a")
    picky.check(said("user"))
    assert "no check shows skipped parts: 'the template in" in picky.notes()[0]
