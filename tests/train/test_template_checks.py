"""Parts of conversations that chat templates skip are rejected."""

import pytest

from train.huggingface.chat_template import ChatTemplate, ConversationError

TWO_ROLES = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
ALL = "{% for m in messages %}{{ m.content }}{% endfor %}"
BOTH = ALL.replace("{% endfor", "{{ m.tool_calls | default([]) | tojson }}{% endfor")
FIRST = BOTH.replace("default([])", "default([]) | first | default('')")

LOOK, FIND = {"name": "look", "arguments": {"in": "a"}}, {"function": {"name": "find"}}


def said(role, **answer):
    """Returns a message with a role, and an answer."""
    return [{"role": role, "content": "Who?"}, {"role": "assistant", "content": "I."} | answer]


@pytest.mark.parametrize(
    ("template", "messages", "tools", "match"),
    [
        (TWO_ROLES, said("human"), None, r"skips `content` of message 1 \(role 'human'\)\. Rename"),
        (ALL, said("user", tool_calls=[LOOK]), None, "skips `tool_calls` of message 2"),
        (FIRST, said("user", tool_calls=[LOOK, FIND]), None, "skips `tool_calls` of message 2"),
        (ALL, said("user"), [FIND], "skips `tools`"),
    ],
)
def test_a_skipped_part_is_rejected(template, messages, tools, match):
    with pytest.raises(ConversationError, match=match):
        ChatTemplate(template, {}, (), "here").conversation(messages, tools)


def test_a_template_that_writes_everything_is_accepted():
    template = ChatTemplate("{{ tools | tojson }}" + BOTH, {}, (), "here")
    text = template.conversation(said("critic", tool_calls=[LOOK, FIND]), [FIND]).text
    assert "look" in text
