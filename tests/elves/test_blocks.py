"""Block codecs: lossless or within the bound, and all damage is detected."""

import struct
import zlib

import ml_dtypes
import numpy as np
import pytest
import zstandard

from elves.blocks import CODECS, HEAD, Coder, Damaged, Words

CODER = Coder()
SPECIAL = np.array(
    [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38, -1.0, 1.0, 0.9999999],
    np.float32,
)


def weights(n, scale=0.03, seed=0):
    x = np.random.default_rng(seed).normal(scale=scale, size=n).astype(np.float32)
    x[: SPECIAL.size] = SPECIAL[:n]
    return x


def raw(x):
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def restored(block, words, size, base=None):
    out = np.empty(size, np.uint8)
    CODER.decode(np.frombuffer(block, np.uint8), words, base and (lambda: base()), out)
    return out


def round_trip(x, words, base=None):
    encoded = CODER.encode(raw(x), words, base)
    back = restored(encoded.data, words, x.nbytes, base is not None and (lambda: base))
    return encoded, back.view(x.dtype)


F32, BF16 = Words(4, True), Words(2, True)


@pytest.mark.parametrize(
    ("x", "words", "codec"),
    [
        (weights(5001), F32, "planes"),
        (weights(5001).astype(ml_dtypes.bfloat16), BF16, "planes"),
        (weights(5001).clip(-9, 9).astype(np.float16), BF16, "planes"),
        (weights(5001).astype(np.float64), Words(8, True), "planes"),
        (np.arange(5000), Words(8, False), "planes"),
        (np.tile(np.arange(7, dtype=np.uint8), 900), Words(1, False), "zstd"),
        (np.full(5000, np.float32(-0.0)), F32, "constant"),
        (np.random.default_rng(0).integers(0, 256, 5000, np.uint8), Words(1, False), "stored"),
        (weights(1), F32, "stored"),
    ],
    ids=lambda x: str(getattr(x, "dtype", "")),
)
def test_lossless_codecs_are_bit_exact(x, words, codec):
    encoded, back = round_trip(x, words)
    assert raw(back).tobytes() == raw(x).tobytes()
    assert (CODECS[encoded.codec], encoded.error) == (codec, 0.0)
    assert len(encoded.data) <= x.nbytes + HEAD


@pytest.mark.parametrize("power", [-30, -23, -9])
def test_elf_rounds_to_the_nearest_step_and_keeps_non_finite_values(power):
    step = 2.0**power
    x = weights(40_000)
    encoded, back = round_trip(x, Words(4, True, step))
    # Entirely in float64, which can represent each step of each weight.
    inside = np.abs(x) < np.float32(2**31 * step)
    expected = x.copy()
    rounded = np.rint(x[inside].astype(np.float64) / step) * step
    expected[inside] = np.copysign(rounded, x[inside]).astype(np.float32)
    assert CODECS[encoded.codec] == ("planes" if power == -30 else "elf")
    if power != -30:
        assert back.tobytes() == expected.tobytes()
        assert 0 < encoded.error <= step / 2


@pytest.mark.parametrize(
    ("dtype", "words", "scale", "share"),
    [("f4", F32, 1e-5, 0.7), (ml_dtypes.bfloat16, BF16, 1e-3, 0.5)],
)
def test_differences_from_a_base_are_small_and_exact(dtype, words, scale, share):
    base = weights(50_000)  # or the float32 values whose casts are the words
    x = base + np.random.default_rng(1).normal(scale=scale, size=base.size).astype(np.float32)
    x[:12] = -SPECIAL
    x = x.astype(dtype)
    encoded, back = round_trip(x, words, raw(base))
    assert CODECS[encoded.codec] == "delta"
    assert back.tobytes() == x.tobytes()
    assert len(encoded.data) < share * x.nbytes


def sealed(body, checksum, codec):
    """Returns a block with valid checksums."""
    tail = struct.pack("<IB", checksum, codec) + body
    return struct.pack("<I", zlib.crc32(tail)) + tail


BOMB = zstandard.ZstdCompressor().compress(bytes(1 << 24))


@pytest.mark.parametrize(
    ("codec", "body", "message"),
    [
        ("elf", struct.pack("<hBI", 900, 0, 0), r"step 2\*\*900"),
        ("planes", struct.pack("<4I", 100, 100, 100, 2**32 - 1), "only 0 of 100 bytes"),
        ("zstd", BOMB, "the frame has 16777216 bytes, not 400"),
        ("distance", BOMB, "only version 0.2 reads the codec distance"),
        ("elf", struct.pack("<hBI", -23, 1, 2**31), "2147483648 outliers"),
        ("elf", struct.pack("<hBI", -23, 0, 1) + struct.pack("<II", 100, 0), "outlier 100 is out"),
        ("stored", bytes(399), "399 bytes, not 400"),
        ("delta", bytes(16), "has no base"),
        ("stored", bytes(400), "the checksum 5"),
    ],
)
def test_a_forged_block_is_rejected_before_it_takes_memory(codec, body, message):
    block = sealed(body, 5, CODECS.index(codec))
    with pytest.raises(Damaged, match=message):
        restored(block, Words(4, True, 2**-23), 400)
