"""What a run says of its settings and of how to go on, in words that take some finding out."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from train.settings import Settings

PROGRAM = "python -m train.finetune"


def said_of_deepspeed(
    asked: Settings, settings: Settings, untranslated: Mapping[str, str]
) -> Iterator[str]:
    """What the DeepSpeed config has put in the place of settings, and what it could not.

    Args:
        asked: The settings without it.
        settings: Those in force.
        untranslated: For each of its keys that has no counterpart, the reason.
    """
    if settings.deepspeed is None:
        return
    names = [field.name for field in dataclasses.fields(settings) if field.name != "steps"]
    changed = [n for n in names if getattr(asked, n) != getattr(settings, n)]
    if changed:
        listed = ", ".join(f"{name} {getattr(settings, name)}" for name in changed)
        yield f"{settings.deepspeed} sets: {listed}"
    keys: dict[str, list[str]] = {}
    for key, reason in untranslated.items():
        keys.setdefault(reason, []).append(f"`{key}`")
    for reason, alike in keys.items():
        have = "has" if len(alike) == 1 else "have"
        yield f"{settings.deepspeed}: {', '.join(alike)} {have} no counterpart here: {reason}"


def causes_of_infinity(settings: Settings) -> str:
    """What may have made losses and gradients infinite or no numbers."""
    weights = "" if settings.model is None else f"a weight in {settings.model}, "
    computed = "" if settings.dtype == "float32" else f", or {settings.dtype} (--dtype float32)"
    return (
        f"See to what may be the cause: {weights}the data, a learning rate that is too large (here "
        f"{settings.learning_rate:g}){computed}."
    )


def how_to_go_on(signal_number: int, step: int, folder: Path) -> str:
    """What is shown when a signal has stopped the run."""
    name = signal.Signals(signal_number).name
    saved = f"stopped by {name} after step {step}, which is saved."
    if "SLURM_JOB_ID" in os.environ:
        return f"{saved} Go on with the same sbatch or srun and --run {folder.name}"
    command = f"{PROGRAM} {shlex.quote(str(folder / 'settings.toml'))} --run {folder.name}"
    also = " (and --coordinator, --processes, --process)" if jax.process_count() > 1 else ""
    return f"{saved} Go on with:\n{command}{also}"
