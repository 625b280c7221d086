"""Files that no task understands: each is named, with its line and mostly what to do."""

import json
from pathlib import Path

import pytest

from tests.train.scripts import records, write
from train.chat_template import read_template
from train.data import DataError
from train.tasks import answers, classification, glue, language

TEMPLATE = Path(__file__).parents[1] / "fixtures" / "chat" / "alternating.jinja"


def chats(line):
    """A conversation, and then a line."""
    return records({"messages": [USER, TOLD]}, line)


PLAIN = {"instruction": "Say {this}.", "output": "this"}
USER, TOLD = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
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
        ("a.jsonl", '{"text": "\\ud800"}\n', r"line 1: .* got half a surrogate"),
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
    ],
    "chat": [
        ("a.jsonl", chats({"messages": []}), r"line 2: expected a list of messages .* got \[\]"),
        ("a.jsonl", chats({"messages": ["hi"]}), r"line 2, message 1: expected \{.*\}, got 'hi'"),
        ("a.jsonl", chats({"messages": [{"role": "user"}]}), r"expected a field 'content'"),
        ("a.jsonl", chats({"messages": [USER]}), r"the role 'assistant'.*only those of 'user'"),
        ("a.jsonl", chats({"prompt": "a"}), r"'messages', found 'prompt'. Write \[{\"role\""),
        ("a.jsonl", chats({"conversations": []}), r"field 'messages', found .*`from` to `role`"),
        ("a.jsonl", chats({"text": "a"}), r"take --task language"),
        ("a.jsonl", chats({"messages": [USER, TOLD], "tools": "[]"}), "list in the field 'tools'"),
        ("a.jsonl", chats({"messages": [TOLD, USER]}), r"line 2: .* got: Roles must alternate"),
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
        ("a.csv", GOOD.replace("\n", "\r"), r"lines end with a carriage return alone"),
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
