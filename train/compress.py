"""Makes the files of a model smaller, and back.

    python -m train.compress IN OUT                      lossless: the same bits when restored
    python -m train.compress IN OUT --bound 2^-24        float32 with errors of at most that
    python -m train.compress IN OUT --base DIR           as differences from the model in DIR
    python -m train.compress --restore OUT BACK
    python -m train.compress --check OUT
    python -m train.compress --report OUT [PICTURE.png]

IN is a safetensors file, a folder as Hugging Face has it, or a checkpoint of a run. `train/` reads
what comes out wherever it reads a model. What is done is in `elves/`, what it gains in
docs/smaller_files.md.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from train.arguments import read_arguments
from train.compress_report import table, write_picture
from train.elves.errors import ElvesError
from train.elves.folders import Result, check_path, pack_path, restore_path, results
from train.elves.whole import finished
from train.elves.writing import Options
from train.packed_checkpoints import (
    is_checkpoint,
    is_packed_checkpoint,
    pack_in_place,
    pack_to,
    restore_to,
)

PROGRAM = "python -m train.compress"
PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class Command:
    """Makes the files of a model smaller, and back."""

    source: tyro.conf.Positional[Path]
    """A safetensors file, or a folder with some: of a model as Hugging Face has it, or a checkpoint
    of a run."""
    target: tyro.conf.Positional[Path | None] = None
    """What to make, which must be new. With --report a picture."""
    bound: str | None = None
    """The largest error that a float32 weight may get, such as 2^-24. Left out: none.
    Tensors of other dtypes keep their bits."""
    base: Path | None = None
    """The model that this one was made from: what is kept is how they differ.
    To read the result, the base is needed."""
    threads: int | None = None
    """Threads. Left out: as many as there are cores."""
    replace: bool = False
    """Put each packed file where the original was, which is removed. Without OUT."""
    paper: bool = False
    """Use the codecs of the paper alone, to compare."""
    restore: bool = False
    """Make of a packed file or folder what it was."""
    check: bool = False
    """Decode a packed file or folder, and say whether it is whole."""
    report: bool = False
    """Show what became of each tensor; with a second path, as a picture as well."""


def run(command: Command) -> None:
    """Does what the command line says, and says what it has done.

    Raises:
        ElvesError: If that cannot be done.
        OSError: If a file cannot be read or written.
    """
    _check(command)
    threads = command.threads or len(os.sched_getaffinity(0))
    begin = time.perf_counter()
    if command.check:
        files, size = check_path(command.source, base=command.base, threads=threads)
        seconds = time.perf_counter() - begin
        print(f"{command.source} is whole: {_files(files)}, {_bytes(size)} in {seconds:.1f} s")
    elif command.restore:
        assert command.target is not None
        if is_packed_checkpoint(command.source):
            files = restore_to(command.source, command.target, threads=threads)
        else:
            files = restore_path(command.source, command.target, base=command.base, threads=threads)
        seconds = time.perf_counter() - begin
        print(f"restored {_files(files)} to {command.target} in {seconds:.1f} s")
    elif command.report:
        found = results(command.source)
        print(table(found))
        if command.target is not None:
            write_picture(found, command.target, str(command.source))
            print(f"wrote {command.target}")
    else:
        bound = None if command.bound is None else _number(command.bound)
        options = Options(bound=bound, paper=command.paper, threads=threads)
        if is_checkpoint(command.source):
            found = _pack_checkpoint(command, options)
        else:
            found = pack_path(command.source, command.target, options, base=command.base)
        if not found:
            print(f"{command.source} is packed already: nothing to do")
            return
        _say_packed(command, found, time.perf_counter() - begin)


def _pack_checkpoint(command: Command, options: Options) -> list[Result]:
    others = [name for name in ("bound", "base", "paper") if getattr(command, name)]
    if others:
        raise ElvesError(
            f"`--{others[0]}`: expected none for a checkpoint, got one for {command.source}. A run "
            "goes on from its bits alone. Leave it out; the weights are a model (--export)."
        )
    if command.target is None:
        if is_packed_checkpoint(command.source):
            return []
        return pack_in_place(command.source, threads=options.threads)
    return pack_to(command.source, command.target, threads=options.threads)


def _say_packed(command: Command, found: Sequence[Result], seconds: float) -> None:
    before, after = sum(r.before for r in found), sum(r.after for r in found)
    tensors = [t for r in found if r.header for t in r.header.tensors.values()]
    print(
        f"{command.target or command.source}: {_bytes(before)} in {_bytes(after)}, ratio "
        f"{before / after:.3f}, in {seconds:.1f} s"
    )
    if command.bound is not None:
        worst = max(
            (t for t in tensors if t.bound is not None), key=lambda t: t.error, default=None
        )
        if worst is not None:
            power = f" (2^{math.log2(worst.error):.2f})" if worst.error else ""
            print(f"largest error: {worst.error:.3g}{power}, in `{worst.name}`")
        exact = [t for t in tensors if t.dtype != "F32" and t.bytes]
        if exact:
            kinds = ", ".join(sorted({t.dtype for t in exact}))
            print(f"{len(exact)} tensors of {kinds} keep their bits: a bound is for F32 alone")


def _check(command: Command) -> None:
    verbs = [name for name in ("restore", "check", "report") if getattr(command, name)]
    if len(verbs) > 1:
        raise ElvesError(
            f"expected one of --restore, --check and --report, got --{' and --'.join(verbs)}. Do "
            "one after the other."
        )
    of_packing = [name for name in ("bound", "replace", "paper") if getattr(command, name)]
    if verbs and of_packing:
        raise ElvesError(
            f"expected --{of_packing[0]} where something is packed, got it with --{verbs[0]}. "
            "Leave it out."
        )
    needs_target = not command.replace if not verbs else verbs == ["restore"]
    if needs_target and command.target is None:
        raise ElvesError(
            "expected a second path, of what is to be made, got none. Add it"
            + (
                ", or --replace to put the packed files where the originals are."
                if not verbs
                else "."
            )
        )
    if command.target is not None and (command.replace or verbs == ["check"]):
        what = "replace" if command.replace else "check"
        raise ElvesError(
            f"expected one path with --{what}, got a second one, {command.target}. Leave it out."
        )
    if verbs == ["report"] and command.target is not None:
        if command.target.suffix not in PICTURES:
            raise ElvesError(
                f"`--report`: expected a file that ends in {', '.join(PICTURES)}, got "
                f"{command.target}. Give it one of these endings."
            )
    if command.threads is not None and command.threads < 1:
        raise ElvesError(
            f"`--threads`: expected at least 1, got {command.threads}. Leave it out for as many as "
            "there are cores."
        )


def _number(text: str) -> float:
    """A bound: a number, or a power as in 2^-24."""
    power = re.fullmatch(r"\s*([\d.]+)\s*(?:\^|\*\*)\s*(-?\d+)\s*", text)
    try:
        return float(power[1]) ** int(power[2]) if power else float(text)
    except (ValueError, OverflowError) as error:
        raise ElvesError(
            f"`--bound`: expected a number above 0, such as 2^-24 or 6e-8, got {text}. Correct it."
        ) from error


def _files(count: int) -> str:
    return "1 packed file" if count == 1 else f"{count} packed files"


def _bytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _left(command: Command) -> str:
    """What is there after a command that has not come to its end."""
    if command.replace and not is_checkpoint(command.source):
        return f"Each file of {command.source} is whole, packed or not; the same command goes on."
    return f"{command.source} is as it was."


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code: 0; 2 after what the message explains; 130 by Ctrl-C."""
    command = read_arguments(Command, argv, program=PROGRAM)
    try:
        run(command)
    except ElvesError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except OSError as error:
        place = finished(Path(error.filename or command.target or command.source))
        sys.stderr.write(
            f"error: {place}: {error.strerror}. Make room or see to the permissions. "
            f"{_left(command)}\n"
        )
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"stopped by SIGINT. {_left(command)}\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
