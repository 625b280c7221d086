"""Conversations: rendered templates, trained parts, and rejected conversations.

`fixtures/chat/` has templates and the results of `transformers`, from `make_fixtures.py`.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.hf_models import write_model
from tests.tiny_tokenizer import BEGIN, END, TURN, TURN_END, write_byte_level
from tests.train.scripts import read, records, write_config
from train import finetune, generate
from train.cli.settings import SettingsError
from train.huggingface.chat_template import ChatTemplate, ConversationError, read_template
from train.huggingface.tokenizer import TokenizerError, read_tokenizer
from train.tasks import answers
from train.tasks.conversations import Conversations

FIXTURES = Path(__file__).parents[1] / "fixtures" / "chat"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))
CASES = [(t, name) for t, cases in EXPECTED.items() if t != "transformers" for name in cases]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    write_byte_level(folder, also=[TURN, TURN_END])
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return read_tokenizer(folder, vocabulary=1000)


@pytest.fixture
def written(tmp_path, folder, tokenizer):
    """Returns a function that makes a template from a text."""

    def read(text):
        path = tmp_path / "written.jinja"
        path.write_text(text)
        return read_template(folder, tokenizer.tokens, path)

    return read


def write(path, *conversations):
    """Writes a file with one conversation per line."""
    path.write_text(records(*({"messages": messages} for messages in conversations)))
    return path


def talk(*turns):
    return [
        {"role": r, "content": c} for r, c in zip(["user", "assistant"] * 9, turns, strict=False)
    ]


@pytest.mark.parametrize(("name", "case"), CASES, ids=str)
def test_texts_and_tokens_equal_those_of_transformers(tokenizer, written, name, case):
    expected, chat_template = EXPECTED[name][case], written(TEXTS[name])
    conversation = chat_template.conversation(expected["messages"], expected.get("tools"))
    assert conversation.text == expected["text"]
    prompt = chat_template.render(expected["messages"][:-1], ask=True, tools=expected.get("tools"))
    assert prompt == expected["prompt"]
    [encoded] = answers.encode_conversations(tokenizer, iter([conversation]))
    assert encoded.tokens.tolist() == expected["tokens"]
    if expected["answers"] is not None:
        assert encoded.marks.tolist() == expected["answers"]


def test_a_template_that_hides_answers_is_rejected_with_a_remedy(written):
    for text in (
        "{% for m in messages %}{{ m.content | upper }}{{ messages | length }}{% endfor %}",
        # Answers with different ends, which cannot be recognized in the middle.
        "{% for m in messages %}{{ m.content }}{{ '<|end|>' if loop.last else '<|turn_end|>' }}"
        "{% endfor %}",
    ):
        with pytest.raises(ConversationError, match=r"the answer in message 2.*endgeneration"):
            written(text).conversation(talk("A", "A", "A", "A", "A", "A"))


def answers_of(conversation):
    return [conversation.text[start:stop] for start, stop in conversation.answers]


def written_as(text, roles="true"):
    """Returns a template that writes a text in each turn of some roles."""
    turn = "<|turn|>{{ m.role }}\n" + text + "<|turn_end|>\n"
    turns = "{% for m in messages %}{% if " + roles + " %}" + turn + "{% endif %}{% endfor %}"
    return turns + "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"


TEXTS = {path.stem: path.read_text() for path in FIXTURES.glob("*.jinja")}
# Like models that always think: the prompt ends with the start of the thought.
THINK = "{% if add_generation_prompt %}<think>{% endif %}"
TAGGED = written_as("{{ m.content }}{% for c in m.tool_calls %}<tool>{{ c.name }}{% endfor %}")
FIND = {"name": "find", "arguments": {}}
CALL = {"role": "assistant", "content": "", "tool_calls": [FIND]}
SEVERAL = EXPECTED["alternating"]["several"]["messages"]
THOUGHTS, CAT = EXPECTED["thinking"]["thoughts"]["messages"], "The cat."


@pytest.mark.parametrize(
    ("text", "messages", "expected"),
    [
        (TEXTS["alternating"], SEVERAL, [f" {x} " for x in (CAT, f"On the mat.\n\n{CAT}", CAT)]),
        (TEXTS["thinking"], THOUGHTS, [CAT, "<think>\nIt is.\n</think>\n\nSure."]),
        # An empty answer ends where the template writes its end.
        (TEXTS["thinking"], talk("A", "", "B", "C"), ["", "<think>\n\n</think>\n\nC"]),
        # The prompt's thought is not in the answers, even if they begin like it.
        *(
            (TEXTS["turns"] + THINK, talk("Who?", *both), both[::2])
            for both in (("The cat.", "Where?", "<th>."), ("a", "Is?", "a"), ("assistant", "", "<"))
        ),
        (TAGGED + THINK, [*talk("Who?"), CALL, *talk("Who?", "It.")], ["<tool>find", "It."]),
        # The first message counts in its place, and not where its text recurs.
        *(
            (TEXTS["turns"], [*talk("", x)[1:], *talk("kind.", x, "assistant", "Be")], [x, x, "Be"])
            for x in ("kind.", "", "assistant", "Be")
        ),
    ],
)
def test_only_answers_and_their_ends_are_trained_on(written, text, messages, expected):
    end = END if text == TEXTS["alternating"] else TURN_END
    conversation = written(text).conversation(messages)
    assert answers_of(conversation) == [x + end for x in expected]


def test_an_answers_end_does_not_depend_on_how_the_last_message_is_written(written):
    # With an end of text after only the last message, which does not end an answer.
    chat_template = written(
        "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|turn_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% else %}{{ eos_token }}{% endif %}"
    )
    for answer in ("A", "", "end", "|", "assistant"):
        conversation = chat_template.conversation(talk("A", answer, "A", answer, "A", answer))
        assert answers_of(conversation) == [answer + TURN_END] * 2 + [f"{answer}{TURN_END}\n{END}"]
        turns = [conversation.text[:start].count(TURN) for start, _ in conversation.answers]
        assert turns == [2, 4, 6]


@pytest.mark.parametrize("name", ["turns", "marked"])
def test_an_answer_with_weight_zero_is_not_trained_on(tmp_path, written, name):
    turns = talk("Who?", "A dog.", "Sure?", "The cat.", "Really?", "Yes.")
    turns[1]["weight"], turns[3]["Loss-Weight"], turns[2]["train"] = 0, 1.0, False
    path = write(tmp_path / "a.jsonl", turns)
    [conversation] = Conversations(written(TEXTS[name])).read(path)
    assert answers_of(conversation) == [f"The cat.{TURN_END}", f"Yes.{TURN_END}"]
    assert "A dog." in conversation.text


def test_a_folders_template_can_be_in_one_of_several_files(tmp_path, tokenizer):
    write_byte_level(tmp_path, also=[TURN, TURN_END])
    named = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "of a list"}]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    with pytest.raises(TokenizerError, match=r"neither chat_template\.jinja nor.*--chat-template"):
        read_template(tmp_path, tokenizer.tokens)
    # Later entries override earlier ones.
    for name, content, text in (
        ("chat_template.json", {"chat_template": "of JSON"}, "of JSON"),
        ("tokenizer_config.json", config | {"chat_template": named}, "of a list"),
        ("chat_template.jinja", "of the file", '"of the file"'),
    ):
        (tmp_path / name).write_text(json.dumps(content))
        assert read_template(tmp_path, tokenizer.tokens).render(talk("a")) == text


def test_a_template_can_access_neither_the_system_nor_the_date(written):
    assert written("{{ strftime_now('%d %b %Y') }}").render(talk("a")) == "26 Jul 2024"
    for text in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set x = messages.append(1) %}",
        "{{ raise_exception('No.') }}",
        "{{ messages[3].content + 'a' }}",
    ):
        with pytest.raises(ConversationError, match="the template in .* rejects the messages"):
            written(text).render(talk("a"))


@pytest.mark.slow
@pytest.mark.usefixtures("as_scripts_run", "no_picture")
def test_a_run_keeps_the_template_with_the_model_and_prompts_use_it(tmp_path, capsys):
    folder = write_model(tmp_path / "origin", "llama2")
    turns = [talk("Who[/b]?", "The cat."), talk("Where[/b]?", "Here.")]
    data = write(tmp_path / "a.jsonl", *turns * 8)
    settings = {"task": "chat", "model": str(folder), "data": str(data), "sequence_length": 120}
    template_file = shutil.copyfile(FIXTURES / "alternating.jinja", tmp_path / "template.jinja")
    settings["chat_template"] = str(template_file)
    with pytest.raises(SettingsError, match="`chat_template`: .* alpaca does not read it"):
        read(**settings | {"task": "alpaca"})
    sizes = {"steps": 2, "batch_size": 2, "length_buckets": 1, "dtype": "float32"}
    config = write_config(tmp_path, optimizer="adamw", **sizes, **settings)
    assert finetune.main([config, "--run", "a"]) == 0
    # Before the first step, and in rich's brackets.
    shown = capsys.readouterr().out.partition("compiling")[0]
    assert "examples: median" in shown
    assert "[/b]" in shown
    run, text = tmp_path / "runs" / "a", template_file.read_text()
    template_file.unlink()
    assert finetune.main([str(run / "settings.toml"), "--run", "a"]) == 0
    assert "has completed all 2 steps" in capsys.readouterr().out

    model = run / "model"
    assert (model / "chat_template.jinja").read_text() == text
    tokenizer = read_tokenizer(model, vocabulary=1000)
    prompt = generate.read_prompt(generate.Options(prompt="Who?", model=str(model)), tokenizer)
    shown = tokenizer.tokens.decode(prompt.tokens, skip_special_tokens=False)
    assert shown == f"{BEGIN}[ Who? ]"
    assert "as in training (chat)" in prompt.description
    assert prompt.ends == {2, tokenizer.end}  # 2 according to config.json alone


def test_a_prompt_follows_the_template_with_a_system_message(tmp_path, tokenizer):
    write_byte_level(tmp_path, also=[TURN, TURN_END])
    shutil.copyfile(FIXTURES / "turns.jinja", tmp_path / "chat_template.jinja")
    options = generate.Options(prompt="Who?", model=str(tmp_path), format="chat", system="Say no.")
    prompt = generate.read_prompt(options, tokenizer)
    text = tokenizer.tokens.decode(prompt.tokens, skip_special_tokens=False)
    assert "Say no." in text
    assert text.endswith(f"{TURN}user\nWho?{TURN_END}\n{TURN}assistant\n")


CALLS = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.name }} CALL{% endfor %}"
PAIRS = "{% for k, v in c.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
ARGUMENTS = CALLS.replace("CALL", PAIRS)
LOOK = {"name": "look", "arguments": {"in": "it", "deep": {"er": ["a", 3]}, "n": 2}}


def called(*calls):
    """Returns a conversation in which texts recur, with calls and a result."""
    answer = {"role": "assistant", "content": "it", "tool_calls": [*calls]}
    return [*talk("look in it"), answer, {"role": "tool", "content": "it"}, *talk("it", "it")]


SYSTEM = [{"role": "system", "content": "it"}, *talk("it", "it")]
SKIPPED = {
    "a system message": ("{{ m.content }}", "m.role != 'system'", SYSTEM, "`content` of message 1"),
    "calls": ("{{ m.content }}", "m.role != 'tool'", called(LOOK), "`tool_calls`"),
    "a result": (ARGUMENTS, "m.role != 'tool'", called(LOOK), "`content` of message 3"),
    "arguments": (CALLS, "true", called(LOOK), "message 2 .*: 'it'"),
    "a number": (ARGUMENTS.replace("{{ v", "{{ v if v is string"), "true", called(LOOK), "2"),
    "a part": ("{{ m.content[:5] }}", "true", talk("A question", "Yes"), "message 1 .*'A que"),
}


@pytest.mark.parametrize(("text", "roles", "messages", "match"), SKIPPED.values(), ids=SKIPPED)
def test_a_template_that_skips_a_part_is_rejected(text, roles, messages, match):
    with pytest.raises(ConversationError, match=match):
        ChatTemplate(written_as(text, roles), {}, (), "here").conversation(messages)


@pytest.mark.parametrize("text", [CALLS, CALLS.replace("CALL", "{{ c.arguments }}")])
def test_arguments_that_are_json_text_are_written_as_json(tmp_path, written, text):
    for arguments in ('{"in":  ["it\'s"], "n": true, "none": null}', "{}", ""):
        path = write(tmp_path / "a.jsonl", called(LOOK | {"arguments": arguments}))
        template = written_as(text.replace("CALL", "{{ c.arguments | tojson }}"))
        [conversation] = Conversations(written(template)).read(path)
        shown = answers_of(conversation)[0].removeprefix("itlook ").removesuffix(TURN_END)
        assert json.loads(shown) == json.loads(arguments or "{}")
