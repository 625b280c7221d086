"""Whole folders: every file of tensors in them packed, restored or checked; all others copied.

A packed folder has the files that it had, under the names that they had. So an index of several
files and a config still fit, and what reads one file after another reads packed ones as well.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from elves.checksum import crc32
from elves.errors import ElvesError
from elves.files import Info, PackedFile, PlainFile, TensorFile, open_tensors
from elves.header import SAFETENSORS, Header, is_packed, read_header
from elves.whole import is_unfinished, sync_folder, unfinished
from elves.writing import Duplicates, Near, Options, Piece, check_bound, pack

SAFE = ".safetensors"
# Behind the name of a packed file that was no safetensors: of a checkpoint, by an earlier version.
_SUFFIX = ".elves.safetensors"
# A run's optimizer state, by the names that it has here, in optax and in torch.
_STATE = re.compile(r"(^|[./_])(mu|nu|exp_avg|exp_avg_sq|opt_state|optimizer|moments?)([./@_]|$)")
# In front of the names of a model inside another one.
_PREFIX = re.compile(r"^(model|bert)\.")


@dataclass(frozen=True)
class Result:
    """What became of one file.

    Attributes:
        path: In the folder, as it is named now; of a single file its name.
        header: What was packed, None of a file that was copied.
        before, after: Its bytes.
    """

    path: Path
    header: Header | None
    before: int
    after: int


def pack_path(
    source: Path,
    target: Path | None,
    options: Options,
    *,
    base: Path | None = None,
) -> list[Result]:
    """Packs a file, or all files of tensors in a folder.

    Args:
        source: The file or folder.
        target: What is made: new, and there only when it is whole; files of a folder that would
            not be smaller are copied. None to replace each file of
            tensors by the packed one, one after the other; a kill leaves some of each, which is
            read all the same, and the next call packs the others.
        options: How.
        base: A folder, or a file, of a model that `source` has been made from.

    Returns:
        What became of each file; [] if all were to be replaced and are packed already.

    Raises:
        ElvesError: If there is nothing to pack, the target is there, or the bound is no sensible
            one.
        OSError: If it cannot be written. No part of the target is left then.
    """
    _expect_source(source)
    if target is not None:
        _expect_new(source, target)
    names = _files(source)
    with ExitStack() as stack:
        files: dict[Path, PlainFile] = {}
        for name in names:
            path = _at(source, name)
            if name.suffix == SAFE and not is_packed(path):
                files[name] = stack.enter_context(PlainFile(path))
        packed = [name for name in names if is_packed(_at(source, name))]
        if not files and packed and target is None:
            return []
        if not files:
            raise _nothing(source, names, packed)
        bases = _Bases(base, stack) if base is not None else None
        pieces = {name: _pieces(files[name], bases) for name in files}
        _check_bounds(source, pieces, options)
        if bases is not None and not bases.found:
            raise ElvesError(
                f"`base`: expected a folder with tensors of the names and shapes of {source}, got "
                f"{base}, which has none of them. Name the model that it was made from."
            )
        if target is None or not source.is_dir():
            return _pack_each(source, target, names, files, pieces, options, bases)
        with _made_whole(target) as part:
            return _pack_each(source, part, names, files, pieces, options, bases)


def restore_path(
    source: Path,
    target: Path,
    *,
    base: Path | None = None,
    threads: int = 1,
) -> int:
    """Makes a packed file, or folder, what it was.

    Args:
        source: As `pack_path` made it.
        target: New; there only when it is whole.
        base: The folder that it was packed against; None for where that was then.
        threads: That decode a tensor's blocks.

    Returns:
        How many packed files there were.

    Raises:
        ElvesError: If one is damaged, or there is none. Nothing is left then.
        OSError: If it cannot be written. Nothing is left then.
    """
    _expect_source(source)
    _expect_new(source, target)
    names = _files(source)
    packed = [name for name in names if is_packed(_at(source, name))]
    if not packed:
        raise ElvesError(
            f"expected packed files in {source}, got none. Name what `python -m train.compress` "
            "has made."
        )
    needed = sum(read_header(_at(source, name))[0].bytes for name in packed)
    _expect_room(target, needed)
    if not source.is_dir():
        restore_file(source, target, base=base, threads=threads)
        return 1
    with _made_whole(target) as part:
        for name in names:
            if name in packed:
                kind = read_header(source / name)[0].kind
                old = name if kind == SAFETENSORS else name.with_name(name.name[: -len(_SUFFIX)])
                (part / old).parent.mkdir(parents=True, exist_ok=True)
                restore_file(source / name, part / old, base=base, threads=threads)
            else:
                _copy(source / name, part / name)
    return len(packed)


def restore_file(path: Path, target: Path, *, base: Path | None = None, threads: int = 1) -> None:
    """Writes the file that was packed; `target` is there only when it is whole.

    Raises:
        ElvesError: If it is damaged, or its base is missing or another one.
        OSError: If it cannot be written.
    """
    with unfinished(target) as part:
        with PackedFile(path, base=base, threads=threads) as packed, open(part, "wb") as file:
            head = packed.header.unpacked_head()
            whole = zlib.crc32(head)
            file.write(head)
            for name in packed.header.tensors:
                for piece in packed.pieces(name):
                    file.write(piece.data)
                    whole = crc32(piece, whole)
            if whole != packed.header.crc32:
                raise ElvesError(
                    f"expected to restore a file with the checksum {packed.header.crc32} from "
                    f"{path}, got {whole}. Copy the file again, or take another copy."
                )
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
        sync_folder(target.parent)


def check_path(source: Path, *, base: Path | None = None, threads: int = 1) -> tuple[int, int]:
    """Decodes everything that is packed, and writes nothing.

    Returns:
        The packed files and the bytes that they restore.

    Raises:
        ElvesError: If something is damaged, or nothing is packed.
    """
    _expect_source(source)
    found = size = 0
    for name in _files(source):
        path = _at(source, name)
        if not is_packed(path):
            # Of a packed file whose very first bytes are damaged, too.
            if name.suffix == SAFE:
                PlainFile(path).close()
            continue
        with PackedFile(path, base=base, threads=threads) as packed:
            whole = zlib.crc32(packed.header.unpacked_head())
            for tensor in packed.header.tensors:
                for piece in packed.pieces(tensor):
                    whole = crc32(piece, whole)
            if whole != packed.header.crc32:
                raise ElvesError(
                    f"expected {path} to restore a file with the checksum {packed.header.crc32}, "
                    f"got {whole}. Copy the file again, or take another copy."
                )
            found, size = found + 1, size + packed.header.bytes
    if not found:
        raise ElvesError(
            f"expected packed files in {source}, got none. Name what `python -m train.compress` "
            "has made."
        )
    return found, size


def results(source: Path) -> list[Result]:
    """Of a packed file or folder, what became of each file.

    Raises:
        ElvesError: If there is none, or a header is damaged.
    """
    _expect_source(source)
    found = []
    for name in _files(source):
        path = _at(source, name)
        size = path.stat().st_size
        header = read_header(path)[0] if is_packed(path) else None
        found.append(Result(name, header, header.bytes if header else size, size))
    if not any(result.header for result in found):
        raise ElvesError(
            f"expected packed files in {source}, got none. Name what `python -m train.compress` "
            "has made."
        )
    return found


class _Bases:
    """The tensors of another model, to be found by the names of this one."""

    def __init__(self, base: Path, stack: ExitStack):
        if not base.exists():
            raise ElvesError(
                f"`base`: expected a folder with safetensors, or such a file, got {base}, where "
                "there is none. Check the path."
            )
        self.folder = base if base.is_dir() else base.parent
        self.found = 0
        self._by_name: dict[str, tuple[TensorFile, str, str]] = {}
        for path in sorted(base.rglob("*" + SAFE)) if base.is_dir() else [base]:
            file = open_tensors(path)
            stack.callback(file.close)
            for name in file.tensors:
                where = (file, name, str(path.relative_to(self.folder)))
                self._by_name[_PREFIX.sub("", name)] = where

    def near(self, name: str, info: Info) -> Near | None:
        file, tensor, path = self._by_name.get(_PREFIX.sub("", name), (None, "", ""))
        if file is None or not _comparable(info, file.tensors[tensor]):
            return None
        self.found += 1
        return Near(file, tensor, "base", path)


def _comparable(info: Info, other: Info) -> bool:
    if not info.bytes or info.shape != other.shape:
        return False
    same = info.dtype == other.dtype and info.dtype in ("F32", "BF16", "F16")
    return same or (info.dtype, other.dtype) == ("BF16", "F32")


def _pieces(file: PlainFile, bases: _Bases | None) -> list[Piece]:
    found = []
    for tensor, info in file.tensors.items():
        near = bases.near(tensor, info) if bases is not None else None
        data = file.read(tensor, 0, info.bytes)
        found.append(Piece(tensor, info.dtype, info.shape, data, near))
    return found


def _check_bounds(source: Path, pieces: Mapping[Path, Sequence[Piece]], options: Options) -> None:
    if options.bound is None:
        return
    for name, some in pieces.items():
        for piece in some:
            if piece.dtype == "F32" and _STATE.search(piece.name):
                raise ElvesError(
                    f"the tensor `{piece.name}` in {_at(source, name)}: expected no optimizer "
                    f"state with a bound, got {options.bound:g}. Of second moments nearly all "
                    "would become zero. Leave --bound out, or pack the weights alone."
                )
        check_bound(_at(source, name), some, options.bound)


def _pack_each(
    source: Path,
    target: Path | None,
    names: Sequence[Path],
    files: Mapping[Path, PlainFile],
    pieces: Mapping[Path, Sequence[Piece]],
    options: Options,
    bases: _Bases | None,
) -> list[Result]:
    """Packs the files and copies the others, into `target` or in their place."""
    done, duplicates = [], Duplicates()
    for name in names:
        path = _at(source, name)
        before = path.stat().st_size
        if name not in files:
            if target is not None:
                _copy(path, target / name)
            done.append(Result(name, None, before, before))
            continue
        out = path if target is None else target / name if source.is_dir() else target
        out.parent.mkdir(parents=True, exist_ok=True)
        header = pack(
            out,
            pieces[name],
            options,
            head=files[name].read_head(),
            base=bases.folder if bases else None,
            duplicates=duplicates,
            only_smaller=source.is_dir(),
        )
        if header is None:  # many small tensors, of which each has its line in the header
            if target is not None:
                _copy(path, target / name)
            done.append(Result(name, None, before, before))
            continue
        done.append(Result(name, header, before, out.stat().st_size))
    return done


def _files(source: Path) -> list[Path]:
    """The files that are whole, as paths in the folder; of a single file its name."""
    if not source.is_dir():
        return [Path(source.name)]
    names = (p.relative_to(source) for p in source.rglob("*") if p.is_file())
    return sorted(name for name in names if not is_unfinished(name))  # of a start that was killed


def _at(source: Path, name: Path) -> Path:
    return source / name if source.is_dir() else source


def _expect_source(source: Path) -> None:
    if not source.exists():
        raise ElvesError(
            f"expected a safetensors file, or a folder with some, got {source}, where there is "
            "none. Check the path."
        )


def _expect_new(source: Path, target: Path) -> None:
    empty = source.is_dir() and target.is_dir() and not any(target.iterdir())
    if target.exists() and not empty:
        raise ElvesError(f"expected a new place to write to, got {target}. Name another one.")
    if source.is_dir() and target.absolute().is_relative_to(source.absolute()):
        raise ElvesError(f"expected a place outside of {source}, got {target}. Name another one.")
    if not target.absolute().parent.is_dir():
        raise ElvesError(
            f"expected a place in a folder that is there, got {target}. Make the folder, or name "
            "another one."
        )


def _nothing(source: Path, names: Sequence[Path], packed: Sequence[Path]) -> ElvesError:
    got = f"{packed[0]}, which is packed already" if packed else "none"
    pickles = [n.name for n in names if n.suffix in (".bin", ".pt", ".pth", ".ckpt")]
    if pickles:
        got = f"{pickles[0]}, a pickle, which can run any program when it is read"
    return ElvesError(
        f"expected safetensors in {source}, got {got}. Name another file or folder; pickles have "
        "to be converted first."
    )


def _expect_room(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target.absolute().parent).free
    if needed > free:
        raise OSError(
            errno.ENOSPC, f"{needed} bytes to restore, {free} free", str(target.absolute().parent)
        )


def _copy(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _made_whole(target: Path) -> Iterator[Path]:
    """A folder under another name, which gets its own when the block ends without an error."""
    with unfinished(target, folder=True) as part:
        yield part
        for folder in [part, *(p for p in part.rglob("*") if p.is_dir())]:
            sync_folder(folder)
        if target.is_dir():
            target.rmdir()  # it was empty
        part.rename(target)
        sync_folder(target.absolute().parent)
