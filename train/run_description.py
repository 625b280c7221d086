"""What a run must have in common with the one that it goes on from, and with one that it reads.

A checkpoint has a `description` of its run, in JSON: the settings that may not change, a checksum
of the data, and what the config of the model's folder says. It is compared with that of the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from train import processes
from train.settings import Settings, SettingsError

# In the folder of a run, a copy of the DeepSpeed config that it goes by.
DEEPSPEED = "deepspeed.json"

# What a resumed run may have otherwise than the saved one; the library says the same of its own.
# Not `eval_batches`: figures of other samples cannot tell which checkpoint is best.
MAY_CHANGE = frozenset(
    "model data chat_template deepspeed steps epochs learning_rate warmup_steps warmup_share "
    "weight_decay max_grad_norm host_kernel host_state threads prefetch_bytes send_gradients mesh "
    "remat log_every evaluate_every save_every keep keep_best output_dir run "
    "progress max_skipped b1 b2 eps".split()
)

# Settings that checkpoints of before do not name, and what the runs of these did.
OF_BEFORE = {"packing": "joined"}

# What the weights are made for, and how they are laid out.
OF_THE_MODEL = "task width layers heads ffn dtype optimizer scan_layers".split()


def description(
    settings: Settings, data: int, config: Any = None, labels: Sequence[str] = ()
) -> dict[str, Any]:
    """What a run must have in common with the one it goes on from: JSON.

    Args:
        settings: Of the run.
        data: A checksum of all that it reads.
        config: As for `description_of_model`.
        labels: Names of the classes, in the order of their ids.
    """
    fixed = {k: v for k, v in dataclasses.asdict(settings).items() if k not in MAY_CHANGE}
    # The other two have the same bits, and may be exchanged.
    sums = settings.send_gradients == "per_window"
    fixed["send_gradients"] = "per_window" if sums else "during_step"
    if settings.task != "language":
        del fixed["packing"]
    # However they were given.
    del fixed["full_warm_up_share"]
    fixed["full_warm_up_rounds"] = settings.warm_up_rounds
    return {
        "settings": fixed,
        "labels": list(labels),  # not compared: the data says the same
        "data": data,
        "model": _described(config),
        "deepspeed": settings.deepspeed,  # not compared: it has put its values in the settings
    }


def description_of_model(settings: Settings, config: Any = None) -> dict[str, Any]:
    """What one must have in common with a run to read its weights: a part of its `description`.

    Args:
        settings: Of the run.
        config: Of the folder that its model is from, a NamedTuple; None if it is from none.
    """
    fixed = {name: getattr(settings, name) for name in OF_THE_MODEL}
    return {"settings": fixed, "model": _described(config)}


def _described(config: Any) -> dict[str, str]:
    # Not all of it is in the shapes of the arrays: the base of the rotations is not.
    return {} if config is None else {name: str(x) for name, x in config._asdict().items()}


def check_same_run(
    folder: Path, run: Mapping[str, Any], here: Mapping[str, Any], *, otherwise: str
) -> None:
    """Compares the run of a checkpoint with this one.

    Args:
        folder: The checkpoint's.
        run: What is saved of its run.
        here: As `description` or `description_of_model` gave it.
        otherwise: What to do if another setting is meant: the end of a sentence.

    Raises:
        SettingsError: If it is another run.
    """
    for name, now in here["settings"].items():
        saved = run["settings"].get(name, OF_BEFORE.get(name, now))
        if saved != now:
            remedy = _remedy(folder.parents[1] / DEEPSPEED, here.get("deepspeed"), name, saved)
            raise SettingsError(
                f"`{name}`: expected {saved}, as in the run that {folder} is of, got {now}. "
                f"{remedy}, {otherwise}"
            )
    for name, now in here["model"].items():
        saved = run.get("model", {}).get(name, now)
        if saved != now:
            raise SettingsError(
                f"`model`: expected a config.json with the {name} of the run that {folder} is "
                f"of, {saved}, got {now}: that is another model, whose arrays have the same "
                "shapes. Name the folder that the run has begun with, or a copy of it."
            )
    if run["data"] != here.get("data", run["data"]):
        raise SettingsError(
            f"expected the data that the run of {folder} has read, got other data. Go on with "
            "the same files (of standard_library: with the same Python), the same tokenizer "
            "and of chats the same template, or name another --run to begin a new one."
        )


def _remedy(copy: Path, deepspeed: str | None, name: str, value: Any) -> str:
    """What to do to give that value to a setting, which a DeepSpeed config may have the say in."""
    flags = _flags(name, value)
    if deepspeed is None:
        return f"Pass {flags}"
    if not copy.exists():
        return f"Leave --deepspeed out, as the run has begun without it, and pass {flags}"
    if Path(deepspeed).absolute() == copy.absolute():
        return f"Change it in {copy}, or pass {flags} where that says nothing of it"
    return f"Pass --deepspeed {copy}, which the run has gone by, and {flags} where that has no word"


def _flags(name: str, value: Any) -> str:
    """What the command line says to give that value to a setting."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    other = "--full-warm-up-share None " if name == "full_warm_up_rounds" else ""
    return f"{other}--{flag} {value}"


def saved_rounds(folder: Path) -> int | None:
    """The rounds of the full warm-up in the run whose checkpoints are there; None if there is none.

    A run has the same ones from its start to its end, so any of its checkpoints does.

    Args:
        folder: The checkpoints'. All processes must call it.
    """
    rounds = ""
    if processes.is_first() and folder.is_dir():
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
            for path in sorted(p for p in folder.iterdir() if p.name.isdecimal()):
                try:
                    run = reader.restore(path.absolute() / "run")
                    rounds = str(int(run["settings"]["full_warm_up_rounds"]))
                    break
                except (OSError, ValueError, TypeError, KeyError):
                    pass  # damaged, of which `newest` will speak
    rounds = processes.from_first(rounds)
    return int(rounds) if rounds else None


def with_saved_rounds(settings: Settings) -> tuple[Settings, str | None]:
    """The settings, with the full warm-up of the run that they go on with in place of a share.

    A share is one of the steps that the run was to have when it began.

    Args:
        settings: Of the run, with `steps`. All processes must call it.

    Returns:
        The settings, and a sentence to be shown where the share has come to another number.
    """
    if settings.run is None or settings.full_warm_up_share is None:
        return settings, None
    rounds = saved_rounds(Path(settings.output_dir) / settings.run / "checkpoints")
    if rounds is None:
        return settings, None
    told = None
    if rounds != settings.warm_up_rounds:
        told = (
            f"full_warm_up_share {settings.full_warm_up_share:g} would be {settings.warm_up_rounds}"
            f" of {settings.steps} steps: the full warm-up has the {rounds} that the run began with"
        )
    return (
        dataclasses.replace(settings, full_warm_up_share=None, full_warm_up_rounds=rounds),
        told,
    )
