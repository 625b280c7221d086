"""Hugging Face models on a mesh: results do not change."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests.comparisons import assert_same_bits
from tests.hf_models import FIXTURES, make
from train.distributed.sharding import batch_sharding, make_mesh, weight_shardings
from train.huggingface.loading import load_weights, read_folder
from train.huggingface.saving import save_folder
from train.model import cross_entropy

ATOL = 1e-6  # float32 gradients below 1, summed over devices and parts in a different order


def mesh():
    return make_mesh("data=2,fsdp=2,tensor=2")


@pytest.mark.parametrize(("name", "scan_layers"), [("llama3", False), ("bert_masked", True)])
def test_a_mesh_changes_no_bits_of_the_weights_or_the_files(tmp_path, name, scan_layers):
    pretrained = read_folder(FIXTURES / name)
    _, shapes = make(pretrained, scan_layers=scan_layers)
    shardings = weight_shardings(mesh(), shapes)
    alone, spread = load_weights(pretrained, shapes), load_weights(pretrained, shapes, shardings)
    assert_same_bits(alone, spread)
    assert jax.tree.map(lambda x: x.sharding, spread) == shardings
    files = []
    for params in (alone, spread):
        save_folder(tmp_path / "saved", pretrained, params)
        files.append((tmp_path / "saved" / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_losses_with_a_split_vocabulary_equal_those_with_all_logits(monkeypatch):
    pretrained, divided = read_folder(FIXTURES / "qwen2"), mesh()
    tokens = np.random.default_rng(0).integers(0, 48, (8, 9))

    def loss_and_gradients(placing, shardings):
        graphdef, shapes = make(pretrained, scan_layers=True, stream_sharding=placing)
        params = load_weights(pretrained, shapes, shardings)

        def loss(params):
            return nnx.merge(graphdef, params).losses(tokens[:, :-1], tokens[:, 1:]).mean()

        out_shardings = shardings and (None, shardings)
        return jax.jit(jax.value_and_grad(loss), out_shardings=out_shardings)(params)

    expected = loss_and_gradients(None, None)
    monkeypatch.setattr(cross_entropy, "PART", 20)
    _, shapes = make(pretrained, scan_layers=True)
    by_parts = loss_and_gradients(batch_sharding(divided, 8), weight_shardings(divided, shapes))
    for one, other in zip(*map(jax.tree.leaves, (by_parts, expected)), strict=True):
        np.testing.assert_allclose(one, other, atol=ATOL)
