"""The checkpoints of a run that are there: which are whole, which did best, and what is in them.

Nothing here writes. How they are written, and what is in one, is in `checkpoints.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

import zenflow_jax
from train import processes
from train.checkpoint_arrays import (
    check_arrays,
    check_layout,
    described,
    join,
    layout_in,
    split,
    templates_of,
)
from train.checksums import damage
from train.run_description import check_same_run
from train.settings import SettingsError


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message is meant to be shown as it is."""


class Restored(NamedTuple):
    """A checkpoint, in its place."""

    params: Any
    opt_state: Any
    engine_state: Any  # None without an engine; an engine reads its arrays from the checkpoint
    progress: dict[str, Any]  # as given to `save`


class SavedCheckpoints:
    """The checkpoints of one run. Every process must make the same calls.

    Args:
        folder: Where they are, one folder for each. Its files are read by every process.
        larger_is_better: Of the figure of a validation.
        describe: What a run must have in common with the one that reads it: see
            `run_description.py`.
        say: Shows a line to the user.
    """

    # What to do if another setting than the run's is meant: the end of a sentence.
    _otherwise = "or give the settings.toml of that run as the config file."

    def __init__(
        self,
        folder: Path,
        *,
        larger_is_better: bool = False,
        describe: Mapping[str, Any],
        say: Callable[[str], None],
    ):
        self._folder = folder.absolute()
        self._sign = 1 if larger_is_better else -1
        self._description = describe
        self._say = say
        self._damaged: list[int] = []  # steps, newer than the newest whole one
        self._figures: dict[int, float] = {}  # of the validation after a step
        # orbax logs a failure, with a traceback for each of its threads, and raises it too.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)

    def newest(self) -> int | None:
        """The step of the newest whole checkpoint, None if there are none at all.

        Damaged ones that are newer are named. They stay as they are until `set_aside`.

        Raises:
            SettingsError: If there are some and none is whole, or they cannot be read.
        """
        step = self._newest_whole() if processes.is_first() else None
        text = processes.from_first("" if step is None else str(step))
        return int(text) if text else None

    def steps(self) -> list[int]:
        """The checkpoints that have their name, and so are written, damaged ones too: ascending."""
        if not self._folder.is_dir():  # no checkpoint was begun
            return []
        return sorted(int(p.name) for p in self._folder.iterdir() if p.name.isdecimal())

    def labels(self) -> tuple[str, ...]:
        """The names of the classes that the run tells apart, by its newest whole checkpoint.

        () if it tells none, there is no checkpoint, or one of before that does not say.
        """
        newest = self.newest()
        return () if newest is None else tuple(self._read_run(newest).get("labels", ()))

    def restore(self, step: int, params: Any, opt_state: Any) -> Restored:
        """The checkpoint of `step`.

        Args:
            step: As `newest` returned it.
            params, opt_state: Fresh ones, which are used up: each restored array goes where the
                fresh one was.

        Raises:
            SettingsError: If the checkpoint is of a run with other settings, text or model.
        """
        run = self._read_run(step)
        self._check(step, run)
        self._figures = dict(run["figures"])
        fresh = {"params": params, "opt_state": opt_state}
        saved, others = split(fresh)
        here = described(saved)
        check_layout(
            self._folder / str(step), run["arrays"], run.get("zenflow_jax"), layout_in(here)
        )
        check_arrays(self._folder / str(step), run["arrays"], here)
        folder = self._folder / str(step)
        arrays = self._read_state(folder, saved)
        engine_state = None
        if run["settings"]["optimizer"] != "adamw":
            with ocp.Checkpointer(zenflow_jax.EngineCheckpointHandler()) as reader:
                engine_state = reader.restore(folder / "engine")
        return Restored(
            **join(fresh, arrays, others), engine_state=engine_state, progress=run["progress"]
        )

    def find(self, which: str, *, rival: float = math.nan) -> int | None:
        """The step of a checkpoint by its number, or of the "best" of those that have figures.

        Args:
            which: A number, or "best".
            rival: The figure of weights that are in no checkpoint; NaN if there are none.

        Returns:
            The step; None if "best" is asked for and the rival is at least as good.

        Raises:
            SettingsError: If there is none, or it is of a run with other settings.
        """
        newest, there = self.newest(), self.steps()
        step = int(which) if which != "best" else None
        if step is None:
            if newest is not None:
                run = self._read_run(newest)
                self._check(newest, run)
                self._figures = dict(run["figures"])
            step = self._best_of(there)
            beaten = step is None or self._sign * self._figures[step] <= self._sign * rival
            if beaten and not math.isnan(rival):
                return None
        if step not in there:
            listed = ", ".join(map(str, there)) or "none"
            known = ", ".join(str(s) for s in there if s in self._figures) or "none"
            what = f"; of these {known} were validated" if which == "best" else ""
            raise SettingsError(
                f"`--export`: expected one of the checkpoints in {self._folder} ({listed}), got "
                f"{which}{what}. Name one of them."
            )
        if which != "best":
            self._check(step, self._read_run(step))
        return step

    def weights(self, step: int, like: Any) -> Any:
        """The parameters of a checkpoint, where those of `like` are.

        Args:
            step: Of one that is there.
            like: The parameters of the run, of any step, or NumPy arrays like them; they are used
                up.

        Raises:
            CheckpointError: If the checkpoint is damaged.
            SettingsError: If it has other parameters.
        """
        if problem := processes.from_first(damage(self._folder / str(step)) or ""):
            raise CheckpointError(
                f"expected a whole checkpoint {step} in {self._folder}, got one that is damaged: "
                f"{problem}. Put a copy in its place, or take another one; at the end of a run "
                "--no-keep-best takes the weights of the last step."
            )
        saved, others = split({"params": like, "opt_state": ()})
        there = self._read_run(step)["arrays"]
        there = {name: what for name, what in there.items() if name.startswith("params.")}
        check_arrays(self._folder / str(step), there, described(saved))
        arrays = self._read_state(self._folder / str(step), saved, partial_restore=True)
        return join({"params": like}, arrays, others)["params"]

    def _read_run(self, step: int) -> dict[str, Any]:
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
            return reader.restore(self._folder / str(step) / "run")

    def _read_state(self, folder: Path, saved: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Arrays in the place of `saved`, which are used up."""
        templates = templates_of(saved)
        # Before the others come, so that the device need not hold both.
        for x in saved.values():
            if isinstance(x, jax.Array):
                x.delete()
        restore_args = ocp.checkpoint_utils.construct_restore_args(templates)
        args = ocp.args.PyTreeRestore(item=templates, restore_args=restore_args, **options)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(folder / "state", args=args)

    def _check(self, step: int, run: Mapping[str, Any]) -> None:
        folder = self._folder / str(step)
        check_same_run(folder, run, self._description, otherwise=self._otherwise)

    def _best_of(self, steps: Iterable[int]) -> int | None:
        rated = [(self._sign * self._figures[s], s) for s in steps if s in self._figures]
        # What is not a number is neither better nor worse. Of equals the later one.
        return max((pair for pair in rated if not math.isnan(pair[0])), default=(0, None))[1]

    def _newest_whole(self) -> int | None:
        try:
            damaged: list[tuple[int, str]] = []
            for step in reversed(self.steps()):
                problem = damage(self._folder / str(step))
                if problem is None:
                    for newer, what in damaged:
                        self._say(
                            f"checkpoint {newer} is damaged: {what}. The newest whole one is that "
                            f"of step {step}."
                        )
                    self._damaged = [newer for newer, _ in damaged]
                    return step
                damaged.append((step, problem))
        except OSError as error:
            raise SettingsError(
                f"expected checkpoints that can be read in {self._folder}, got: {error}. See to "
                "the permissions, or name another --run."
            ) from error
        if damaged:
            listed = "; ".join(f"{step}: {what}" for step, what in damaged)
            raise SettingsError(
                f"expected a whole checkpoint in {self._folder}, got damaged ones alone "
                f"({listed}). Put a copy in their place, or name another --run to begin anew."
            )
        return None
