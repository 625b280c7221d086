"""Makes `tests/fixtures/chat/expected.json`: what `transformers` makes of chat templates.

    python -m tests.make_chat_fixtures

Needs transformers, which the tests themselves do not. The templates beside the file are written for
this; between them they do what those of models do. For each template and each conversation that it
can do with there are the text, the text that asks for an answer, the tokens, and of the template
that says so which tokens are answers.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.tiny_tokenizer import BEGIN, END, TURN, TURN_END, write_byte_level

FOLDER = Path(__file__).parent / "fixtures" / "chat"

TOOL = {"type": "function", "function": {"name": "größe", "parameters": {"of": "<thing>"}}}
CALL = {"type": "function", "function": {"name": "größe", "arguments": {"of": "cat"}}}

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one": {
        "messages": [
            {"role": "user", "content": "Who is it?"},
            {"role": "assistant", "content": 'The cat, of course: \N{GRINNING FACE} "it\'s" <b>.'},
        ]
    },
    "several": {
        "messages": [
            {"role": "system", "content": " Be short.\n"},
            {"role": "user", "content": "Who?"},
            {"role": "assistant", "content": "The cat."},
            {"role": "user", "content": "Where is the cat? The cat."},
            {"role": "assistant", "content": "On the mat.\n\nThe cat."},
            {"role": "user", "content": "The cat."},
            {"role": "assistant", "content": "The cat."},
        ]
    },
    "thoughts": {
        "messages": [
            {"role": "user", "content": "Who?"},
            {"role": "assistant", "content": "<think>\nA dog?\n</think>\n\nThe cat."},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "<think>\nIt is.\n</think>\n\nSure."},
        ]
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "How large?"},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": "9"},
            {"role": "assistant", "content": "It is 9."},
        ],
        "tools": [TOOL],
    },
}

CAN = {
    "turns": ("one", "several", "tools"),
    "marked": ("one", "several"),
    "alternating": ("one", "several"),
    "thinking": ("one", "several", "thoughts"),
}


def main() -> None:
    import transformers

    found: dict[str, Any] = {"transformers": transformers.__version__}
    with tempfile.TemporaryDirectory() as folder:
        write_byte_level(Path(folder), also=[TURN, TURN_END])
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=f"{folder}/tokenizer.json", bos_token=BEGIN, eos_token=END
        )
    for template, names in CAN.items():
        tokenizer.chat_template = (FOLDER / f"{template}.jinja").read_text(encoding="utf-8")
        for name in names:
            given = CONVERSATIONS[name]
            messages, tools = given["messages"], given.get("tools")
            encoded = tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=template == "marked",
            )
            asked = messages[:-1]
            found.setdefault(template, {})[name] = given | {
                "text": tokenizer.apply_chat_template(messages, tools=tools, tokenize=False),
                "asked": tokenizer.apply_chat_template(
                    asked, tools=tools, tokenize=False, add_generation_prompt=True
                ),
                "tokens": encoded["input_ids"],
                "answers": encoded.get("assistant_masks"),
            }
    text = json.dumps(found, ensure_ascii=False, indent=1)
    (FOLDER / "expected.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
