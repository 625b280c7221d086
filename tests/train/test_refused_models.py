"""Folders with no model, a damaged model, or a model that the scripts do not support."""

import shutil

import numpy as np
import pytest

from tests.hf_models import change_config, change_tensors, copied
from train.huggingface.loading import ModelError, read_folder


def assert_rejected(folder, *words):
    with pytest.raises(ModelError) as caught:
        read_folder(folder)
    missing = [word for word in words if str(word) not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
FULL, SLIDING = "full_attention", "sliding_attention"
MIXED_LAYERS = {"use_sliding_window": True, "sliding_window": 5, "layer_types": [FULL, SLIDING]}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama2", {"model_type": "gpt2"}, "`model_type` llama 'gpt2'"),
        ("llama2", {"quantization_config": {"bits": 4}}, "`quantization_config` bits"),
        ("llama2", {"num_key_value_heads": 3}, "`num_key_value_heads` divisor 4"),
        ("llama2", {"rope_parameters": {"rope_type": "yarn"}}, "`rope_parameters.rope_type`"),
        ("qwen2", MIXED_LAYERS, "`use_sliding_window` all layers"),
        ("qwen2", {"layer_types": [SLIDING] * 2}, "`layer_types` `sliding_window`, None"),
        ("bert", {"intermediate_size": 23}, "output.dense (16, 23) (16, 24)"),
        ("llama2", {"num_hidden_layers": 3}, "lacks layers.2. and 8 more"),
        ("qwen2", {"tie_word_embeddings": False}, "`lm_head.weight`"),
    ],
    ids=str,
)
def test_unsupported_configs_are_rejected(tmp_path, name, changes, words):
    folder = copied(name, tmp_path)
    change_config(folder, **changes)
    assert_rejected(folder, folder, *words.split(" "))


def without(name):
    return lambda tensors: {key: t for key, t in tensors.items() if key != name}


def with_tensor(name, shape, dtype=np.float32):
    return lambda tensors: tensors | {name: np.ones(shape, dtype)}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("llama2", without("model.norm.weight"), "lacks `norm.weight`"),
        ("bert", without("classifier.weight"), "`classifier.bias`"),
        ("llama2", with_tensor("score.weight", (2,)), "`score.weight`"),
        ("llama2", with_tensor("model.norm.weight", (16,), np.int8), "F32, F16, BF16 I8"),
    ],
    ids=["missing", "half a head", "extra", "integers"],
)
def test_tensors_that_do_not_match_the_config_are_rejected(tmp_path, name, change, words):
    folder = copied(name, tmp_path)
    change_tensors(folder, change)
    assert_rejected(folder, folder, *words.split(" "))


def test_damaged_and_missing_files_are_named(tmp_path):
    assert_rejected(tmp_path / "nothing", tmp_path / "nothing", "or org/name on the Hub")
    folder = copied("llama3", tmp_path)
    shard = folder / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    for content, kind in ((whole[:-1], ""), (LFS, "a git-lfs pointer. "), (b"", "empty. ")):
        shard.write_bytes(content)
        assert_rejected(folder, shard, f"{len(content)} bytes", f"It is {kind}" if kind else kind)
    shard.unlink()
    assert_rejected(folder, shard, "is missing", "Copy it again")
    other = folder / "model-00001-of-00002.safetensors"
    shutil.copyfile(other, shard)
    assert_rejected(folder, folder, "which the model in its config.json needs")
    shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    other.rename(folder / "pytorch_model.bin")
    assert_rejected(folder, "pytorch_model.bin", "save_pretrained", folder)
