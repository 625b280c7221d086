"""Tokenizers with a few hundred tokens, in Hugging Face folders.

WordPiece and byte-level BPE, defined here, so every machine and version has the same ids.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = (
    "a an and are bad boy cat dog film fine girl good how in is it movie not of old on one ran "
    "sat so the this to was what who why"
).split()

# Pairs to merge, in this order; Ġ stands for a space before a word.
MERGES = [
    ("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "a"), ("i", "n"), ("i", "s"), ("Ġ", "is"),
    ("o", "n"), ("e", "r"),
]  # fmt: skip

BEGIN, END = "<|begin|>", "<|end|>"
TURN, TURN_END = "<|turn|>", "<|turn_end|>"


def write_wordpiece(folder: Path) -> int:
    """Writes a tokenizer like BERT's, with `[PAD]` as token 0; returns the vocabulary size."""
    characters = sorted(string.ascii_lowercase + string.digits + ".,!?'-;:")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *characters, *("##" + c for c in characters), *WORDS]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokens = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokens.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokens.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokens.decoder = decoders.WordPiece()
    tokens.add_special_tokens(special)
    tokens.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    # Some folders contain lengths for another use, which must be ignored.
    tokens.enable_truncation(3)
    tokens.enable_padding(length=7)
    names = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
    named = {f"{kind}_token": name for kind, name in names.items()}
    _write(folder, tokens, {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **named})
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    return tokens.get_vocab_size()


def write_byte_level(folder: Path, *, begin: bool = True, also: Sequence[str] = ()) -> int:
    """Writes a tokenizer like a decoder's into the folder, without a padding token.

    Texts get a `begin` token, as in Llama, or none, as in Qwen; `also` are special tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(left + right for left, right in MERGES)]
    tokens = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, MERGES))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens([BEGIN, END, *also])
    tokens.post_processor = processors.ByteLevel(trim_offsets=False)
    if begin:
        tokens.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A",
            pair=f"{BEGIN} $A {BEGIN} $B",
            special_tokens=[(BEGIN, tokens.token_to_id(BEGIN))],
        )
    end = {"__type": "AddedToken", "content": END, "special": True}  # a token with its flags
    names = {"bos_token": BEGIN if begin else None, "eos_token": end}
    _write(folder, tokens, {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    return tokens.get_vocab_size()


def _write(folder: Path, tokens: Tokenizer, config: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokens.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
