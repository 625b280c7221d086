"""Describes a run for its checkpoints; a resumed run must match the description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train.cli.settings import ON_DEVICE, SettingsError
from train.model.decoder import parts_that_stream

# Settings that a resumed run may change; the library has its own list. `eval_batches` must stay the
# same: metrics on different samples cannot show which checkpoint is best.
MAY_CHANGE = frozenset(
    "model data chat_template steps epochs learning_rate schedule "
    "warmup_steps warmup_share weight_decay max_grad_norm host_kernel host_state threads "
    "send_gradients layer_inputs layer_updates mesh remat stream log_every "
    "evaluate_every save_every keep keep_best output_dir run "
    "max_skipped b1 b2 eps".split()
)

# Settings that determine the weights' purpose and layout, and which weights are best.
MODEL_SETTINGS = "task width layers heads ffn dtype optimizer scan_layers stream best".split()


def description(
    settings: Mapping[str, Any], data: int, config: Any = None, labels: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the facts that a resumed run must share; `data` is a checksum.

    The full warm-up is stored in rounds.
    """
    fixed = {k: v for k, v in settings.items() if k not in MAY_CHANGE | {"full_warm_up_share"}}
    fixed["stream"] = settings["stream"]
    if settings["optimizer"] in ON_DEVICE:  # a `HostEngine` converts moments
        fixed["host_state"] = settings["host_state"]
    # Labels are not compared, because the data determines them; the mesh may change.
    rest = {"labels": list(labels), "data": data, "mesh": settings["mesh"]}
    return {**description_of_model(fixed, config), **rest}


def description_of_model(settings: Mapping[str, Any], config: Any = None) -> dict[str, Any]:
    """Returns the part of a `description` that a reader of the weights must share."""
    stream = settings["stream"]
    in_parts = stream == "weights" or parts_that_stream(config, stream) > 1
    settings = {**settings, "stream": stream if in_parts else "none"}
    # Array shapes do not reveal everything: the rotations' base, for example, is missing.
    model = {} if config is None else {name: str(x) for name, x in config._asdict().items()}
    return {"settings": settings, "model": model}


def check_same_run(folder: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises `SettingsError` if the checkpoint's description `saved` belongs to another run."""
    for kind, where in (("settings", ""), ("model", " in the model's config.json")):
        for name, value in wanted[kind].items():
            before = saved.get(kind, {}).get(name, value)
            if before != value:
                raise SettingsError(
                    f"`{name}`{where}: is {value}, but was {before} in the run that wrote "
                    f"{folder}. Pass that run's settings.toml as the config, or another --run."
                )
    if saved["data"] != wanted.get("data", saved["data"]):
        raise SettingsError(
            f"the data differs from that of the run that wrote {folder}: the files (for "
            "standard_library: the Python version), the tokenizer or the chat template."
        )
