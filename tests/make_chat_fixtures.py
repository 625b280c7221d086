"""Makes `tests/fixtures/chat/expected.json`, the results of `transformers` for chat templates.

    python -m tests.make_chat_fixtures

Needs transformers; the tests themselves do not. The templates next to the file use the same
features as models' templates. The file contains conversations for each template. For each
conversation, this script writes its text, the prompt for an answer, the tokens and, if the template
marks answers, the answers' mask.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.tiny_tokenizer import BEGIN, END, TURN, TURN_END, write_byte_level

FOLDER = Path(__file__).parent / "fixtures" / "chat"


def main() -> None:
    import transformers

    expected = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
    expected["transformers"] = transformers.__version__
    with tempfile.TemporaryDirectory() as folder:
        write_byte_level(Path(folder), also=[TURN, TURN_END])
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=f"{folder}/tokenizer.json", bos_token=BEGIN, eos_token=END
        )
    for template, conversations in expected.items():
        if template == "transformers":
            continue
        tokenizer.chat_template = (FOLDER / f"{template}.jinja").read_text(encoding="utf-8")
        for case in conversations.values():
            messages, tools = case["messages"], case.get("tools")
            encoded = tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=template == "marked",
            )
            case["text"] = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
            case["asked"] = tokenizer.apply_chat_template(
                messages[:-1], tools=tools, tokenize=False, add_generation_prompt=True
            )
            case["tokens"] = encoded["input_ids"]
            case["answers"] = encoded.get("assistant_masks")
    text = json.dumps(expected, ensure_ascii=False, indent=1)
    (FOLDER / "expected.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
