"""How small do model files become, and how fast, beside ZipNN and zstd?

    python -m benchmarks.elves MODEL.safetensors... --rounds 9
    python -m benchmarks.elves TUNED.safetensors --base BASE.safetensors

The first prints, of the float32 weights of each file and of their casts to bfloat16, the ratio and
the median MB/s of each contender, packing and restoring, and the median over the rounds of how many
as long as ours it takes. One thread, in memory, all in one process, taking turns; seconds are those
of the processor, as other work may be on the machine. Ours packs with what it always does: each
block is decoded and compared, and has its checksums. "not compared" is without that, as the others
are. Then the bounds.

The second is of one file and the model that it was made from. Peers that are not installed are
named and left out (ZipNN needs torch). Answers: `benchmarks/LOG.md`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import zstandard

from elves.blocks import BLOCK, Coder, Words
from elves.files import PlainFile, open_tensors
from elves.folders import pack_path
from elves.writing import Options, Piece, smallest_rms

OURS = "ours"


class Contender(NamedTuple):
    """Someone who packs and restores the same bytes; `restore` gives them, or their checksum."""

    name: str
    pack: Callable[[], Any]
    restore: Callable[[Any], Any]
    size: Callable[[Any], int]
    before: Callable[[], Any] = lambda: None  # is not timed
    exact: bool = True
    restores: bool = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--base", type=Path)
    arguments = parser.parse_args()
    if importlib.util.find_spec("zipnn") is None:
        print("not installed, left out: zipnn")
    for path in arguments.files:
        if arguments.base:
            from_base(path, arguments.base, arguments.rounds)
        else:
            x = weights(path)
            cast = x.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint8)
            compare(f"{path.name}, float32", x, "float32", arguments.rounds)
            compare(f"{path.name}, bfloat16", cast, "bfloat16", arguments.rounds)
            bounds(path)


def weights(path: Path) -> np.ndarray:
    """All float32 of a file, one behind the other, as bytes."""
    with PlainFile(path) as file:
        names = [name for name, info in file.tensors.items() if info.dtype == "F32"]
        return np.concatenate([file.read(name, 0, file.tensors[name].bytes) for name in names])


class NotCompared(Coder):
    """Packs without looking whether it can be restored."""

    def _decode(self, codec: Any, body: Any, words: Any, base: Any, out: Any) -> None:
        pass

    def _compared(self, x: Any, back: Any, codec: Any, words: Any) -> float:
        return 0.0


def blockwise(
    name: str, data: np.ndarray, words: Words, coder: Coder, *, exact: bool = True
) -> Contender:
    # Memory that is there already, as that of a file is; peers have no way to be given it.
    out, packed = np.empty(data.size, np.uint8), np.empty(2 * data.size, np.uint8)

    def pack() -> list[np.ndarray]:
        blocks, end = [], 0
        for i in range(0, data.size, BLOCK):
            block = coder.encode(data[i : i + BLOCK], words).data
            begin, end = end, end + block.size
            packed[begin:end] = block
            blocks.append(packed[begin:end])
        return blocks

    def restore(blocks: list[np.ndarray]) -> np.ndarray:
        for i, block in enumerate(blocks):
            coder.decode(block, words, None, out[i * BLOCK : (i + 1) * BLOCK])
        return out

    def size(blocks: list[np.ndarray]) -> int:
        return sum(block.size for block in blocks)

    restores = not isinstance(coder, NotCompared)  # it does not know the checksums
    return Contender(name, pack, restore, size, exact=exact, restores=restores)


def contenders(data: np.ndarray, dtype: str) -> list[Contender]:
    words = Words(4 if dtype == "float32" else 2, True)
    packer, unpacker = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    several = [
        blockwise(OURS, data, words, Coder()),
        blockwise("ours, not compared", data, words, NotCompared()),
        Contender("zstd-3", lambda: packer.compress(data), unpacker.decompress, len),
    ]
    if dtype == "float32":
        bounded = Words(4, True, 2**-23)
        several.append(blockwise("ours, 2^-24", data, bounded, Coder(), exact=False))
    if importlib.util.find_spec("zipnn") is not None:
        several.insert(2, zipnn_contender(data, dtype))
    return several


def zipnn_contender(data: np.ndarray, dtype: str) -> Contender:
    zipnn: Any = importlib.import_module("zipnn")
    codec = zipnn.ZipNN(bytearray_dtype=dtype, input_format="byte", threads=1)
    copies: list[bytearray] = []

    def before() -> None:  # it writes over what it is given
        copies[:] = [bytearray(data.data)]

    return Contender("ZipNN", lambda: codec.compress(copies[0]), codec.decompress, len, before)


def compare(title: str, data: np.ndarray, dtype: str, rounds: int) -> None:
    print(f"\n{title}: {data.size / 1e6:.1f} MB; ratio, MB/s, times as fast as it")
    rivals = contenders(data, dtype)
    packing: dict[str, list[float]] = {c.name: [] for c in rivals}
    restoring: dict[str, list[float]] = {c.name: [] for c in rivals}
    sizes = {}
    for turn in range(rounds + 1):  # the first one compiles
        for c in rivals:
            c.before()
            begin = time.process_time()
            packed = c.pack()
            middle = time.process_time()
            back = c.restore(packed) if c.restores else b""
            end = time.process_time()
            sizes[c.name] = c.size(packed)
            if c.exact and c.restores:
                assert np.array_equal(np.frombuffer(back, np.uint8), data), c.name
            if turn:
                packing[c.name].append(middle - begin)
                restoring[c.name].append(end - middle)
    for c in rivals:
        p, r = packing[c.name], restoring[c.name]
        line = f"{c.name:20} {data.size / sizes[c.name]:.4f}"
        line += f"  pack {_speed(data, p):5.0f} {_times(packing[OURS], p):5.2f}"
        if c.restores:
            line += f"  restore {_speed(data, r):5.0f} {_times(restoring[OURS], r):5.2f}"
        print(line, flush=True)


def _speed(data: np.ndarray, seconds: list[float]) -> float:
    return data.size / 1e6 / statistics.median(seconds)


def _times(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def bounds(path: Path) -> None:
    """Ratios of the whole file: lossless, at larger and larger bounds."""
    with PlainFile(path) as file, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.safetensors"
        rows = [("lossless", Options())]
        rows += [(f"2^{power}", Options(bound=2.0**power)) for power in range(-24, -8, 2)]
        sensible = smallest_rms(_pieces(file))
        if sensible is not None:
            print(f"largest sensible bound 2^{math.log2(sensible[0]):.2f}, for {sensible[1]}")
        for name, options in rows:
            if options.bound and sensible and options.bound > sensible[0]:
                continue
            (packed,) = pack_path(path, out, options)
            print(f"{name:14} {packed.before / packed.after:.4f} of the whole file")
            out.unlink()


def _pieces(file: PlainFile) -> list[Piece]:
    return [
        Piece(name, info.dtype, info.shape, file.read(name, 0, info.bytes))
        for name, info in file.tensors.items()
    ]


def from_base(path: Path, base: Path, rounds: int) -> None:
    """A model and the one that it was made from: all of it, and without its embeddings."""
    with PlainFile(path) as tuned, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.safetensors"
        (result,) = pack_path(path, out, Options(), base=base)  # compiles
        times = []
        for _ in range(rounds):
            out.unlink()
            begin = time.process_time()
            pack_path(path, out, Options(), base=base)
            times.append(time.process_time() - begin)
        header = result.header
        assert header is not None
        begin = time.process_time()
        with open_tensors(out) as packed:
            for name, info in tuned.tensors.items():
                back = packed.read(name, 0, info.bytes)
                assert np.array_equal(back, tuned.read(name, 0, info.bytes)), name
        restoring = time.process_time() - begin
        groups = {
            "all": list(header.tensors.values()),
            "without embeddings": [
                t for t in header.tensors.values() if not re.search("embed", t.name)
            ],
        }
        for title, tensors in groups.items():
            data = np.concatenate([tuned.read(t.name, 0, t.bytes) for t in tensors])
            ours = data.size / sum(t.packed_bytes for t in tensors)
            line = f"{path}, {title}, {data.size / 1e6:.1f} MB: ours {ours:.4f}"
            if importlib.util.find_spec("zipnn") is not None:
                peer = zipnn_contender(data, "float32")
                peer.before()
                theirs = data.size / peer.size(peer.pack())
                line += f", ZipNN {theirs:.4f}, {ours / theirs:.3f} times its"
            print(line)
        size = result.before / 1e6
        print(f"pack {size / statistics.median(times):.0f} MB/s, restore {size / restoring:.0f}")


if __name__ == "__main__":
    main()
