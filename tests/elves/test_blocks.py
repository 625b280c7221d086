"""Block codecs: rounding within a bound, and rejected blocks; `test_files.py` tests the rest."""

import struct
import zlib

import numpy as np
import pytest
import zstandard

from elves.blocks import CODECS, Coder, Damaged, Words

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


def sealed(body, checksum, codec):
    """Returns a block with valid checksums."""
    tail = struct.pack("<IB", checksum, codec) + body
    return struct.pack("<I", zlib.crc32(tail)) + tail


BOMB = zstandard.ZstdCompressor().compress(bytes(1 << 24))


@pytest.mark.parametrize(
    ("codec", "body", "message"),
    [
        ("elf", struct.pack("<hBI", 900, 0, 0), r"step 2\*\*900"),
        ("zstd", BOMB, "the frame has 16777216 bytes, not 400"),
        ("distance", BOMB, "only version 0.2 can read the codec distance"),
        ("elf", struct.pack("<hBI", -23, 1, 2**31), "2147483648 outliers"),
        ("elf", struct.pack("<hBI", -23, 0, 1) + struct.pack("<II", 100, 0), "outlier 100 is out"),
        ("delta", bytes(16), "has no base"),
        ("stored", bytes(400), "the checksum 5"),
    ],
)
def test_a_forged_block_is_rejected_before_it_takes_memory(codec, body, message):
    block = sealed(body, 5, CODECS.index(codec))
    with pytest.raises(Damaged, match=message):
        decoded(block, Words(4, True, 2**-23), 400)
