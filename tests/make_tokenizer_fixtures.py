"""Makes `tests/fixtures/tokenizers.json`: the tokens that `transformers` puts before a text.

    python -m tests.make_tokenizer_fixtures

Needs transformers; the tests themselves do not. The cases are folders with the post-processors and
token settings of known models.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.tiny_tokenizer import BEGIN, END, write_byte_level

FILE = Path(__file__).parent / "fixtures" / "tokenizers.json"
TEXT = "the cat"
IDS = {BEGIN: 265, END: 266}  # in the vocabulary of `write_byte_level`

GPT2 = {"tokenizer_class": "GPT2Tokenizer", "bos_token": BEGIN, "eos_token": END}
FAST = GPT2 | {"tokenizer_class": "PreTrainedTokenizerFast"}
LLAMA = GPT2 | {"tokenizer_class": "LlamaTokenizer"}
QWEN = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": END}


def template(*parts: str) -> dict[str, Any]:
    """Returns a post-processor that puts special tokens around the text, `$A`."""
    single = [
        {"Sequence": {"id": "A", "type_id": 0}}
        if part == "$A"
        else {"SpecialToken": {"id": part, "type_id": 0}}
        for part in parts
    ]
    tokens = {x: {"id": x, "ids": [IDS[x]], "tokens": [x]} for x in parts if x != "$A"}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
BOTH = {"type": "Sequence", "processors": [BYTES, template(BEGIN, "$A")]}
CASES: dict[str, tuple[dict[str, Any] | None, dict[str, dict[str, Any]]]] = {
    "SmolLM2": (BYTES, {"tokenizer_config": GPT2}),
    "Granite code": (None, {"tokenizer_config": GPT2 | {"add_prefix_space": False}}),
    "Llama 2": (
        template(BEGIN, "$A"),
        {"tokenizer_config": LLAMA | {"add_bos_token": True, "add_eos_token": False}},
    ),
    "Llama 3": (BOTH, {"tokenizer_config": FAST}),
    "Qwen 2.5": (BYTES, {"tokenizer_config": QWEN | {"add_bos_token": False}}),
    "of transformers 5": (BOTH, {"tokenizer_config": FAST | {"backend": "tokenizers"}}),
    "one that ends texts": (template(BEGIN, "$A", END), {"tokenizer_config": FAST}),
    "one that only ends texts": (template("$A", END), {"tokenizer_config": FAST}),
    "one with a map": (
        BYTES,
        {
            "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"},
            "special_tokens_map": {"bos_token": BEGIN, "eos_token": END},
        },
    ),
    "one whose config differs": (BOTH, {"tokenizer_config": FAST | {"add_bos_token": False}}),
}


def write_case(folder: Path, processor: Any, files: dict[str, dict[str, Any]]) -> int:
    """Writes a case's tokenizer; returns its vocabulary size."""
    vocabulary = write_byte_level(folder)
    path = folder / "tokenizer.json"
    tokens = json.loads(path.read_text(encoding="utf-8")) | {"post_processor": processor}
    path.write_text(json.dumps(tokens), encoding="utf-8")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return vocabulary


def main() -> None:
    import transformers

    fronts: dict[str, Any] = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_case(Path(folder), *case)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        ids, text = (tokenizer(TEXT, add_special_tokens=x)["input_ids"] for x in (True, False))
        front = ids[: next(i for i in range(len(ids)) if ids[i : i + len(text)] == text)]
        fronts[name] = tokenizer.convert_ids_to_tokens(front)
    expected = {"transformers": transformers.__version__, "fronts": fronts}
    FILE.write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
