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
    names,
    outputs,
)
from train.huggingface import saving
from train.huggingface.loading import ModelError, load_weights, newly_drawn, read_folder
from train.huggingface.saving import dtype_of, save_folder
from train.huggingface.tensors import transpose
from train.model.decoder import LinearRope, Llama3Rope


@pytest.mark.parametrize(
    ("name", "scan_layers"), [("llama3", False), ("bert", False), *((x, True) for x in FAMILIES)]
)
def test_outputs_equal_those_of_transformers(name, scan_layers):
    _, graphdef, params = load(FIXTURES / name, scan_layers=scan_layers)
    logits = outputs(name, graphdef, params)
    assert logits.dtype == jnp.float32
    assert_close(logits, expected_of(name))


@pytest.mark.parametrize(("name", "scan_layers"), [("qwen3", True), ("bert", False)])
def test_low_precision_is_used_and_not_promoted(name, scan_layers):
    graphdef, shapes = make(
        read_folder(FIXTURES / name), weight_dtype=jnp.bfloat16, scan_layers=scan_layers
    )
    for leaf, x in zip(names(shapes), jax.tree.leaves(shapes), strict=True):
        assert x.dtype == (jnp.float32 if "norm/" in leaf else jnp.bfloat16), leaf
    with jax.numpy_dtype_promotion("standard"):  # jax's own attention promotes
        logits = jax.eval_shape(lambda p: outputs(name, graphdef, p), shapes)
    assert logits.dtype == jnp.float32


@pytest.mark.parametrize("saved", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
def test_weights_are_rounded_once_to_the_requested_dtype(tmp_path, saved):
    folder = copied("llama2", tmp_path)
    change_tensors(folder, lambda ts: {name: t.astype(saved) for name, t in ts.items()})
    weights = load_file(folder / "model.safetensors")
    for dtype in (jnp.float32, jnp.bfloat16):
        _, _, params = load(folder, weight_dtype=dtype, scan_layers=True)
        for i in range(2):
            expected = weights[f"model.layers.{i}.mlp.up_proj.weight"].T.astype(dtype)
            kernel = params["blocks"]["up"]["kernel"][i]
            assert kernel.dtype == dtype
            np.testing.assert_array_equal(kernel, expected)
        assert params["norm"]["scale"].dtype == jnp.float32


def test_transpose_equals_numpys():
    for shape in ((64, 256), (300, 65), (7, 130)):
        for dtype in (np.float32, ml_dtypes.bfloat16):
            x = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
            out = np.zeros(shape[::-1], dtype)
            transpose(x, out)
            np.testing.assert_array_equal(out, x.T)


def test_heads_missing_from_the_folder_or_meant_for_other_labels_are_initialized(tmp_path):
    pretrained = read_folder(FIXTURES / "bert_masked")
    assert pretrained.labels is None
    token_classifier = copied("bert", tmp_path)
    change_config(token_classifier, architectures=["BertForTokenClassification"])
    assert read_folder(token_classifier).labels is None
    _, shapes = make(pretrained, labels=3)
    heads = ("classifier/bias", "classifier/kernel", "pooler/bias", "pooler/kernel")
    assert newly_drawn(pretrained, shapes) == heads
    params, again, redrawn = (load_weights(pretrained, shapes, seed=s) for s in (0, 0, 1))
    assert_same_bits(params, again)
    kernel = params["classifier"]["kernel"]
    assert not np.array_equal(kernel, redrawn["classifier"]["kernel"])
    assert 0.01 < np.std(kernel) < 0.03
    assert not np.any(params["pooler"]["bias"])

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
    # In addition to what transformers 5 writes, as model cards suggest for longer contexts.
    default = {"rope_type": "default", "rope_theta": 5000.0}
    change_config(folder, rope_parameters=default)
    assert read_folder(folder).config == new._replace(rope_base=5000.0)


def test_qwens_windows_apply_to_its_listed_layers(tmp_path):
    folder = copied("qwen3", tmp_path)
    for uses, first, window in ((False, 0, None), (True, 0, 5), (True, 28, None)):
        changes = {"use_sliding_window": uses, "sliding_window": 5, "max_window_layers": first}
        change_config(folder, layer_types=None, **changes)
        assert read_folder(folder).config.window == window


def old_names(tensors):
    def old(name):
        if "LayerNorm" not in name:
            return name
        return name.replace(".weight", ".gamma").replace(".bias", ".beta")

    return {old(name): t for name, t in tensors.items()}


def without_prefix(tensors):
    return {name.removeprefix("bert."): t for name, t in tensors.items()}


def with_tensors(*names):
    return lambda tensors: tensors | {name: np.ones(2, np.float32) for name in names}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("bert", without_prefix),
        ("bert", old_names),
        ("bert", with_tensors("bert.embeddings.position_ids", "cls.predictions.bias")),
        ("llama2", with_tensors("model.layers.0.self_attn.rotary_emb.inv_freq")),
        ("qwen2", lambda ts: ts | {"lm_head.weight": ts["model.embed_tokens.weight"]}),
    ],
)
def test_renamed_and_unneeded_tensors_give_the_same_weights(tmp_path, name, change):
    folder = copied(name, tmp_path)
    change_tensors(folder, change)
    assert_same_bits(load(folder)[2], load(FIXTURES / name)[2])


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


def test_a_split_vocabulary_is_saved_as_one_matrix(tmp_path):
    pretrained, _, params = load(FIXTURES / "qwen3", scan_layers=True, parts=2)
    assert params["head"]["kernel"].shape == (2, 16, 31)
    save_folder(tmp_path / "saved", pretrained, params)
    assert_same_bits(load(tmp_path / "saved")[2], load(FIXTURES / "qwen3")[2])


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
    assert_same_bits(load(folder)[2], params)


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
