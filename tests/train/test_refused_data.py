"""Files that no task accepts: the error names the file, the line and usually a remedy."""

import json
from pathlib import Path

import pytest

from tests.train.scripts import records, write
from train.huggingface.chat_template import read_template
from train.tasks import answers, classification, language
from train.tasks.batches import DataError

TEMPLATE = Path(__file__).parents[1] / "fixtures" / "chat" / "alternating.jinja"


def chats(record):
    """Returns a conversation, followed by another record."""
    return records({"messages": [USER, ANSWER]}, record)


def extended(**rest):
    """Returns a conversation with extra fields next to its messages."""
    return chats({"messages": [USER, ANSWER]} | rest)


def answered(**rest):
    """Returns a conversation with extra fields in its answer."""
    return chats({"messages": [USER, ANSWER | rest]})


PLAIN = {"instruction": "Say {this}.", "output": "this"}
USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "c"}
GOOD = "text,label\na fine film,kind\nso bad,unkind\n"
MANY = "text,label\n" + "".join(f"a,b{i}\n" for i in range(30))

FILES = {
    "language": [
        ("a.txt", "", r"a\.txt: the file is empty"),
        ("a.txt", b"the\n\xe9\n", r"a\.txt, line 2: the text is not UTF-8: 0xe9"),
        ("a.txt", "a", r"the train part of .* has 1 tokens.*`validation_share`"),
        ("a.txt", "one\ntw\0o\n", r"a\.txt, line 2: there is a NUL byte"),
        ("a.jsonl", '{"text": "a"}\n{text: 1}\n', r"line 2, column 2: .* not valid JSON"),
        ("a.jsonl", '{"text": "a"}\n{"text": "\\ud83d\\ude00 \\ude00"}', r"2, column 24: .* half"),
        ("a.jsonl", '\n{"content": "a"}\n', r"a\.jsonl, line 2: .* 'text' is missing .fields: 'c"),
        ("a.jsonl", '{"text": 3}\n', r"a\.jsonl, line 1: the field .* must be text, but is 3"),
        ("a.jsonl", '{"text": "a", "weight": 0}', "the field 'weight' must be 1, but is 0"),
        ("a.jsonl", '{"text": "a"}\n["a"]\n', r"a\.jsonl, line 2: must be an object"),
        ("a.parquet", "", r"a\.parquet: pyarrow cannot read it .* It is empty\."),
        ("dev.txt", "a", r"has no training data \(train\*, .*\)\. .* dev\.txt"),
        ("train-test.txt", "a", r"train-test\.txt could be training or other data"),
    ],
    "alpaca": [
        ("a.json", '[\n{"instruction": "a",}]', r"a\.json, line 2, column 2[01]: .* not valid"),
        ("a.json", json.dumps([PLAIN, {"output": "b"}]), "item 2: .* 'instruction' is missing"),
        ("a.jsonl", records(PLAIN | {"history": [["a", "b"]]}), r"'history' .* not supported"),
        ("a.jsonl", records(PLAIN | {"context": "a"}), r"'context' .* not supported"),
    ],
    "chat": [
        ("a.jsonl", chats({"messages": []}), r"line 2: .* must be a list of messages, but is \[\]"),
        ("a.jsonl", chats({"messages": [USER]}), r"the role 'assistant', but the roles are 'user'"),
        ("a.jsonl", chats({"messages": [ANSWER, USER]}), r"rejects .*: Roles must alternate"),
        ("a.jsonl", extended(label=False), r"line 2: the field 'label' .*not supported"),
        ("a.jsonl", chats({"chosen": "a", "rejected": "b"}), r"'chosen' .*not supported"),
        ("a.jsonl", extended(system="a"), r"field 'system' .*not supported.*Other fields"),
        *(
            ("a.jsonl", content, f"the field '{name}'.* (not supported|must be 1)")
            for name in ("loss_mask", "Trainable", "msg-mask", "loss_scale", "image_url")
            for content in (extended(**{name: [0, 1]}), answered(**{name: [[0], 1]}))
            if content == extended(**{name: [0, 1]}) or name not in ("loss_mask", "Trainable")
        ),
        ("a.jsonl", answered(weight=0.5), r"message 2: .* must be 0 or 1, but is 0.5"),
        ("a.jsonl", answered(train_detail=[]) + answered(train_detail=[1]), r"line 4, .*_detail'"),
        ("a.jsonl", answered(function_call={"name": "a"}), r"'function_call' .*not supported"),
        ("a.jsonl", answered(tool_calls=[{"name": "a", "arguments": "{"}]), r"are not valid JSON"),
        (
            "a.jsonl",
            answered(tool_calls=[{"name": "a", "arguments": '{"b": "\\ud800"}'}]),
            r"line 2, message 2: the arguments .*ud800 is half",
        ),
        ("a.jsonl", chats({"messages": [USER | {"train": True}, ANSWER]}), r"'train' is True, but"),
    ],
    "classification": [
        ("a.csv", "", r"the file has no examples"),
        ("a.csv", "text,text,label\na,b,c\n", r"column 'text' is repeated. Rename all but one"),
        ("a.csv", GOOD + "good, but long,kind\n", r"line 4: .* 3 columns, but .* has 2.*quotation"),
        ("a.csv", GOOD + '"good,kind\nbad,so\n', r"line 4: the row that ends .* not valid CSV"),
        ("a.csv", GOOD + "good,\n", r"line 4: column 'label' has no label"),
        ("a.csv", "text,label\na,0.5\nb,1.5\n", r"line 2: column 'label' must .* contains 0\.5"),
        ("a.csv", MANY, r"has 30 classes in 30 rows: 'b0', 'b1', 'b10'. Pass a"),
        ("a.tsv", "text\tlabel\na\tb\tc\n", r"line 2: the row has 3 columns, but .* has 2.*as CSV"),
        ("a.jsonl", '{"review": "a"}\n', r"'text' is missing .* Pass its name with --text-column"),
    ],
}


def make(task, data, folder, bert, decoder, *, length):
    options = {"sequence_length": length, "validation_share": 0.5, "seed": 0}
    if task == "language":
        return language.make(data, decoder, **options)
    if task == "alpaca":
        return answers.make_alpaca(data, decoder, **options)
    if task == "chat":
        template = read_template(folder, decoder.tokens, TEMPLATE)
        return answers.make_chat(data, decoder, template, **options)
    return classification.make(data, bert, classification.Columns("text", "label"), **options)


@pytest.mark.parametrize(
    ("task", "file", "content", "match"), [(task, *x) for task in FILES for x in FILES[task]]
)
def test_a_file_that_no_task_accepts_is_named(tmp_path, bert, decoder, task, file, content, match):
    path = write(tmp_path / file, content)
    data, length = path if file[0] == "a" else tmp_path, 512 if task == "alpaca" else 4
    with pytest.raises(DataError, match=match):
        make(task, data, tmp_path, bert, decoder, length=length)


@pytest.mark.parametrize(
    ("task", "length", "record"),
    [
        ("language", 2, {"text": "a cat is in the bin"}),
        ("alpaca", 500, PLAIN),
        ("chat", 500, {"messages": [SYSTEM, USER, ANSWER | {"mood": "good"}]}),
    ],
)
def test_ignored_fields_are_listed_once_with_their_counts(
    tmp_path, bert, decoder, task, length, record
):
    rest = ({"id": 1, "images": [], "label": "a"}, {"id": 2, "history": None, "weight": 1})
    path = write(tmp_path / "a.jsonl", records(*(record | more for more in rest)))
    notes = make(task, path, tmp_path, bert, decoder, length=length).notes
    assert f"{path}: fields that are not read: 'id' 2, 'label' 1" in notes
