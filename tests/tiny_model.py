"""Folders with a tiny model and its tokenizer, as Hugging Face has them, with random weights."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.hf_models import FIXTURES
from tests.tiny_tokenizer import write_byte_level, write_wordpiece

TOKENIZERS = {"llama2": write_byte_level, "bert": write_wordpiece}


def write_model(folder: Path, name: str) -> Path:
    """Writes the model of a fixture, with the vocabulary of a tokenizer, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = TOKENIZERS[name](folder)
    config = json.loads((FIXTURES / name / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(FIXTURES / name / "model.safetensors")
    rng = np.random.default_rng(0)
    for key, x in tensors.items():
        if x.shape[0] == config["vocab_size"]:
            shape = (vocabulary, *x.shape[1:])
            tensors[key] = rng.normal(scale=0.1, size=shape).astype(x.dtype)
    save_file(tensors, folder / "model.safetensors")
    text = json.dumps(config | {"vocab_size": vocabulary})
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder
