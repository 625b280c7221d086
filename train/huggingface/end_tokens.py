"""Completes a trained model's folder: adds the end tokens of answers, and keeps one chat template.

Other programs read end tokens only from generation_config.json; `train.generate` also finds them in
the chat template.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from train.huggingface.chat_template import (
    ASSISTANT,
    TEMPLATE,
    ChatTemplate,
    ConversationError,
    read_template,
)
from train.huggingface.config import CONFIG
from train.huggingface.json_files import read_object
from train.huggingface.tokenizer import (
    TOKENIZER,
    Tokenizer,
    TokenizerError,
    all_end_tokens,
    read_tokenizer,
)

GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def answer_end_tokens(
    template: ChatTemplate, tokenizer: Tokenizer, messages: list[dict[str, str]]
) -> frozenset[int]:
    """Returns the special tokens that a template puts after the answer to these messages."""
    answered = [*messages, {"role": ASSISTANT, "content": "Yes"}]
    start, stop = (whole := template.conversation(answered)).answers[0]
    ending = whole.text[start:stop].rpartition("Yes")[2]
    decoder = tokenizer.tokens.get_added_tokens_decoder()
    ids = tokenizer.tokens.encode(ending, add_special_tokens=False).ids
    return frozenset(n for n in ids if n in decoder and decoder[n].special)


def complete_folder(folder: Path, vocabulary: int, task: str) -> None:
    """Writes the end tokens, as `train.generate` finds them, to files that other programs read."""
    if not (folder / TOKENIZER).is_file():
        return
    # Programs differ in which of several chat templates they read.
    path = folder / TOKENIZER_CONFIG
    config = read_object(path, TokenizerError, optional=True)
    if (folder / TEMPLATE).is_file() and config.pop("chat_template", None) is not None:
        _write(path, config)
    if (folder / TEMPLATE).is_file() or "chat_template" in config:
        (folder / "chat_template.json").unlink(missing_ok=True)
    tokenizer = read_tokenizer(folder, vocabulary=vocabulary)
    ends = all_end_tokens(folder, tokenizer)
    if task == "chat":
        template = read_template(folder, tokenizer.tokens)
        try:
            ends |= answer_end_tokens(
                template, tokenizer, [{"role": "user", "content": "Is it so?"}]
            )
        except ConversationError:
            pass  # `train.generate` rejects this template
    config = read_object(folder / CONFIG, TokenizerError)
    content = {name: config[name] for name in _IDS if config.get(name) is not None}
    if (folder / GENERATION).is_file():
        content = read_object(folder / GENERATION, TokenizerError)
    named = content.get("eos_token_id")
    named = named if isinstance(named, list) else [named]
    if more := sorted(ends.difference(named, [-1])):
        listed = [n for n in named if n not in (None, -1)] + more
        content["eos_token_id"] = listed if len(listed) > 1 else listed[0]
        _write(folder / GENERATION, content)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
