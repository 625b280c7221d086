"""The arrays of a checkpoint, by name; what is made anew when it is restored is none of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import zenflow_jax
from train.settings import SettingsError


def split(trees: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays that a checkpoint has, by name, and the others.

    Others are the blank mail, of which the library says that it is no state, and what is empty,
    which orbax refuses. With "per_window" the mail is no blank but the open window's sum.
    """
    mail = set()
    for state in jax.tree.leaves(trees["opt_state"], is_leaf=_is_zenflow):
        if _is_zenflow(state):
            blank = [] if state.send_gradients == "per_window" else state.mail
            mail |= {id(x) for x in jax.tree.leaves((state.step_scalars, blank))}
    saved, others = {}, {}
    for path, x in jax.tree_util.tree_leaves_with_path(trees):
        where = others if id(x) in mail or x.size == 0 else saved
        where[name_of(path)] = x
    return saved, others


def _is_zenflow(x: Any) -> bool:
    return isinstance(x, zenflow_jax.ZenFlowState)


def join(trees: Any, saved: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    """`trees` with the arrays that `split` made of other ones."""

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


def templates_of(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Where each array of a checkpoint is to go."""
    return {
        name: x
        if isinstance(x, np.ndarray)
        else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in arrays.items()
    }


def described(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{np.dtype(x.dtype).name} {tuple(x.shape)}" for name, x in arrays.items()}


def layout_in(arrays: Iterable[str]) -> str | None:
    """The layout of the optimizer state among arrays, by their names; None if they name none.

    Examples:
        >>> layout_in(["params.w", "opt_state.0.layout.layout_1_of_zenflow_jax_0_2"])
        'layout_1_of_zenflow_jax_0_2'
        >>> layout_in(["params.w"])
    """
    return next((name.split(".")[-1] for name in arrays if ".layout.layout_" in name), None)


def check_layout(folder: Path, saved: Iterable[str], version: str | None, here: str | None) -> None:
    """Refuses a checkpoint whose optimizer state has another layout than that of now.

    Args:
        folder: The checkpoint's.
        saved: The names of its arrays.
        version: Of the zenflow_jax that wrote it; None before 0.2.0, which did not say.
        here: The layout of now; None for an optimizer of which zenflow_jax knows none.

    Raises:
        SettingsError: If it has.
    """
    there = layout_in(saved)
    if here is not None and there != here:
        wrote = f"zenflow_jax {version}" if version else "a version of zenflow_jax before 0.2.0"
        raise SettingsError(
            f"expected a checkpoint with {here}, which zenflow_jax {zenflow_jax.__version__} "
            f"reads, got {folder} with {there or 'a layout that has no number'}, which {wrote} "
            f"wrote. Go on with that run by {wrote if version else 'that version'}, or name "
            "another --run to begin a new one."
        )


def check_arrays(folder: Path, saved: Mapping[str, str], here: Mapping[str, str]) -> None:
    for name in [*here, *saved]:
        if saved.get(name) != here.get(name):
            raise SettingsError(
                f"expected the array `{name}` to be {saved.get(name, 'absent')}, as in {folder}, "
                f"got {here.get(name, 'none')}. That checkpoint is of another model or optimizer: "
                "name another --run to begin a new one."
            )
