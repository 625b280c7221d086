"""Files that no task accepts: the error names the file, the line and usually a remedy."""

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
GOOD = "text,label\na fine film,kind\nso bad,unkind\n"
MANY = "text,label\n" + "".join(f"a,b{i}\n" for i in range(30))

FILES = {
    "language": [
        ("a.txt", "a", r"the train part of .* has 1 tokens.*`validation_share`"),
        ("a.jsonl", '{"text": "a"}\n{"text": "\\ud83d\\ude00 \\ude00"}', r"2, column 24: .* half"),
        ("a.jsonl", '{"text": "a", "weight": 0}', "the field 'weight' must be 1, but is 0"),
        ("dev.txt", "a", r"has no training data \(train\*, .*\)\. .* dev\.txt"),
        ("train-test.txt", "a", r"train-test\.txt could be training or other data"),
    ],
    "alpaca": [
        ("a.jsonl", records(PLAIN | {"history": [["a", "b"]]}), r"'history' .* not supported"),
    ],
    "chat": [
        ("a.jsonl", chats({"messages": [USER]}), r"the role 'assistant', but the roles are 'user'"),
        ("a.jsonl", extended(label=False), r"line 2: the field 'label' .*not supported"),
        ("a.jsonl", extended(loss_mask=[0, 1]), r"'loss_mask'.* (not supported|must be 1)"),
        ("a.jsonl", answered(image_url=[[0], 1]), r"'image_url'.* (not supported|must be 1)"),
        ("a.jsonl", answered(weight=0.5), r"message 2: .* must be 0 or 1, but is 0.5"),
        ("a.jsonl", answered(tool_calls=[{"name": "a", "arguments": "{"}]), r"are not valid JSON"),
        ("a.jsonl", chats({"messages": [USER | {"train": True}, ANSWER]}), r"'train' is True, but"),
    ],
    "classification": [
        ("a.csv", "text,text,label\na,b,c\n", r"column 'text' is repeated. Rename all but one"),
        ("a.csv", GOOD + "good, but long,kind\n", r"line 4: .* 3 columns, but .* has 2.*quotation"),
        ("a.csv", GOOD + '"good,kind\nbad,so\n', r"line 4: the row that ends .* not valid CSV"),
        ("a.csv", GOOD + "good,\n", r"line 4: column 'label' has no label"),
        ("a.csv", MANY, r"has 30 classes in 30 rows: 'b0', 'b1', 'b10'. Pass a"),
        ("a.tsv", "text\tlabel\na\tb\tc\n", r"line 2: the row has 3 columns, but .* has 2.*as CSV"),
    ],
}


@pytest.mark.parametrize(
    ("task", "file", "content", "match"), [(task, *x) for task in FILES for x in FILES[task]]
)
def test_a_file_that_no_task_accepts_is_named(tmp_path, bert, decoder, task, file, content, match):
    path = write(tmp_path / file, content)
    make, *arguments = {
        "language": (language.make, decoder),
        "alpaca": (answers.make_alpaca, decoder),
        "chat": (answers.make_chat, decoder, read_template(tmp_path, decoder.tokens, TEMPLATE)),
        "classification": (classification.make, bert, classification.Columns("text", "label")),
    }[task]
    data = path if file[0] == "a" else tmp_path
    with pytest.raises(DataError, match=match):
        make(data, *arguments, sequence_length=512, validation_share=0.5, seed=0)
