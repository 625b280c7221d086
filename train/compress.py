"""Packs a model's files, and unpacks them.

    python -m train.compress IN OUT                      lossless: bit-identical when restored
    python -m train.compress IN OUT --bound 2^-24        float32 with at most that error
    python -m train.compress IN OUT --base DIR           as differences from the model in DIR
    python -m train.compress --restore OUT BACK
    python -m train.compress --check OUT

IN is a safetensors file or a Hugging Face folder. `train/` reads packed models directly. `elves/`
does the work; docs/smaller_files.md has the results.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elves.atomic import finished
from elves.folders import check_path, pack_path, restore_path
from elves.header import ElvesError
from elves.writing import Options
from train import Failure, command_of
from train.checkpoints.checksums import CHECKSUMS
from train.cli.arguments import option, read_arguments

PROGRAM = command_of("compress")


@dataclass(frozen=True, kw_only=True)
class Command:
    """Packs a model's files, or unpacks them."""

    source: Path = option(help="A safetensors file, or a folder of them.", positional=True)
    target: Path | None = option(None, "New file or folder to write.", positional=True)
    bound: str | None = option(
        None, "Maximum error of a float32 weight, such as 2^-24. Default: lossless."
    )
    base: Path | None = option(None, "Base model; only the differences from it are stored.")
    threads: int | None = option(None, "Number of threads. Default: all cores.", above=0)
    restore: bool = option(False, "Restore a packed file or folder.")
    check: bool = option(False, "Decode a packed file or folder to check whether it is intact.")


def run(command: Command) -> None:
    """Executes the command, and prints the result; raises `ElvesError` or `OSError`."""
    _check(command)
    threads = command.threads or len(os.sched_getaffinity(0))
    begin = time.perf_counter()
    if command.check:
        files, size = check_path(command.source, base=command.base, threads=threads)
        done = f"{command.source} is intact: {files} packed files, {size / 1e6:,.1f} MB"
    elif command.restore:
        files = restore_path(command.source, command.target, base=command.base, threads=threads)
        done = f"restored {files} packed files to {command.target}"
    else:
        bound = None if command.bound is None else _number(command.bound)
        options = Options(bound=bound, threads=threads)
        packed = pack_path(command.source, command.target, options, base=command.base)
        before, after = sum(r.before for r in packed), sum(r.after for r in packed)
        sizes = f"{before / 1e6:,.1f} MB in {after / 1e6:,.1f} MB"
        done = f"{command.target}: {sizes}, ratio {before / after:.3f}"
    print(f"{done}, in {time.perf_counter() - begin:.1f} s")


def _check(command: Command) -> None:
    flags = [f"--{name}" for name in ("restore", "check", "bound") if getattr(command, name)]
    if len(flags) > 1:
        raise ElvesError(f"{flags[0]} cannot be combined with {' and '.join(flags[1:])}.")
    if command.check != (command.target is None):
        raise ElvesError("--check takes one path. For all else, pass a second path, which is new.")
    if not (command.restore or command.check) and (command.source / CHECKSUMS).is_file():
        raise ElvesError(
            f"{command.source} is a checkpoint, which no run could read if it were packed. Pack "
            "the model that its run writes at the end."
        )


def _number(text: str) -> float:
    """Returns a bound: a number, or a power such as 2^-24."""
    power = re.fullmatch(r"\s*([\d.]+)\s*(?:\^|\*\*)\s*(-?\d+)\s*", text)
    try:
        return float(power[1]) ** int(power[2]) if power else float(text)
    except (ValueError, OverflowError) as error:
        raise ElvesError(
            f"`--bound`: must be a number above 0, such as 2^-24 or 6e-8, but is {text}."
        ) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 2 after an error with a message, or 130 after Ctrl-C."""
    left, place, status = "", None, 2
    try:
        command = read_arguments([Command], argv, program=PROGRAM, description=Command.__doc__)[0]
        place, left = command.target or command.source, f"{command.source} is unchanged."
        run(command)
        return 0
    except (Failure, ElvesError) as error:
        message = f"error: {error}"
    except OSError as error:
        place = finished(Path(error.filename or place))
        message = f"error: {place}: {error.strerror}. Free space or fix permissions. {left}"
    except KeyboardInterrupt:
        message, status = f"stopped by SIGINT. {left}", 130
    sys.stderr.write(f"{message}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
