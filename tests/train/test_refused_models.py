"""Folders with a damaged model, or with a model that the scripts do not support."""

import numpy as np
import pytest

from tests.hf_models import change_config, change_tensors, copied
from train.huggingface.loading import ModelError, read_folder

FULL, SLIDING = "full_attention", "sliding_attention"
MIXED_LAYERS = {"use_sliding_window": True, "sliding_window": 5, "layer_types": [FULL, SLIDING]}


def without(name):
    return lambda tensors: {key: t for key, t in tensors.items() if key != name}


def with_tensor(name, shape, dtype=np.float32):
    return lambda tensors: tensors | {name: np.ones(shape, dtype)}


@pytest.mark.parametrize(
    ("name", "change", "words"),
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
        ("bert", without("classifier.weight"), "`classifier.bias`"),
        ("llama2", with_tensor("score.weight", (2,)), "`score.weight`"),
        ("llama2", with_tensor("model.norm.weight", (16,), np.int8), "F32, F16, BF16 I8"),
    ],
)
def test_a_config_or_tensors_that_do_not_match_are_rejected(tmp_path, name, change, words):
    folder = copied(name, tmp_path)
    if callable(change):
        change_tensors(folder, change)
    else:
        change_config(folder, **change)
    with pytest.raises(ModelError) as caught:
        read_folder(folder)
    assert [x for x in (str(folder), *words.split(" ")) if x not in str(caught.value)] == []
