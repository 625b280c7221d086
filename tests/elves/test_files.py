"""Packed files and their blocks: contents, how they are read, and rejected files."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import elves
from elves.blocks import CODECS, Coder, Words
from elves.files import PackedFile
from elves.folders import check_path, pack_path, restore_path
from elves.writing import Options


def noise(*shape, scale=0.05, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(scale=scale, size=shape).astype(dtype)


def tensors():
    """Returns a tensor of each kind, some with several blocks."""
    odd = noise(5000)
    odd[:8] = [np.nan, -np.nan, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3e38]
    nearly = noise(700, 512)
    nearly[350] = 0  # between equal ends
    return {
        "w": noise(700, 512),
        "nearly": nearly,
        "cast": noise(1200, 512, seed=1, dtype=ml_dtypes.bfloat16),
        "half": noise(300, dtype=np.float16),
        "double": noise(5000, dtype=np.float64),
        "odd": odd,
        "same": odd.copy(),
        "none": np.zeros((0, 3), np.float32),
        "scalar": np.float32(0.5).reshape(()),
        "mask": np.array([True, False]),
        "ids": np.arange(512),
        "bytes": np.tile(np.arange(7, dtype=np.uint8), 900),
        "zeros": np.zeros(400_000, np.float32),
    }


def same_bits(x, y):
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "x.safetensors"
    elves.save(path, tensors())
    return path


def test_every_tensor_is_restored_bit_for_bit_with_any_number_of_threads(packed, tmp_path):
    elves.save(tmp_path / "y.safetensors", tensors(), threads=3)
    assert (tmp_path / "y.safetensors").read_bytes() == packed.read_bytes()
    assert check_path(packed)[0] == 1
    for threads in (1, 3):
        with elves.open(packed, threads=threads) as file:
            assert list(file.keys()) == list(tensors())
            for name, x in tensors().items():
                assert same_bits(file[name], x), name


def test_a_bound_applies_to_float32_and_everything_else_is_lossless(tmp_path):
    elves.save(tmp_path / "x.safetensors", tensors(), bound=3e-6)
    with PackedFile(tmp_path / "x.safetensors") as file:
        for name, x in tensors().items():
            back, described = file[name], file.header.tensors[name]
            if x.dtype != np.float32:
                assert same_bits(back, x)
                assert described.bound is None
                continue
            finite = np.isfinite(x)
            assert back[~finite].tobytes() == x[~finite].tobytes()
            np.testing.assert_array_equal(np.signbit(back), np.signbit(x))
            error = np.abs(back[finite].astype(np.float64) - x[finite].astype(np.float64))
            assert error.max(initial=0) == described.error <= 3e-6
        assert file.header.tensors["w"].error > 1e-6
        assert file.header.tensors["w"].packed_bytes < 0.55 * tensors()["w"].nbytes


def test_a_slice_equals_the_same_slice_in_numpy(packed):
    whole = tensors()["w"]
    rows = slice(500, 600), slice(0, 600, 7)
    with elves.open(packed) as file:
        for index in ((slice(None),), (rows[0], slice(7, 9)), (-1, 3), rows[1:], (Ellipsis, 2)):
            assert same_bits(file.get_slice("w")[index], np.asarray(whole[index]))


@pytest.mark.slow
def test_a_change_to_any_byte_is_detected(tmp_path):
    path = tmp_path / "x.safetensors"
    x = noise(12, 20)
    saved = {
        "w": x,
        "b": noise(300, seed=2, dtype=ml_dtypes.bfloat16),
        "twice": x,
        "z": np.zeros(99),
        "i": np.arange(40),
    }
    elves.save(path, saved)
    elves.save(tmp_path / "lossy.safetensors", {"w": x}, bound=1e-4)
    for name in (path.name, "lossy.safetensors"):
        whole = (tmp_path / name).read_bytes()
        for at in range(0, len(whole), 5):
            changed = bytearray(whole)
            changed[at] ^= 1 + at % 255
            path.write_bytes(changed)
            with pytest.raises(elves.ElvesError):
                check_path(path)
        path.write_bytes(whole)
        check_path(path)


# Packed by 0.2: losslessly, with a bound, against a base, as plain bytes, and with `--paper`.
FIXTURES = Path(__file__).parents[1] / "fixtures" / "packed"


def test_files_from_earlier_versions_are_restored_except_for_the_papers_codecs(tmp_path):
    # The checksums were written then, from the original files.
    for name, base in (
        ("lossless.safetensors", None),
        ("bounded.safetensors", None),
        ("from_base.safetensors", FIXTURES / "base"),
        ("folder", None),
    ):
        assert check_path(FIXTURES / name, base=base)[0] == 1
        restore_path(FIXTURES / name, tmp_path / name, base=base)
    assert (tmp_path / "folder" / "mere").read_bytes() == bytes(range(100)) * 50
    with pytest.raises(
        elves.ElvesError, match="block 0: only version 0.2 can read the codec elf24"
    ):
        check_path(FIXTURES / "paper.safetensors")


def test_a_bound_above_a_tensors_root_mean_square_raises_an_error_that_suggests_a_bound(tmp_path):
    both = {"w": noise(1000), "small": noise(1000, scale=1e-3), "zero": np.zeros(9, np.float32)}
    expected = r"`small` in .* bound 0.01 exceeds .*square, 0.00\d+\. .*is 2\^-10\."
    with pytest.raises(elves.ElvesError, match=expected):
        elves.save(tmp_path / "x.safetensors", both, bound=0.01)
    assert not list(tmp_path.iterdir())
    elves.save(tmp_path / "x.safetensors", both, bound=2**-10)


def test_a_bound_for_optimizer_state_is_rejected(tmp_path):
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    for name in ("leaves/0/nu@0,0", "exp_avg_sq.w"):
        save_file({"w": noise(99), name: noise(99, seed=1)}, source)
        with pytest.raises(elves.ElvesError, match=f"`{name}` in .*: optimizer state cannot"):
            pack_path(source, target, Options(bound=1e-6))
    assert not target.exists()


def model(folder, seed=0):
    """Writes a model in two files."""
    (folder / "more").mkdir(parents=True)
    shared = noise(64, 32, seed=9)
    first = {"model.a": noise(300, 200, seed=seed), "model.tied": shared}
    save_file(first, folder / "one.safetensors", {"format": "pt"})
    save_file({"head": shared, "b": noise(50, seed=seed)}, folder / "more" / "two.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def content(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def tuned(folder, base):
    """Writes a model that differs a little from `base`, with another prefix and a new head."""
    folder.mkdir()
    old = load_file(base / "one.safetensors")
    a = old["model.a"] + noise(*old["model.a"].shape, scale=1e-5, seed=5)
    tied = old["model.tied"].astype(ml_dtypes.bfloat16)
    save_file({"bert.a": a, "bert.tied": tied, "new": noise(70)}, folder / "x.safetensors")
    return folder


def test_a_base_makes_a_packed_model_smaller_and_is_needed_to_read_it(tmp_path):
    base = model(tmp_path / "base")
    source = tuned(tmp_path / "in", base)
    (alone,) = pack_path(source, tmp_path / "alone", Options())
    (packed,) = pack_path(source, tmp_path / "out", Options(), base=base)
    for name in ("bert.a", "bert.tied"):
        assert packed.header.tensors[name].codec == "delta"
    assert packed.after < 0.8 * alone.after
    restore_path(tmp_path / "out", tmp_path / "back")
    assert content(tmp_path / "back") == content(source)
    # A different base is detected, a missing one named, and a moved one found.
    model(tmp_path / "wrong", seed=3)
    with pytest.raises(elves.ElvesError, match="`bert.a` .* block 0: .*a different `model.a`"):
        restore_path(tmp_path / "out", tmp_path / "back2", base=tmp_path / "wrong")
    base.rename(tmp_path / "moved")
    with pytest.raises(elves.ElvesError, match="`bert.a` .*the file .*base.* is missing.*--base"):
        restore_path(tmp_path / "out", tmp_path / "back2")
    assert not (tmp_path / "back2").exists()
    # A packed base also works.
    pack_path(tmp_path / "moved", tmp_path / "packed", Options())
    restore_path(tmp_path / "out", tmp_path / "back2", base=tmp_path / "packed")
    assert content(tmp_path / "back2") == content(source)


CODER = Coder()
SPECIAL = np.array(
    [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38, -1.0, 1.0, 0.9999999],
    np.float32,
)


def decoded(block, words, size):
    out = np.empty(size, np.uint8)
    CODER.decode(np.frombuffer(block, np.uint8), words, None, out)
    return out


@pytest.mark.parametrize("power", [-30, -23, -9])
def test_elf_rounds_to_the_nearest_step_and_keeps_non_finite_values(power):
    step = 2.0**power
    x = np.random.default_rng(0).normal(scale=0.03, size=40_000).astype(np.float32)
    x[: SPECIAL.size] = SPECIAL
    words = Words(4, True, step)
    encoded = CODER.encode(x.view(np.uint8), words, None)
    restored = decoded(encoded.data, words, x.nbytes)
    # Computed in float64, which can represent every multiple of the step here.
    inside = np.abs(x) < np.float32(2**31 * step)
    expected = x.copy()
    rounded = np.rint(x[inside].astype(np.float64) / step) * step
    expected[inside] = np.copysign(rounded, x[inside]).astype(np.float32)
    assert CODECS[encoded.codec] == ("planes" if power == -30 else "elf")
    if power != -30:
        assert restored.tobytes() == expected.tobytes()
        assert 0 < encoded.error <= step / 2
