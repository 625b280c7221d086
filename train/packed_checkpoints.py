"""Checkpoints made smaller: the same folder with packed files, made again what it was to be read.

    checkpoints/300/state, engine, run   files as they were, or packed (`elves/folders.py`)
    checkpoints/300/checksums.json       size and CRC-32 of these
    checkpoints/300/unpacked.json        size and CRC-32 of what they were

What orbax has written is no file of tensors, but without compression each array lies in one of its
files as it is. It is looked for by its bytes, so nothing depends on how these files are built; what
is not found is packed as mere bytes. Parameters are written as differences from their masters,
which the engine's file has: they are their casts, but for updates that had not arrived.

There is no jax here: checkpoints are packed by a process of its own, `pack_checkpoint.py`.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import tensorstore as ts

from train.checksums import CHECKSUMS, checksums, damage
from train.elves.errors import ElvesError
from train.elves.files import PlainFile
from train.elves.folders import Array, Known, Result, pack_path, restore_path
from train.elves.whole import exchange, sync_folder, unfinished
from train.elves.writing import Options

#: In a packed checkpoint, the listing of the one that it was made from.
UNPACKED = "unpacked.json"

# Of a smaller array a line in the header costs what packing it would gain.
_LEAST = 4096
# Dtypes of zarr, and those of safetensors.
_DTYPES = {"<f4": "F32", "<f2": "F16", "bfloat16": "BF16", "<i4": "I32", "<f8": "F64", "<i8": "I64"}
# Elements that are compared to see of which master a parameter is the cast, in so many stretches.
_COMPARED, _STRETCHES = 256, 16
# Share of them that must be equal. By chance it is one in 100; where updates are pending, a tenth.
_EQUAL = 0.05


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder looks like a checkpoint of a run, packed or not."""
    return (folder / CHECKSUMS).is_file() and (folder / "state").is_dir()


def is_packed_checkpoint(folder: Path) -> bool:
    """Whether the files of a checkpoint are packed."""
    return (folder / UNPACKED).is_file()


def pack_to(folder: Path, target: Path, *, threads: int = 1) -> list[Result]:
    """Makes a packed copy of a checkpoint, which `restore_to` makes again what it was.

    Raises:
        ElvesError: If the checkpoint is damaged or packed already, or `target` is there.
        OSError: If it cannot be written. No part of it is left then.
    """
    if is_packed_checkpoint(folder):
        raise ElvesError(
            f"expected a checkpoint that is not packed, got {folder}, which is. Name another one."
        )
    # What is damaged would be kept as if it were whole.
    if problem := damage(folder):
        raise ElvesError(
            f"expected a whole checkpoint {folder}, got one that is damaged: {problem}. Take "
            "another one."
        )

    def seal(part: Path) -> None:
        (part / CHECKSUMS).rename(part / UNPACKED)
        with open(part / CHECKSUMS, "w", encoding="utf-8") as file:
            file.write(json.dumps(checksums(part), indent=1))
            file.flush()
            os.fsync(file.fileno())

    known = known_of(folder)
    return pack_path(folder, target, Options(threads=threads), known=known, finish=seal)


def pack_in_place(folder: Path, *, threads: int = 1) -> list[Result]:
    """Packs a checkpoint; under its name there is the one or the other, but for a moment.

    A kill in this moment leaves the old one under another name: `remove_leftovers` puts it back.

    Raises:
        ElvesError, OSError: As `pack_to`. The checkpoint is as it was then.
    """
    with unfinished(folder, folder=True) as part:
        found = pack_to(folder, part / folder.name, threads=threads)
        exchange(part / folder.name, folder)
        sync_folder(folder.parent)
    return found


def restore_to(folder: Path, target: Path, *, items: Sequence[str] = (), threads: int = 1) -> int:
    """Makes of a packed checkpoint what it was, checked by the checksums of then.

    Args:
        folder: The packed one.
        target: New.
        items: The folders in it that are wanted, if not all: then nothing is checked but them.
        threads: That decode.

    Returns:
        How many files had been packed.

    Raises:
        ElvesError: If it is damaged. Nothing is left then.
        OSError: If it cannot be written. Nothing is left then.
    """

    def unseal(part: Path) -> None:
        (part / UNPACKED).rename(part / CHECKSUMS)
        problem = None if items else damage(part)
        if problem:
            raise ElvesError(
                f"expected to restore the checkpoint {folder} as it was, got one that is damaged: "
                f"{problem}. Take another one."
            )

    def wanted(name: Path) -> bool:
        return not items or len(name.parts) == 1 or name.parts[0] in items

    return restore_path(folder, target, threads=threads, only=wanted, finish=unseal)


def known_of(folder: Path) -> Known:
    """What is in the files of a checkpoint, and which parameter belongs to which master."""
    arrays = _arrays(folder)
    with ExitStack() as stack:
        masters = {}
        for path in sorted((folder / "engine").glob("*.safetensors")):
            file = PlainFile(path)
            stack.callback(file.close)
            for name, info in file.tensors.items():
                if "/master@" in name:
                    data = file.read(name, 0, info.bytes)
                    if data.ctypes.data % 4 == 0:
                        where = (path.relative_to(folder), name)
                        masters.setdefault(info.shape, []).append((where, data.view(np.float32)))
        near = {}
        for path, some in arrays.items():
            with _mapped(folder / path) as mapped:
                for one in some:
                    if one.name.startswith("params.") and one.dtype in ("BF16", "F32"):
                        dtype = ml_dtypes.bfloat16 if one.dtype == "BF16" else np.float32
                        count = one.bytes // np.dtype(dtype).itemsize
                        x = np.frombuffer(mapped, dtype, count, one.begin)
                        master = _master_of(x, masters.get(one.shape, ()))
                        if master is not None:
                            near[path, one.name] = master
                        del x  # before the file is closed
    return Known(arrays, near, what="a checkpoint")


def _master_of(x: np.ndarray, masters: Sequence) -> tuple[Path, str] | None:
    """The master that has most of its casts in common with a parameter, if that is a share."""
    places = np.linspace(0, max(x.size - _COMPARED, 0), _STRETCHES).astype(np.int64)
    best, found = _EQUAL, None
    for where, master in masters:
        equal = count = 0
        for i in places:
            one, other = (y[i : i + _COMPARED].astype(ml_dtypes.bfloat16) for y in (x, master))
            equal += int((one.view(np.uint16) == other.view(np.uint16)).sum())
            count += one.size
        if equal > best * count:
            best, found = equal / count, where
    return found


def _arrays(folder: Path) -> dict[Path, list[Array]]:
    """Where orbax's arrays are in its files."""
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder.absolute()}/state/"})
    store = store.result()
    values = {}
    for key in store.list().result():
        name, _, part = key.decode().rpartition("/")
        if part == ".zarray":
            values[name] = json.loads(store.read(key).result().value)
    files = [p for p in sorted((folder / "state").rglob("*")) if p.parent.name == "d"]
    with ExitStack() as stack:
        mapped = {p: stack.enter_context(_mapped(p)) for p in files if p.stat().st_size >= _LEAST}
        ends = dict.fromkeys(mapped, 0)
        found: dict[Path, list[Array]] = {p.relative_to(folder): [] for p in mapped}
        for name, said in values.items():
            whole = said["chunks"] == said["shape"] and said["compressor"] is None
            dtype = _DTYPES.get(str(said["dtype"]))
            if not whole or dtype is None or said["order"] != "C" or said["filters"]:
                continue
            chunk = ".".join("0" for _ in said["shape"]) or "0"
            data = store.read(f"{name}/{chunk}").result().value
            if len(data) < _LEAST:
                continue
            place = _find(data, mapped, ends)
            if place is not None:
                path, begin = place
                one = Array(name, dtype, tuple(said["shape"]), begin, len(data))
                found[path.relative_to(folder)].append(one)
                ends[path] = begin + len(data)
    return {path: _apart(some) for path, some in found.items() if some}


def _find(data: bytes, mapped: dict[Path, mmap.mmap], ends: dict[Path, int]) -> tuple | None:
    """The file that has these bytes, and where."""
    for path, file in mapped.items():
        # Arrays are mostly written one behind the other.
        for start, stop in ((ends[path], ends[path] + len(data)), (0, len(file))):
            begin = file.find(data, start, stop)
            if begin >= 0:
                return path, begin
    return None


def _apart(arrays: list[Array]) -> list[Array]:
    """Without those that lie within others: arrays of equal bytes are found in one place."""
    found: list[Array] = []
    for one in sorted(arrays, key=lambda one: (one.begin, -one.bytes)):
        if not found or found[-1].begin + found[-1].bytes <= one.begin:
            found.append(one)
    return found


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        yield mapped
