"""Runs `examples/tunix_sft.py` as users do, with tiny sizes, on four devices."""

import json
import shutil
import string
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from flax import nnx

from examples import tunix_sft

TINY = ["--length", "240", "--batch-size", "4", "--evaluate-every", "2", "--save-every", "2"]
QWEN3 = Path(__file__).parents[1] / "fixtures" / "qwen3"
LETTERS = "?" + string.ascii_lowercase + string.digits + " .,:#\nABEIRW"  # fewer than tokens


def losses(out):
    lines = [line.split() for line in out.splitlines()]
    return {int(x[1]): float(x[3]) for x in lines if x[:1] == ["step"]}


def test_a_small_model_learns_and_the_same_command_resumes(tmp_path, capsys):
    command = ["--out", str(tmp_path), *TINY]
    hooks = tunix_sft.main([*command, "--steps", "4"])
    out = capsys.readouterr().out
    assert hooks.stats.steps == 4
    assert "72 of 72 records" in out
    by_step = losses(out)
    assert sorted(by_step) == [1, 2, 3, 4]
    assert by_step[4] < by_step[1] < 6  # about the logarithm of the vocabulary at first
    assert "after step 4  validation loss" in out
    tunix_sft.main([*command, "--steps", "6"])
    out = capsys.readouterr().out
    assert "resuming from the checkpoint of step 4" in out
    assert sorted(losses(out)) == [5, 6]


def folder(path, **changes):
    """Writes the Hugging Face folder of a tiny Qwen3 whose tokens are letters."""
    shutil.copytree(QWEN3, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    tokens = {letter: i for i, letter in enumerate(LETTERS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(tokens, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_a_custom_folder_and_file_are_trained(tmp_path, capsys):
    qwen3 = folder(tmp_path / "qwen3", eos_token_id=[1, 2])
    mesh = tunix_sft.make_mesh()
    with mesh:
        model = tunix_sft.make_model(qwen3, 62, mesh, "float32")
    tensors = safetensors.numpy.load_file(qwen3 / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    np.testing.assert_array_equal(model.embedder.input_embedding[...], embedding)
    assert model.embedder.input_embedding[...].sharding.mesh.size == jax.device_count() == 4
    data = tmp_path / "records.jsonl"
    records = [*tunix_sft.SUMS[:11], {"instruction": "x" * 300, "input": None, "output": "no"}]
    data.write_text("\n".join(map(json.dumps, records)))
    command = ["--model", str(qwen3), "--data", str(data), "--dtype", "bfloat16"]
    hooks = tunix_sft.main([*command, *TINY, "--accumulate", "2", "--steps", "3"])
    out = capsys.readouterr().out
    assert "11 of 12 records have at most 240 tokens" in out
    assert hooks.stats.steps == 3
    trained = hooks._trainer.model
    dtypes = {x.dtype for x in jax.tree.leaves(nnx.state(trained, nnx.Param))}
    assert dtypes == {np.dtype("bfloat16")}
    assert all(np.isfinite(x) for x in losses(out).values())


def test_a_folder_with_another_model_is_rejected(tmp_path):
    llama = folder(tmp_path / "llama", model_type="llama")
    with pytest.raises(SystemExit, match="model_type llama, not qwen3"):
        tunix_sft.main(["--model", str(llama), *TINY])
