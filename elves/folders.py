"""Packs, restores and checks all tensor files in a folder, and copies all other files.

A packed folder has the same file names, so its index of weight files and its config still match,
and a program that reads single files can also read packed files.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from elves.atomic import atomic_path, is_partial
from elves.files import Info, PackedFile, PlainFile, open_tensors
from elves.header import BYTES, ElvesError, Header, is_packed, read_header
from elves.writing import Near, Options, Piece, check_bound, pack

SAFE = ".safetensors"
# Suffix of packed files that were not safetensors; 0.2 wrote them from checkpoints.
_SUFFIX = ".elves.safetensors"
# Names in optimizer states: this project's, optax's and torch's.
_STATE = re.compile(r"(^|[./_])(mu|nu|exp_avg|exp_avg_sq|opt_state|optimizer|moments?)([./@_]|$)")
# Dtypes of a tensor and its base.
_COMPARABLE = (("F32", "F32"), ("BF16", "BF16"), ("F16", "F16"), ("BF16", "F32"))
# Prefix of tensor names if a model is part of another model.
_PREFIX = re.compile(r"^(model|bert)\.")


@dataclass(frozen=True)
class Result:
    """The result for one file."""

    path: Path  # in the folder; for a single file its name
    header: Header | None  # None for a copied file
    before: int  # bytes
    after: int


def pack_path(
    source: Path, target: Path, options: Options, *, base: Path | None = None
) -> list[Result]:
    """Packs a file, or all tensor files in a folder.

    Args:
        target: A new path, which appears when it is complete. In a folder, files that would not
            become smaller are copied.
        base: The folder or file of the model that `source` was fine-tuned from.

    Returns:
        The result for each file.

    Raises:
        ElvesError: If there are no files to pack, the target exists, or the bound is too large.
        OSError: If writing fails. No part of the target is left.
    """
    paths = _files(source)
    _expect_new(source, target)
    packed = [path for path in paths.values() if is_packed(path)]
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(PlainFile(path))
            for name, path in paths.items()
            if path.suffix == SAFE and path not in packed
        }
        if not files:
            reason = f": {packed[0]} is already packed" if packed else ""
            raise ElvesError(f"{source} has no safetensors files to pack{reason}.")
        bases = None if base is None else _Bases(base, stack)
        pieces = {name: _pieces(file, bases) for name, file in files.items()}
        if bases is not None and not bases.matches:
            raise ElvesError(
                f"`base`: {base} and {source} have no tensor with the same name and shape. "
                "Pass the model that this one was fine-tuned from."
            )
        for name, file in files.items():
            _check_bound(file.path, pieces[name], options)
        if source.is_dir():
            target = stack.enter_context(atomic_path(target, folder=True))
        done = []
        for name, path in paths.items():
            out = target / name if source.is_dir() else target
            out.parent.mkdir(parents=True, exist_ok=True)
            before, header = path.stat().st_size, None
            if name in files:
                folder, head = bases.folder if bases else None, files[name].head
                # A file of many small tensors may grow, because each has an entry in the header.
                smaller = source.is_dir()
                header = pack(
                    out, pieces[name], options, head=head, base=folder, only_smaller=smaller
                )
            if header is None:
                shutil.copyfile(path, out)
            done.append(Result(name, header, before, out.stat().st_size))
        return done


def restore_path(source: Path, target: Path, *, base: Path | None = None, threads: int = 1) -> int:
    """Restores a packed file or folder; returns the number of packed files.

    `target` must be a new path, and appears when it is complete. `base` is the base's folder, or
    None for the folder that was used for packing. If a file is damaged, or no file is packed, no
    target is left.
    """
    files = _files(source).items()
    headers = {name: read_header(path)[0] if is_packed(path) else None for name, path in files}
    if not any(headers.values()):
        raise _none_packed(source)
    _expect_new(source, target)
    if not source.is_dir():
        _restore_file(source, target, base, threads)
        return 1
    with atomic_path(target, folder=True) as part:
        for name, header in headers.items():
            out = part / name
            out.parent.mkdir(parents=True, exist_ok=True)
            if header is None:
                shutil.copyfile(source / name, out)
                continue
            if header.kind == BYTES:
                out = out.with_name(out.name.removesuffix(_SUFFIX))
            _restore_file(source / name, out, base, threads)
    return sum(header is not None for header in headers.values())


def _restore_file(path: Path, target: Path, base: Path | None, threads: int) -> None:
    with atomic_path(target) as part, PackedFile(path, base=base, threads=threads) as packed:
        with open(part, "wb") as file:
            for piece in packed.whole():
                file.write(piece)


def check_path(source: Path, *, base: Path | None = None, threads: int = 1) -> tuple[int, int]:
    """Decodes all packed files; returns their number and total bytes."""
    sizes = []
    for path in _files(source).values():
        if is_packed(path):
            with PackedFile(path, base=base, threads=threads) as packed:
                sizes.append(sum(len(piece) for piece in packed.whole()))
        elif path.suffix == SAFE:  # or a packed file whose first bytes are damaged
            PlainFile(path).close()
    if not sizes:
        raise _none_packed(source)
    return len(sizes), sum(sizes)


class _Bases:
    """The base model's tensors, looked up by the names in the packed model."""

    def __init__(self, base: Path, stack: ExitStack):
        if not base.exists():
            raise ElvesError(
                f"`base`: {base} does not exist. Pass a folder that contains safetensors files."
            )
        self.folder = base if base.is_dir() else base.parent
        self.matches = 0
        self._by_name: dict[str, Near] = {}
        for path in sorted(base.rglob("*" + SAFE)) if base.is_dir() else [base]:
            file = stack.enter_context(open_tensors(path))
            for name in file.tensors:
                near = Near(file, name, str(path.relative_to(self.folder)))
                self._by_name[_PREFIX.sub("", name)] = near

    def near(self, name: str, info: Info) -> Near | None:
        near = self._by_name.get(_PREFIX.sub("", name))
        other = near and near.file.tensors[near.tensor]
        if other is None or not info.bytes or info.shape != other.shape:
            return None
        if (info.dtype, other.dtype) not in _COMPARABLE:
            return None
        self.matches += 1
        return near


def _pieces(file: PlainFile, bases: _Bases | None) -> list[Piece]:
    pieces = []
    for name, info in file.tensors.items():
        near = bases.near(name, info) if bases is not None else None
        data = file.read(name, 0, info.bytes)
        pieces.append(Piece(name, info.dtype, info.shape, data, near))
    return pieces


def _check_bound(path: Path, pieces: Sequence[Piece], options: Options) -> None:
    if options.bound is None:
        return
    for piece in pieces:
        if piece.dtype == "F32" and _STATE.search(piece.name):
            raise ElvesError(
                f"the tensor `{piece.name}` in {path}: optimizer state cannot have a bound, which "
                "would make nearly all second moments zero. Omit --bound, or pack only the weights."
            )
    check_bound(path, pieces, options.bound)


def _files(source: Path) -> dict[Path, Path]:
    """Returns the complete files by their paths in the folder, or a single file by its name."""
    if not source.exists():
        raise ElvesError(f"{source} does not exist. Pass a safetensors file or a folder.")
    if not source.is_dir():
        return {Path(source.name): source}
    names = (path.relative_to(source) for path in source.rglob("*") if path.is_file())
    # Partial files are left over from killed processes.
    return {name: source / name for name in sorted(names) if not is_partial(name)}


def _expect_new(source: Path, target: Path) -> None:
    empty = source.is_dir() and target.is_dir() and not any(target.iterdir())
    if (target.exists() and not empty) or not target.absolute().parent.is_dir():
        problem = "already exists" if target.exists() else "is not in an existing folder"
        raise ElvesError(f"{target} {problem}. Pass a new path to write to.")
    if source.is_dir() and target.absolute().is_relative_to(source.absolute()):
        raise ElvesError(f"{target} is inside {source}. Pass a path outside it.")


def _none_packed(source: Path) -> ElvesError:
    return ElvesError(f"{source} has no packed files.")
