"""The arrays of a checkpoint, by name, without those that a restart makes itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import zenflow_jax
from train.settings import SettingsError


def split(trees: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays that a checkpoint has, by name, and the others.

    The others are the blank mail, which is no state, and empty arrays, which orbax refuses. With
    "per_window" the mail is the open window's sum, and is saved.
    """
    mail = set()
    for state in jax.tree.leaves(trees["opt_state"], is_leaf=_is_zenflow):
        if _is_zenflow(state):
            blank = [] if state.send_gradients == "per_window" else state.mail
            mail |= {id(x) for x in jax.tree.leaves((state.step_scalars, blank))}
    saved, others = {}, {}
    for path, x in jax.tree_util.tree_leaves_with_path(trees):
        place = others if id(x) in mail or x.size == 0 else saved
        place[name_of(path)] = x
    return saved, others


def _is_zenflow(x: Any) -> bool:
    return isinstance(x, zenflow_jax.ZenFlowState)


def join(trees: Any, saved: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    """`trees` with the arrays that `split` returned for trees like them."""

    def one(path, _):
        name = name_of(path)
        if name in saved:
            return saved[name]
        x = others[name]
        if isinstance(x, jax.ShapeDtypeStruct):  # empty
            blank = np.zeros(x.shape, x.dtype)
            return jax.make_array_from_callback(x.shape, x.sharding, lambda index: blank[index])
        return x

    return jax.tree_util.tree_map_with_path(one, trees)


def name_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def described(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{np.dtype(x.dtype).name} {tuple(x.shape)}" for name, x in arrays.items()}


def check_arrays(
    folder: Path, saved: Mapping[str, str], wanted: Mapping[str, str], version: str
) -> None:
    """Refuses the checkpoint in `folder` if it has other arrays, or a layout of another version."""
    for name in [*wanted, *saved]:
        if saved.get(name) != wanted.get(name):
            raise SettingsError(
                f"expected the array `{name}` to be {saved.get(name, 'absent')}, as in {folder}, "
                f"got {wanted.get(name, 'none')}: that checkpoint is of another model or "
                f"optimizer, or of another layout (zenflow_jax {version} wrote it, this is "
                f"{zenflow_jax.__version__}). Name another --run to begin a new one."
            )
