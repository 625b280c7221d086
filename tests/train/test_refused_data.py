"""Files that no task understands: each is named, with its line and mostly what to do."""

import json
from pathlib import Path

import pytest

from tests.train.scripts import records, write
from train.huggingface.chat_template import read_template
from train.tasks import answers, classification, fields, glue, language
from train.tasks.batches import DataError

DOCS = (Path(__file__).parents[2] / "docs" / "finetuning.md").read_text(encoding="utf-8")
TEMPLATE = Path(__file__).parents[1] / "fixtures" / "chat" / "alternating.jinja"


def chats(line):
    """A conversation, and then a line."""
    return records({"messages": [USER, TOLD]}, line)


def told(**rest):
    """A conversation with other fields beside its messages."""
    return chats({"messages": [USER, TOLD]} | rest)


def answer(**rest):
    """A conversation with other fields in its answer."""
    return chats({"messages": [USER, TOLD | rest]})


PLAIN = {"instruction": "Say {this}.", "output": "this"}
USER, TOLD = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
FROM = {"from": "human", "value": "a"}
DOLLY = {"instruction": "Say a.", "context": "a", "response": "a", "category": "b"}
GOOD = "text,label\na fine film,kind\nso bad,unkind\n"
MANY = "text,label\n" + "".join(f"a,b{i}\n" for i in range(30))
SST2 = "sentence\tlabel\n"

FILES = {
    "language": [
        ("a.txt", "", r"a\.txt: expected text, found an empty file"),
        ("a.txt", b"the\n\xe9\n", r"a\.txt, line 2: expected UTF-8, got 0xe9"),
        ("a.txt", "a", r"part for train of .*, got 1 tokens.*`validation_share`"),
        ("a.txt", "one\ntw\0o\n", r"a\.txt, line 2: expected UTF-8 text, got NUL"),
        ("a.jsonl", '{"text": "a"}\n{text: 1}\n', r"a\.jsonl, line 2, column 2: expected JSON"),
        ("a.jsonl", '\n{"content": "a"}\n', r"a\.jsonl, line 2: expected a field 'text', found 'c"),
        ("a.jsonl", '{"text": 3}\n', r"a\.jsonl, line 1: expected a text in the field .* got 3"),
        (
            "a.jsonl",
            '{"text": "a", "weight": 0}',
            r"line 1: expected 1 in the field 'weight', got 0",
        ),
        ("a.jsonl", '["a"]\n', r"a\.jsonl, line 1: expected an object"),
        ("a.csv", "a,b", r"expected a file \*\.txt or \*\.jsonl or .* found the file .*a\.csv"),
        ("dev.txt", "a", r"expected files train\*\.txt beside dev\.txt"),
        ("train-test.txt", "a", r"cannot tell whether train-test\.txt is to train on"),
        ("parts/a.txt", "a", r"itself, found parts. Pass --data .*parts"),
    ],
    "alpaca": [
        ("a.json", '[\n{"instruction": "a",}]', r"a\.json, line 2: expected JSON"),
        ("a.json", json.dumps([PLAIN, {"output": "b"}]), "item 2: expected a field 'instruction'"),
        ("a.jsonl", records(PLAIN), "at least two examples .* got 1"),
        (
            "a.jsonl",
            records(DOLLY),
            r"'output', .* to `output` and `context` to `input`\.",
        ),
        (
            "a.jsonl",
            records(PLAIN | {"context": "b"}),
            r"'input', .* `context` to `input`\.",
        ),
        (
            "a.jsonl",
            records(PLAIN | {"history": [["a", "b"]]}),
            r"'history', .* use --task chat",
        ),
        ("a.jsonl", records(PLAIN | {"weight": 0}), "expected 1 in the field 'weight', got 0"),
        ("a.jsonl", records(PLAIN | {"images": ["a.jpg"]}), r"no field 'images'.* only text"),
        ("a.jsonl", told(), r"expected a field 'instruction', .* use --task chat"),
    ],
    "chat": [
        ("a.jsonl", chats({"messages": []}), r"line 2: expected a list of messages .* got \[\]"),
        ("a.jsonl", chats({"messages": ["hi"]}), r"line 2, message 1: expected \{.*\}, got 'hi'"),
        ("a.jsonl", chats({"messages": [{"role": "user"}]}), r"expected a field 'content'"),
        ("a.jsonl", chats({"messages": [USER]}), r"the role 'assistant'.*only those of 'user'"),
        ("a.jsonl", chats({"prompt": "a"}), r"'messages', found 'prompt'. Write \[{\"role\""),
        ("a.jsonl", chats({"conversations": []}), r"field 'messages', found .*`from` to `role`"),
        ("a.jsonl", chats({"text": "a"}), r"use --task language"),
        ("a.jsonl", chats({"messages": [USER, TOLD], "tools": "[]"}), "list in the field 'tools'"),
        ("a.jsonl", chats({"messages": [TOLD, USER]}), r"line 2: .* got: Roles must alternate"),
        (
            "a.jsonl",
            told(label=False),
            r"line 2: expected no field 'label', .*training on preferences",
        ),
        (
            "a.jsonl",
            told(chosen="b", rejected="c"),
            r"no field 'chosen', .*training on preferences",
        ),
        (
            "a.jsonl",
            chats({"chosen": "a", "rejected": "b"}),
            r"'chosen', .*training on preferences",
        ),
        ("a.jsonl", told(videos=["a.mp4"]), r"no field 'videos', .* only text"),
        ("a.jsonl", told(system="a"), r"no field 'system', .* message of the role 'system'"),
        ("a.jsonl", told(train=False), r"expected 1 in the field 'train', got False"),
        (
            "a.jsonl",
            answer(weight=0.5),
            r"message 2: expected 0 or 1 in .* got 0.5",
        ),
        (
            "a.jsonl",
            answer(train_detail=[]) + answer(train_detail=[1]),
            r"line 4, .*'train_detail'",
        ),
        ("a.jsonl", answer(function_call={"name": "a"}), r"'function_call', .* into `tool_calls`"),
        ("a.jsonl", answer(tool_calls=["a"]), r"message 2: expected a list in the field 'tool_cal"),
        ("a.jsonl", answer(tool_calls=[{"name": "a", "arguments": "{"}]), r"JSON in the arguments"),
        ("a.jsonl", answer(tool_calls=[{"name": "a"}]), r"writes `tool_calls` of message 2"),
        ("a.jsonl", told(tools=[{"name": "a"}]), r"expected a template that writes `tools`"),
        ("a.jsonl", chats({"messages": [USER | {"train": True}, TOLD]}), r"0 in the field 'train'"),
        (
            "a.jsonl",
            chats({"messages": [FROM]}),
            r"'role', .* Rename `from` to `role` and",
        ),
        ("a.jsonl", chats({"messages": [USER | {"role": "gpt"}]}), r"role 'gpt' to 'assistant'\."),
        ("a.jsonl", chats(DOLLY), r"`response` to `output` and .*, and use --task alpaca"),
        ("a.jsonl", chats(PLAIN), r"\. Use --task alpaca"),
        ("a.jsonl", chats({"message_id": "a", "parent_id": None, "text": "b"}), r"a tree of mess"),
        ("a.jsonl", chats({"message_tree_id": "a", "prompt": {}}), r"a tree of messages \(OASST\)"),
    ],
    "classification": [
        ("a.csv", "", r"line 1: expected a header with one column 'text', got an empty file"),
        ("a.csv", "text,lable\na,b\n", r"'label', got .* Name it with --label-column"),
        ("a.csv", "text,text,label\na,b,c\n", r"got 'text', 'text'.* Rename all but one"),
        ("a.csv", GOOD + "good, but long,kind\n", r"line 4: expected 2 columns.*got 3.*quotation"),
        ("a.csv", GOOD + '"good,kind\nbad,so\n', r"line 4: expected CSV, got a row that ends in"),
        ("a.csv", GOOD + "good,\n", r"line 4: expected a label in column 'label', found none"),
        ("a.csv", "text,label\na,b\nc,b\n", r"at least two classes .* got 1 in 2 rows: 'b'"),
        ("a.csv", MANY, r"got 30 in 30 rows: 'b0', 'b1', 'b10'. Name the column"),
        ("a.tsv", "text\tlabel\na\tb\tc\n", r"line 2: expected 2 columns, .* got 3.*as CSV"),
        ("a.jsonl", '{"text": "a", "label": 0.5}\n', r"line 1: expected the label of a .*0.5"),
        ("a.jsonl", '{"review": "a"}\n', r"expected a field 'text', .* Name it with --text-column"),
    ],
    "sst2": [
        ("train.tsv", "sentence\tmark\na\t1\n", r"line 1: .* got 'sentence\\tmark' without label"),
        ("train.tsv", SST2 + "a\t1\na film\n", "line 3: expected 2 columns .* got 1"),
        ("train.tsv", SST2 + " \t1\n", "line 2: expected text in column 'sentence'"),
        ("train.tsv", SST2 + "a\t2\n", "line 2: expected a label of 0, 1 .* got '2'"),
        ("train.tsv", SST2, r"train\.tsv: expected examples, found none"),
        ("a.tsv", "", r"expected the files of sst2 in .*: train\.tsv, dev\.tsv, got others"),
    ],
}


@pytest.mark.parametrize(
    ("task", "file", "content", "match"), [(task, *x) for task in FILES for x in FILES[task]]
)
def test_a_file_that_no_task_understands_is_named(
    tmp_path, bert, decoder, task, file, content, match
):
    path = write(tmp_path / file, content)
    if file == "train.tsv":
        write(tmp_path / "dev.tsv", content)
    data = path if file[0] == "a" and task != "sst2" else tmp_path
    options = {"sequence_length": 512 if task == "alpaca" else 4}
    shared = options | {"validation_share": 0.5, "seed": 0}
    template = read_template(tmp_path, decoder.tokens, TEMPLATE)
    columns = classification.Columns("text", "label")
    make = {
        "language": lambda: language.make(data, decoder, **shared),
        "alpaca": lambda: answers.make_alpaca(data, decoder, **shared),
        "chat": lambda: answers.make_chat(data, decoder, template, **shared),
        "classification": lambda: classification.make(data, bert, columns, **shared),
        "sst2": lambda: glue.make("sst2", data, bert, **options),
    }[task]
    with pytest.raises(DataError, match=match):
        make()


@pytest.mark.parametrize("task", ["language", "alpaca", "chat"])
def test_fields_that_nothing_reads_are_listed_once_with_their_number(tmp_path, decoder, task):
    system = {"role": "system", "content": "c"}
    messages = [system, USER, TOLD | {"mood": "good"}]
    record = {"text": "a cat is in the bin", "messages": messages} | PLAIN
    kept = {"language": ["text"], "alpaca": [*PLAIN], "chat": ["messages"]}[task]
    record = {name: record[name] for name in kept}
    rest = ({"id": 1, "images": [], "label": "a"}, {"id": 2, "history": None, "weight": 1})
    path = write(tmp_path / "a.jsonl", records(*(record | more for more in rest)))
    length = 2 if task == "language" else 500
    options = {"sequence_length": length, "validation_share": 0.5, "seed": 0}
    if task == "chat":
        template = read_template(tmp_path, decoder.tokens, TEMPLATE)
        notes = answers.make_chat(path, decoder, template, **options).notes
        assert f"{TEMPLATE}: fields of messages that it does not write: 'mood' 2" in notes
        assert f"{path}: 2 of 2 conversations begin with a system message: ask" in notes[-1]
    elif task == "alpaca":
        notes = answers.make_alpaca(path, decoder, **options).notes
    else:
        notes = language.make(path, decoder, **options).notes
    assert f"{path}: fields that are not read: 'id' 2, 'label' 1" in notes


def test_docs_name_each_field_that_is_followed_or_refused():
    tables = (fields.OF_CHATS, fields.OF_MESSAGES, fields.OF_INSTRUCTIONS, fields.OF_ANSWERS)
    assert not [name for table in tables for name in table if f"`{name}`" not in DOCS]
