"""Command lines: read by tyro, and what is wrong in one is said in one line."""

from __future__ import annotations

import contextlib
import difflib
import io
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import tyro

# What transformers' Trainer, torchtune, TRL and DeepSpeed call our options.
THEIRS = {
    "adam-beta1": "b1",
    "adam-beta2": "b2",
    "adam-epsilon": "eps",
    "bf16": "dtype",
    "dataset": "data",
    "dataset-name": "data",
    "eval-steps": "evaluate-every",
    "gradient-accumulation-steps": "micro-batches",
    "gradient-checkpointing": "remat",
    "gradient-clipping": "max-grad-norm",
    "load-best-model-at-end": "keep-best",
    "logging-steps": "log-every",
    "lr": "learning-rate",
    "max-length": "sequence-length",
    "max-seq-length": "sequence-length",
    "max-steps": "steps",
    "model-name-or-path": "model",
    "num-train-epochs": "epochs",
    "optim": "optimizer",
    "per-device-train-batch-size": "batch-size",
    "resume-from-checkpoint": "run",
    "save-steps": "save-every",
    "save-total-limit": "keep",
    "train-batch-size": "batch-size",
    "train-file": "data",
    "warmup-ratio": "warmup-share",
}


def read_arguments(
    kind: type, argv: Sequence[str] | None, *, program: str, default: Any = None
) -> Any:
    """What the arguments say, as an object of the dataclass `kind`.

    Args:
        kind: The dataclass, for tyro.
        argv: The arguments; None for those of the process.
        program: How the command is called, for the help text.
        default: An object whose values are the defaults; None for those of `kind`.

    Raises:
        SystemExit: With code 2 after a mistake, which is said on stderr, and with 0 after `--help`.
    """
    options = {} if default is None else {"default": default}
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found, unknown = tyro.cli(
                kind, prog=program, args=argv, return_unknown_args=True, **options
            )
    except SystemExit as end:
        if end.code:
            sys.stderr.write(f"error: {_of_box(said.getvalue())}\n")
        else:
            sys.stderr.write(said.getvalue())
        raise
    sys.stderr.write(said.getvalue())  # warnings
    if unknown:
        name = next((x for x in unknown if x.startswith("-")), unknown[0])
        near = " or ".join(f"--{x}" for x in meant(name, _names(kind)))
        hint = f" Did you mean {near}?" if near else ""
        sys.stderr.write(f"error: unknown option {name}.{hint} All are in {program} --help\n")
        raise SystemExit(2)
    return found


def meant(name: str, known: Sequence[str]) -> list[str]:
    """Which of the options `known` may be meant by another name, the best first."""
    name = name.lstrip("-").partition("=")[0].replace("_", "-")
    if THEIRS.get(name) in known:
        return [THEIRS[name]]
    return difflib.get_close_matches(name, known, n=3, cutoff=0.5)


def _names(kind: Any) -> list[str]:
    """The options of a dataclass and those within it."""
    found = []
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint = hints[field.name]
        found += _names(hint) if is_dataclass(hint) else [field.name.replace("_", "-")]
    return found


def _of_box(text: str) -> str:
    """The sentence in a box of tyro's, without the hints behind it."""
    rows = []
    for line in text.splitlines():
        row = line.strip(" │")
        if rows and (not row or row.startswith("─")):
            break
        if row and row[0] not in "╭╰─":
            rows.append(row)
    return " ".join(rows).removeprefix("Error parsing ")
