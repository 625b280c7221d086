"""Describes a run and its arrays for its checkpoints; a resumed run must match the description."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import zenflow_jax
from train.cli.settings import ON_DEVICE, SettingsError, option_words
from train.model.decoder import parts_that_stream

# Settings that a resumed run may change; the library has its own list. `eval_batches` must stay the
# same: metrics on different samples cannot show which checkpoint is best.
MAY_CHANGE = frozenset(
    "model data chat_template steps epochs learning_rate schedule "
    "warmup_steps warmup_share weight_decay max_grad_norm host_kernel host_state "
    "send_gradients layer_inputs layer_updates mesh remat stream log_every evaluate_every "
    "save_every keep keep_best output_dir run max_skipped b1 b2 eps".split()
)


def description(settings: Mapping[str, Any], data: int, config: Any = None) -> dict[str, Any]:
    """Returns the facts that a resumed run must share; `data` is a checksum.

    The full warm-up is stored in rounds.
    """
    fixed = {k: v for k, v in settings.items() if k not in MAY_CHANGE | {"full_warm_up_share"}}
    stream = settings["stream"]
    in_parts = stream == "weights" or parts_that_stream(config, stream) > 1
    fixed["stream"] = stream if in_parts else "none"
    if settings["optimizer"] in ON_DEVICE:  # a `HostEngine` converts moments
        fixed["host_state"] = settings["host_state"]
    # Array shapes do not reveal everything: the rotations' base, for example, is missing.
    model = {} if config is None else {name: str(x) for name, x in config._asdict().items()}
    # The mesh may change.
    return {"settings": fixed, "model": model, "data": data, "mesh": settings["mesh"]}


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
    if saved["data"] != wanted["data"]:
        raise SettingsError(
            f"the data differs from that of the run that wrote {folder}: the files (for "
            "standard_library: the Python version), the tokenizer or the chat template."
        )


def split_arrays(trees: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a checkpoint's arrays by name, and the rest: placeholder mail and empty arrays."""
    mail = set()
    for state in jax.tree.leaves(trees["opt_state"], is_leaf=_is_zenflow):
        if _is_zenflow(state):
            mail |= {id(x) for x in jax.tree.leaves((state.step_scalars, state.mail))}
    saved, rest = {}, {}
    for path, x in jax.tree_util.tree_leaves_with_path(trees):
        place = rest if id(x) in mail or x.size == 0 else saved
        place[_name_of(path)] = x
    return saved, rest


def _is_zenflow(x: Any) -> bool:
    return isinstance(x, zenflow_jax.ZenFlowState)


def join_arrays(trees: Any, saved: Mapping[str, Any], rest: Mapping[str, Any]) -> Any:
    """Returns `trees` with the arrays that `split_arrays` returned for similar trees."""

    def restored(path, _):
        name = _name_of(path)
        if name in saved:
            return saved[name]
        x = rest[name]
        if isinstance(x, jax.ShapeDtypeStruct):  # empty
            blank = np.zeros(x.shape, x.dtype)
            return jax.make_array_from_callback(x.shape, x.sharding, lambda index: blank[index])
        return x

    return jax.tree_util.tree_map_with_path(restored, trees)


def describe_arrays(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{np.dtype(x.dtype).name} {tuple(x.shape)}" for name, x in arrays.items()}


def check_arrays(folder: Path, run: Mapping[str, Any], wanted: Mapping[str, str]) -> None:
    """Rejects a checkpoint with different arrays, or with another version's layout."""
    saved: Mapping[str, str] = run["arrays"]
    different = [name for name in [*wanted, *saved] if saved.get(name) != wanted.get(name)]
    if not different:
        return
    reason, remedy = (
        f"the model, optimizer or layout differs (zenflow_jax {run['zenflow_jax']} wrote the "
        f"checkpoint, this is {zenflow_jax.__version__})",
        f"Pass {folder.parent.parent / 'settings.toml'} as the config",
    )
    name = different[0]
    if saved.keys() == wanted.keys() and all(x.startswith("opt_state.") for x in different):
        reason = "the mesh divides channels into other pieces, so each selects another number"
        remedy = f"Pass {' '.join(option_words('mesh', run.get('mesh')))}"
    raise SettingsError(
        f"the array `{name}` is {saved.get(name, 'absent')} in {folder}, but "
        f"{wanted.get(name, 'absent')} in this run: {reason}. {remedy}, or pass another --run to "
        "start again."
    )


def _name_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
