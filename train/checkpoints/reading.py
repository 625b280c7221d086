"""Reads a run's checkpoints, and finds the newest checkpoint and the best one.

`writing.py` describes a checkpoint's contents.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

import zenflow_jax
from train import Failure
from train.checkpoints.checksums import find_damage
from train.checkpoints.compatibility import check_same_run
from train.cli.settings import ON_DEVICE, SettingsError, option_words
from train.distributed import processes


class CheckpointError(Failure):
    """A checkpoint could not be written or read."""


class Restored(NamedTuple):
    params: Any
    opt_state: Any
    engine_state: Any  # None without an engine; an engine reads its arrays from the checkpoint
    progress: dict[str, Any]  # as passed to `save`


def check_path(folder: Path) -> None:
    """Raises an error if orbax, which treats paths as patterns, could not read from `folder`."""
    folder = folder.absolute()
    if characters := re.findall(r"[][*?\\]", str(folder)):  # orbax 0.12.8
        raise SettingsError(
            f"`output_dir`: checkpoints cannot be read from {folder}, because its "
            f"path contains {characters[0]}. Pass another --output-dir, or rename the folder."
        )


class SavedCheckpoints:
    """The checkpoints of one run. Every process must make the same calls."""

    def __init__(
        self,
        folder: Path,
        *,
        larger_is_better: bool = False,
        describe: Mapping[str, Any],
    ):
        check_path(folder)
        self._folder = folder.absolute()
        self._sign = 1 if larger_is_better else -1
        self._description = describe
        self._figures: dict[int, float] = {}  # validation metric by step
        for name in ("absl", "asyncio"):  # orbax logs failures here, in addition to raising them
            logging.getLogger(name).addFilter(lambda record: record.exc_info is None)

    def newest(self) -> int | None:
        """Returns the step of the newest checkpoint; None if there are no checkpoints."""
        step = max(self.steps(), default=None) if processes.is_first() else None
        text = processes.from_first("" if step is None else str(step))
        return int(text) if text else None

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, including damaged ones, ascending."""
        if not self._folder.is_dir():  # no checkpoint was started
            return []
        return sorted(int(p.name) for p in self._folder.iterdir() if p.name.isdecimal())

    def restore(
        self, step: int, params: Any, opt_state: Any, *, only_engine: bool = False
    ) -> Restored:
        """Restores the checkpoint of `step`; raises `SettingsError` if it belongs to another run.

        Frees each array of `params` and `opt_state` as its restored value arrives, unless
        `only_engine`.
        """
        folder = self._intact(step)
        run = self._read_run(step)
        check_same_run(folder, run, self._description)
        self._figures = dict(run["figures"])
        fresh = {"params": params, "opt_state": opt_state}
        saved, others = split_arrays(fresh)
        check_arrays(folder, run, describe_arrays(saved))
        arrays = saved if only_engine else self._read_state(folder, saved)
        engine_state = None
        kind = run["settings"]
        if kind["stream"] == "weights" or kind["optimizer"] not in ON_DEVICE:
            with ocp.Checkpointer(zenflow_jax.EngineCheckpointHandler()) as reader:
                engine_state = reader.restore(folder / "engine")
        trees = join_arrays(fresh, arrays, others)
        return Restored(**trees, engine_state=engine_state, progress=run["progress"])

    def weights(self, step: int, like: Any) -> Any:
        """Restores only the parameters, in place of those in `like`, which are consumed."""
        folder = self._intact(step)
        saved, others = split_arrays({"params": like, "opt_state": ()})
        run = self._read_run(step)
        arrays = {name: x for name, x in run["arrays"].items() if name.startswith("params.")}
        check_arrays(folder, {**run, "arrays": arrays}, describe_arrays(saved))
        restored = self._read_state(folder, saved, partial_restore=True)
        return join_arrays({"params": like}, restored, others)["params"]

    def _intact(self, step: int) -> Path:
        """Returns a checkpoint's folder; raises an error if it is damaged."""
        folder = self._folder / str(step)
        problem = find_damage(folder) if processes.is_first() else None
        if problem := processes.from_first(problem or ""):
            raise CheckpointError(
                f"checkpoint {step} in {self._folder} is damaged: {problem}. Remove its folder, "
                "and start again: the run resumes from the checkpoint before it."
            )
        return folder

    def _read_run(self, step: int) -> dict[str, Any]:
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
            return reader.restore(self._folder / str(step) / "run")

    def _read_state(self, folder: Path, saved: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Reads arrays in place of `saved`, which are consumed."""
        templates = dict(saved)
        for name, x in saved.items():
            if isinstance(x, jax.Array):
                templates[name] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
                x.delete()  # first, so that the device never holds both
        restore_args = ocp.checkpoint_utils.construct_restore_args(templates)
        args = ocp.args.PyTreeRestore(item=templates, restore_args=restore_args, **options)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(folder / "state", args=args)

    def _best_of(self, steps: Iterable[int]) -> int | None:
        rated = [(self._sign * self._figures[s], s) for s in steps if s in self._figures]
        # NaN is neither better nor worse. Among equals, the latest wins.
        return max((pair for pair in rated if not math.isnan(pair[0])), default=(0, None))[1]


def split_arrays(trees: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a checkpoint's arrays by name, and the rest: placeholder mail and empty arrays."""
    mail = set()
    for state in jax.tree.leaves(trees["opt_state"], is_leaf=_is_zenflow):
        if _is_zenflow(state):
            mail |= {id(x) for x in jax.tree.leaves((state.step_scalars, state.mail))}
    saved, others = {}, {}
    for path, x in jax.tree_util.tree_leaves_with_path(trees):
        place = others if id(x) in mail or x.size == 0 else saved
        place[_name_of(path)] = x
    return saved, others


def _is_zenflow(x: Any) -> bool:
    return isinstance(x, zenflow_jax.ZenFlowState)


def join_arrays(trees: Any, saved: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    """Returns `trees` with the arrays that `split_arrays` returned for similar trees."""

    def restored(path, _):
        name = _name_of(path)
        if name in saved:
            return saved[name]
        x = others[name]
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
