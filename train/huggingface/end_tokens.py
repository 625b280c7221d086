"""Completes a trained model's folder: adds the end tokens of answers, and keeps one chat template.

Other programs read end tokens only from generation_config.json; `train.generate` also finds them in
the chat template.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from train.huggingface import chat_template, tokenizer
from train.huggingface.chat_template import ASSISTANT, TEMPLATE
from train.huggingface.config import CONFIG
from train.huggingface.tokenizer import read_entries

GENERATION = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def answer_end_tokens(
    template: chat_template.ChatTemplate, encoder: tokenizer.Tokenizer, messages: list[Any]
) -> frozenset[int]:
    """Returns the special tokens that a template puts after the answer to these messages."""
    whole = template.conversation([*messages, {"role": ASSISTANT, "content": "Yes"}])
    start, stop = whole.answers[0]
    ending = whole.text[start:stop].rpartition("Yes")[2]
    decoder = encoder.tokens.get_added_tokens_decoder()
    ids = encoder.tokens.encode(ending, add_special_tokens=False).ids
    return frozenset(n for n in ids if n in decoder and decoder[n].special)


def complete_folder(folder: Path, vocabulary: int, task: str) -> None:
    """Writes the end tokens, as `train.generate` finds them, to files that other programs read."""
    if not (folder / tokenizer.TOKENIZER).is_file():
        return
    # Programs differ in which of several chat templates they read.
    config, has_file = read_entries(folder / chat_template.CONFIG), (folder / TEMPLATE).is_file()
    if has_file and config.pop("chat_template", None) is not None:
        _write(folder / chat_template.CONFIG, config)
    if has_file or "chat_template" in config:
        (folder / "chat_template.json").unlink(missing_ok=True)
    encoder = tokenizer.read_tokenizer(folder, vocabulary=vocabulary)
    ends = tokenizer.all_end_tokens(folder, encoder)
    if task == "chat":
        template = chat_template.read_template(folder, encoder.tokens)
        # `train.generate` rejects a template that fails.
        with contextlib.suppress(chat_template.ConversationError):
            question = {"role": "user", "content": "Is it so?"}
            ends |= answer_end_tokens(template, encoder, [question])
    config, content = (read_entries(folder / name) for name in (CONFIG, GENERATION))
    if not content:
        content = {name: config[name] for name in _IDS if config.get(name) is not None}
    named = content.get("eos_token_id")
    named = named if isinstance(named, list) else [named]
    if more := sorted(ends.difference(named, [-1])):
        listed = [n for n in named if n not in (None, -1)] + more
        content["eos_token_id"] = listed if len(listed) > 1 else listed[0]
        _write(folder / GENERATION, content)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
