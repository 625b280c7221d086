"""Reads command lines by tyro, and says in one line what is wrong in one."""

from __future__ import annotations

import contextlib
import difflib
import io
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import tyro

from train import Failure

# The names of our options in transformers' Trainer, torchtune, TRL and DeepSpeed.
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


class ArgumentError(Failure):
    """A mistake in a command line."""


def read_arguments(
    kind: type, argv: Sequence[str] | None, *, program: str, default: Any = None
) -> Any:
    """Reads the arguments `argv` into an object of the dataclass `kind`; `--help` exits."""
    options = {} if default is None else {"default": default}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            values, unknown = tyro.cli(
                kind, prog=program, args=argv, return_unknown_args=True, **options
            )
    except SystemExit as end:
        if end.code:
            raise ArgumentError(_of_box(printed.getvalue())) from None
        raise
    sys.stderr.write(printed.getvalue())  # warnings
    if unknown:
        name = next((x for x in unknown if x.startswith("-")), unknown[0])
        raise ArgumentError(
            f"unknown option {name}.{did_you_mean(name, _options(kind), prefix='--')} All are in "
            f"{program} --help"
        )
    return values


def did_you_mean(name: str, known: Sequence[str], *, prefix: str = "") -> str:
    """A question that names which of the `known` may be meant; "" if none is similar."""
    # As in an option, a key of a file, or `--name=value`.
    name = name.lstrip("-").partition("=")[0].replace("_", "-")
    ours = THEIRS.get(name, name)
    if not prefix:
        name, ours = name.replace("-", "_"), ours.replace("-", "_")
    near = [ours] if ours in known else difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(f'{prefix}{x}' for x in near)}?" if near else ""


def _options(kind: Any) -> list[str]:
    names = []
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint = hints[field.name]
        names += _options(hint) if is_dataclass(hint) else [field.name.replace("_", "-")]
    return names


def _of_box(text: str) -> str:
    """The sentence in a box of tyro's, without the hints that follow it."""
    rows = []
    for line in text.splitlines():
        row = line.strip(" │")
        if rows and (not row or row.startswith("─")):
            break
        if row and row[0] not in "╭╰─":
            rows.append(row)
    return " ".join(rows).removeprefix("Error parsing ")
