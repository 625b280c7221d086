"""What a run says of its settings and of how to go on, in words that take some finding out."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import jax

from train.settings import Settings
from zenflow_jax.deepspeed import DeepSpeedOptions

PROGRAM = "python -m train.finetune"


def said_of_deepspeed(
    asked: Settings, settings: Settings, deepspeed: DeepSpeedOptions | None
) -> Iterator[str]:
    """Which settings the DeepSpeed config has changed, and which of its keys are not followed.

    Args:
        asked: The settings without it.
        settings: Those in force.
        deepspeed: The config, if there is one.
    """
    if deepspeed is None:
        return
    names = [field.name for field in dataclasses.fields(settings) if field.name != "steps"]
    changed = [n for n in names if getattr(asked, n) != getattr(settings, n)]
    if changed:
        listed = ", ".join(f"{name} {getattr(settings, name)}" for name in changed)
        yield f"{settings.deepspeed} sets: {listed}"
    if deepspeed.not_translated:
        listed = ", ".join(f"`{name}`" for name in deepspeed.not_translated)
        yield f"{settings.deepspeed}: not followed (docs/deepspeed.md): {listed}"


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
