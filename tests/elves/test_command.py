"""`python -m train.compress`, and models that are loaded from its output."""

import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import elves
from elves.files import PackedFile
from tests.comparisons import assert_same_bits
from tests.hf_models import FIXTURES, load
from train import compress
from train.huggingface.loading import ModelError, read_folder


@pytest.fixture
def model(tmp_path):
    """Returns a folder with a tensor that is large enough to shrink."""
    folder = tmp_path / "model"
    folder.mkdir()
    rng = np.random.default_rng(0)
    tensors = {"w": rng.normal(scale=0.02, size=(300, 400)), "b": rng.normal(scale=0.02, size=400)}
    save_file({k: v.astype(np.float32) for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def packed_llama(tmp_path):
    """Returns a function that packs a model for the scripts; it is too small to shrink."""
    folder = shutil.copytree(FIXTURES / "llama2", tmp_path / "llama")
    path = folder / "model.safetensors"

    def pack(bound=None):
        elves.save(path, load_file(FIXTURES / "llama2" / path.name), bound)
        return folder

    return pack


def test_a_packed_folder_loads_as_the_same_model_or_within_its_bound(packed_llama):
    folder = packed_llama()
    for scan_layers in (False, True):
        _, _, plain = load(FIXTURES / "llama2", scan_layers=scan_layers)
        _, _, packed = load(folder, scan_layers=scan_layers)
        assert_same_bits(packed, plain)
    _, _, plain = load(FIXTURES / "llama2")
    _, _, packed = load(packed_llama(2**-12))
    errors = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), packed, plain)
    assert 2**-14 < max(jax.tree.leaves(errors)) <= 2**-12


def test_a_model_with_a_damaged_tensor_cannot_be_loaded(packed_llama, capsys):
    model = packed_llama()
    path = model / "model.safetensors"
    with PackedFile(path) as file:
        name = "model.layers.1.mlp.up_proj.weight"
        at = file._begin[name][0]
    data = bytearray(path.read_bytes())
    data[at + 20] ^= 16
    path.write_bytes(data)
    assert compress.main(["--check", str(model)]) == 2
    assert f"`{name}` in {path}, block 0: the bytes do not match" in capsys.readouterr().err
    with pytest.raises(ModelError, match=f"`{name}` in .*, block 0: .* Copy the file again"):
        load(model)
    path.write_bytes(data[:-1])
    with pytest.raises(ModelError, match="The header of .* is damaged: the file has"):
        read_folder(model)


def test_a_packed_folder_is_restored_and_checked(model, tmp_path, capsys):
    (model / "more").mkdir()
    shutil.copy(model / "model.safetensors", model / "more" / "other.safetensors")
    packed, back = str(tmp_path / "packed"), str(tmp_path / "back")
    assert compress.main([str(model), packed, "--threads", "2"]) == 0
    assert compress.main(["--check", packed]) == 0
    assert "ratio 1.2" in (out := capsys.readouterr().out)
    assert "is intact: 2 packed file" in out
    assert compress.main(["--restore", packed, back]) == 0
    for path in ("config.json", "model.safetensors", "more/other.safetensors"):
        assert (tmp_path / "back" / path).read_bytes() == (model / path).read_bytes()
