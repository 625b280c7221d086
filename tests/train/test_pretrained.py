"""Models from Hugging Face folders: their outputs, and how they are saved.

`fixtures/` has tiny random models of each family and outputs of `transformers` on torch, from
`make_fixtures.py`. No test needs either.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from elves import atomic
from tests.comparisons import assert_same_bits
from tests.hf_models import (
    FAMILIES,
    FIXTURES,
    LLAMA3,
    assert_close,
    change_config,
    change_tensors,
    copied,
    expected_of,
    load,
    make,
    outputs,
)
from train.huggingface import saving
from train.huggingface.loading import ModelError, load_weights, newly_drawn, read_folder
from train.huggingface.saving import dtype_of, save_folder
from train.model.decoder import LinearRope, Llama3Rope


@pytest.mark.parametrize(
    ("name", "scan_layers"), [("llama3", False), ("bert", False), *((x, True) for x in FAMILIES)]
)
def test_outputs_equal_those_of_transformers(name, scan_layers):
    _, graphdef, params = load(FIXTURES / name, scan_layers=scan_layers)
    logits = outputs(name, graphdef, params)
    assert logits.dtype == jnp.float32
    assert_close(logits, expected_of(name))


def test_weights_are_rounded_once_to_the_requested_dtype(tmp_path):
    folder = copied("llama2", tmp_path)
    change_tensors(folder, lambda ts: {name: t.astype(np.float16) for name, t in ts.items()})
    weights = load_file(folder / "model.safetensors")
    for dtype in (jnp.float32, jnp.bfloat16):
        _, _, params = load(folder, weight_dtype=dtype, scan_layers=True)
        for i in range(2):
            expected = weights[f"model.layers.{i}.mlp.up_proj.weight"].T.astype(dtype)
            kernel = params["blocks"]["up"]["kernel"][i]
            assert kernel.dtype == dtype
            np.testing.assert_array_equal(kernel, expected)
        assert params["norm"]["scale"].dtype == jnp.float32


def test_heads_missing_from_the_folder_or_meant_for_other_labels_are_initialized():
    pretrained = read_folder(FIXTURES / "bert_masked")
    assert pretrained.labels is None
    _, shapes = make(pretrained, labels=3)
    heads = ("classifier/bias", "classifier/kernel", "pooler/bias", "pooler/kernel")
    assert newly_drawn(pretrained, shapes) == heads
    params, again, redrawn = (load_weights(pretrained, shapes, seed=s) for s in (0, 0, 1))
    assert_same_bits(params, again)
    kernel = params["classifier"]["kernel"]
    assert not np.array_equal(kernel, redrawn["classifier"]["kernel"])

    # For other labels, a new head is initialized.
    pretrained, _, kept = load(FIXTURES / "bert")
    _, shapes = make(pretrained, labels=2)
    params = load_weights(pretrained, shapes, anew=("classifier",))
    assert params["classifier"]["kernel"].shape == (16, 2)
    assert newly_drawn(pretrained, shapes, anew=("classifier",)) == heads[:2]
    assert_same_bits(params["pooler"], kept["pooler"])


@pytest.mark.parametrize(
    ("name", "scaling", "rope"),
    [
        ("llama2", None, None),
        ("llama_linear", {"type": "linear", "factor": 4.0}, LinearRope(4.0)),
        ("llama3", LLAMA3, Llama3Rope(8.0, 1.0, 4.0, 128)),
    ],
)
def test_configs_from_before_transformers_5_mean_the_same(tmp_path, name, scaling, rope):
    folder = copied(name, tmp_path)
    new = read_folder(folder).config
    # Values that follow from the rest may be missing.
    change_config(folder, attention_bias=None, mlp_bias=None, hidden_act=None)
    change_config(folder, rope_parameters=None, rope_theta=5000.0, rope_scaling=scaling)
    assert read_folder(folder).config == new._replace(rope_base=5000.0)
    assert new.rope_scaling == rope


def test_qwens_windows_apply_to_its_listed_layers(tmp_path):
    folder = copied("qwen3", tmp_path)
    for uses, first, window in ((False, 0, None), (True, 0, 5), (True, 28, None)):
        changes = {"use_sliding_window": uses, "sliding_window": 5, "max_window_layers": first}
        change_config(folder, layer_types=None, **changes)
        assert read_folder(folder).config.window == window


def test_a_head_that_differs_from_the_embedding_is_kept_although_the_config_ties_them(tmp_path):
    folder = copied("qwen3", tmp_path)
    _, _, params = load(folder, scan_layers=True)
    change_config(folder, tie_word_embeddings=True)
    tied, graphdef, kept = load(folder, scan_layers=True)
    assert_same_bits(kept, params)
    assert_close(outputs("qwen3", graphdef, kept), expected_of("qwen3"))
    save_folder(tmp_path / "saved", tied, kept)
    assert read_folder(tmp_path / "saved").raw["tie_word_embeddings"] is False
    assert_same_bits(load(tmp_path / "saved", scan_layers=True)[2], params)


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_weights_load_bit_exactly(tmp_path, name):
    for dtype, scan_layers in ((jnp.float32, False), (jnp.bfloat16, True)):
        options = {"scan_layers": scan_layers, "weight_dtype": dtype}
        pretrained, _, params = load(FIXTURES / name, **options)
        save_folder(tmp_path / "saved", pretrained, params)
        again, _, loaded = load(tmp_path / "saved", **options)
        assert_same_bits(loaded, params)
        assert again.config == pretrained.config
        assert again.raw["dtype"] == dtype_of(pretrained).name
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_each_tensor_is_saved_in_its_original_dtype(tmp_path):
    folder = copied("qwen3", tmp_path)
    wide = ("norm", "layers.1.mlp.up_proj", "lm_head")

    def narrowed(name, x):
        return x if any(part in name for part in wide) else x.astype(ml_dtypes.bfloat16)

    change_tensors(folder, lambda tensors: {name: narrowed(name, x) for name, x in tensors.items()})
    pretrained, _, params = load(folder, scan_layers=True)
    save_folder(tmp_path / "saved", pretrained, params)
    saved, read = (load_file(x / "model.safetensors") for x in (tmp_path / "saved", folder))
    assert_same_bits(saved, read)
    assert {str(x.dtype) for x in saved.values()} == {"float32", "bfloat16"}


def test_only_models_are_replaced_and_the_tokenizers_files_are_copied(tmp_path):
    folder = copied("bert", tmp_path)
    (folder / "expected.safetensors").unlink()
    for name in ("vocab.txt", "notes.txt"):
        (folder / name).write_text(name)
    pretrained, _, params = load(folder)
    saved = tmp_path / "saved"
    save_folder(saved, pretrained, params)
    (saved / "tokenizer.json").write_text("of a run before")
    save_folder(saved, pretrained, params)
    files = {path.name for path in saved.iterdir()}
    assert files == {"config.json", "model.safetensors", "vocab.txt"}
    (saved / "thesis.tex").write_text("a year's work")
    with pytest.raises(ModelError, match=r"not part of a model.*thesis.tex"):
        save_folder(saved, pretrained, params)
    assert (saved / "thesis.tex").exists()
    with pytest.raises(ModelError, match="that the model was read from"):
        save_folder(folder, pretrained, params)


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_failed_write_changes_nothing_and_a_kill_leaves_the_old_or_the_new_folder(
    tmp_path, monkeypatch, exchanges
):
    pretrained, _, params = load(FIXTURES / "bert")
    saved = tmp_path / "saved"
    save_folder(saved, pretrained, params)
    zeros = jax.tree.map(jnp.zeros_like, params)

    def full(_):
        raise OSError(28, "No space left on device")

    def killed(folder, **_):
        (folder / "config.json").unlink(missing_ok=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, "fsync", full)
        with pytest.raises(ModelError, match=r"the model cannot be written to .*No space left"):
            save_folder(saved, pretrained, zeros)
    assert_same_bits(load(saved)[2], params)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]

    monkeypatch.setattr(saving.shutil, "rmtree", killed)
    if not exchanges:
        library = SimpleNamespace(renameat2=lambda *_: -1)
        monkeypatch.setattr(atomic.ctypes, "CDLL", lambda _: library)
    with pytest.raises(KeyboardInterrupt):
        save_folder(saved, pretrained, zeros)
    assert_same_bits(load(saved)[2], zeros)
