"""Checkpoints of a run: what is in one, how it is written beside the training, how it is found.

    checkpoints/300/state   parameters, optimizer state and the engine's, by orbax; mail is left out
    checkpoints/300/run     step, settings, names of the arrays, open figures of the metrics (JSON)
    checkpoints/300/checksums.json   size and CRC-32 of every file of these
    checkpoints/damaged-400   one that was found damaged; nothing here reads it again

The position in the data is the step: a batch is a function of the seed and its number alone
(`data.py`), so there is no iterator whose state could be saved. Nothing here is ever unpickled.

A checkpoint is written under another name, checksums last, and renamed when it is whole. orbax
notices files that are missing or cut off, but decodes most flipped bits without complaint; hence
the checksums. They are compared before anything is restored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from safetensors import SafetensorError
from safetensors.numpy import save_file

import zenflow_jax
from train import processes
from train.checkpoint_arrays import (
    check_arrays,
    described,
    join,
    name_of,
    split,
    templates_of,
)
from train.checksums import CHECKSUMS, checksums, damage
from train.settings import Settings, SettingsError

# In front of the name of a checkpoint that was found damaged: behind it, `_seal` would take the
# folder for the one that is being written.
DAMAGED = "damaged-"

# What a resumed run may have otherwise than the saved one; the library says the same of its own.
MAY_CHANGE = frozenset(
    "model data deepspeed steps epochs learning_rate warmup_steps warmup_share weight_decay "
    "max_grad_norm host_kernel threads prefetch_bytes send_gradients mesh remat evaluate_every "
    "eval_batches save_every keep keep_best output_dir run progress max_skipped "
    "b1 b2 eps".split()
)


# What the weights are made for, and how they are laid out.
OF_THE_MODEL = "task width layers heads ffn dtype optimizer scan_layers".split()


class CheckpointError(Exception):
    """A checkpoint could not be written; the message is meant to be shown as it is."""


class Restored(NamedTuple):
    """A checkpoint, in its place."""

    params: Any
    opt_state: Any
    engine_state: Any  # None without an engine
    progress: dict[str, Any]  # as given to `save`


class Checkpoints:
    """The checkpoints of one run. Use with `with`; every process must make the same calls.

    Args:
        folder: Where they are, one folder for each. Its files are read by every process.
        keep: How many of the newest are kept.
        keep_best: Whether the one with the best figure of the validation is kept as well.
        larger_is_better: Of that figure.
        describe: What a run must have in common with the one it goes on from: see `description`.
        say: Shows a line to the user.
        read_only: Whether nothing is to be saved: the folder stays as it is, and a run that saves
            there meanwhile is not disturbed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        keep_best: bool,
        larger_is_better: bool = False,
        describe: Mapping[str, Any],
        say: Callable[[str], None],
        read_only: bool = False,
    ):
        self._folder = folder.absolute()
        self._keep = keep
        self._keep_best = keep_best
        self._sign = 1 if larger_is_better else -1
        self._description = describe
        self._say = say
        self._read_only = read_only
        self._writing: int | None = None  # the step of a save that was not heard of since
        self._failed: str | None = None  # what was wrong with the last save
        self._damaged: list[int] = []  # steps, newer than the newest whole one
        self._figures: dict[int, float] = {}  # of the validation after a step
        self._manager: ocp.CheckpointManager | None = None

    def __enter__(self) -> Checkpoints:
        # orbax logs a failure, with a traceback for each of its threads, and raises it too.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        self._unraisable = sys.unraisablehook
        sys.unraisablehook = partial(_pass_over_late_writes, self._unraisable)
        return self

    def __exit__(self, *exception) -> None:
        self.wait()
        if self._manager is not None:  # not so after a save that has failed
            self._manager.close()
        sys.unraisablehook = self._unraisable

    def newest(self) -> int | None:
        """The step of the newest whole checkpoint, None if there are none at all.

        Damaged ones that are newer are named. They stay as they are until `set_aside`.

        Raises:
            SettingsError: If there are some and none is whole, or they cannot be read.
        """
        step = self._newest_whole() if processes.is_first() else None
        text = processes.from_first("" if step is None else str(step))
        return int(text) if text else None

    def set_aside(self) -> None:
        """Renames the damaged checkpoints that `newest` has passed over.

        The run will write others in their place. Call it when the start is known to be a valid one:
        until then it could be of another run, and a renamed checkpoint is one that it lacks.
        """
        if processes.is_first():
            for step in self._damaged:
                old = self._folder / str(step)
                new = old.with_name(f"{DAMAGED}{step}")
                again = 1
                while new.exists():
                    again += 1
                    new = old.with_name(f"{DAMAGED}{step}-{again}")
                old.rename(new)
                self._say(f"renamed the damaged checkpoint {old} to {new.name}; delete it at will")
        processes.from_first("")  # renamed, before another process looks
        if self._manager is not None:
            self._manager.reload()

    def restore(self, step: int, params: Any, opt_state: Any) -> Restored:
        """The checkpoint of `step`.

        Args:
            step: As `newest` returned it.
            params, opt_state: Fresh ones, which are used up: each restored array goes where the
                fresh one was.

        Raises:
            SettingsError: If the checkpoint is of a run with other settings, text or model.
        """
        manager = self._opened()
        run = self._read_run(step)
        self._check(step, run)
        self._figures = dict(run["figures"])
        with_engine = run["settings"]["optimizer"] != "adamw"
        engine_state = zenflow_jax.abstract_engine_state(opt_state) if with_engine else None
        fresh = {"params": params, "opt_state": opt_state, "engine_state": engine_state}
        saved, others = split(fresh)
        check_arrays(self._folder / str(step), run["arrays"], described(saved))
        templates = templates_of(saved)
        # Before the others come, so that the device need not hold both.
        for x in saved.values():
            if isinstance(x, jax.Array):
                x.delete()
        args = ocp.args.PyTreeRestore(
            item=templates, restore_args=ocp.checkpoint_utils.construct_restore_args(templates)
        )
        arrays = manager.restore(step, args=ocp.args.Composite(state=args))["state"]
        return Restored(**join(fresh, arrays, others), progress=run["progress"])

    def save(
        self,
        step: int,
        params: Any,
        opt_state: Any,
        engine_state: Any,
        progress: Mapping[str, Any],
        figure: float | None = None,
    ) -> None:
        """Starts to write a checkpoint; training may go on, and donate what was given, at once.

        Waits for the save before, and until the device has done `step`: from there on the writer
        has copies of its own. On a CPU, where a copy would be in the same memory, it looks at the
        arrays themselves, and the runtime does not donate what is looked at (checked on jax 0.10.2
        and 0.11.2 with orbax 0.12.8). A failure is said and not raised: the next save tries again.

        Args:
            step: Of the run, of which the rest is the state.
            params, opt_state: As the last `exchange`, or without an engine the step, returned them.
            engine_state: `engine.state()`, or None.
            progress: Anything that JSON can hold.
            figure: Of the validation, if there was one: what says which checkpoint is best.
        """
        if figure is not None:
            self.rate(step, figure)
        self.wait()
        self._failed = None
        saved, _ = split({"params": params, "opt_state": opt_state, "engine_state": engine_state})
        run = {
            **self._description,
            "step": step,
            "arrays": described(saved),
            "figures": list(self._figures.items()),
            "progress": progress,
        }
        args = ocp.args.Composite(
            # One file for each process, as orbax would copy what it has to divide among several.
            state=ocp.args.PyTreeSave(saved, ocdbt_target_data_file_size=0),
            run=ocp.args.JsonSave(run),
        )
        self._writing = step
        with self._failures():
            # Forced, as orbax would pass over a step that is older than its newest.
            self._opened().save(step, args=args, force=True)

    def poll(self) -> None:
        """Says so if the save that was under way has failed. Does not wait."""
        if self._writing is not None and not self._opened().is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits for the save that is under way; says so if it has failed."""
        if self._writing is None:
            return
        with self._failures():
            self._opened().wait_until_finished()
        self._writing = None

    def finish(self) -> None:
        """Waits for the last save.

        Raises:
            CheckpointError: If it has failed.
        """
        self.wait()
        if self._failed is not None:
            raise CheckpointError(self._failed)

    def rate(self, step: int, figure: float) -> None:
        """Says how well the weights after a step do; what was said of it before is forgotten."""
        self._figures[step] = figure

    def best(self, *, or_step: int) -> int:
        """Which of the checkpoints that are there did best, or the weights after `or_step`.

        These need no checkpoint. Without `keep_best` it is always they.
        """
        if not self._keep_best:
            return or_step
        return self._best_of([*self._opened().all_steps(), or_step]) or or_step

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
        newest = self.newest()
        there = sorted(self._opened().all_steps()) if newest is not None else []
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

    def _read_run(self, step: int) -> dict[str, Any]:
        args = ocp.args.Composite(run=ocp.args.JsonRestore())
        return self._opened().restore(step, args=args)["run"]

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
        return self._weights(step, like)

    def _weights(self, step: int, like: Any) -> Any:
        saved, others = split({"params": like, "opt_state": ()})
        there = self._read_run(step)["arrays"]
        there = {name: what for name, what in there.items() if name.startswith("params.")}
        check_arrays(self._folder / str(step), there, described(saved))
        templates = templates_of(saved)
        for x in saved.values():
            if isinstance(x, jax.Array):
                x.delete()
        args = ocp.args.PyTreeRestore(
            item=templates,
            restore_args=ocp.checkpoint_utils.construct_restore_args(templates),
            partial_restore=True,
        )
        arrays = self._opened().restore(step, args=ocp.args.Composite(state=args))["state"]
        return join({"params": like}, arrays, others)["params"]

    def _best_of(self, steps: Iterable[int]) -> int | None:
        rated = [(self._sign * self._figures[s], s) for s in steps if s in self._figures]
        # What is not a number is neither better nor worse. Of equals the later one.
        return max((pair for pair in rated if not math.isnan(pair[0])), default=(0, None))[1]

    def _opened(self) -> ocp.CheckpointManager:
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                preservation_policy=_NewestAndBest(
                    self._keep, self._best_of if self._keep_best else None
                ),
                read_only=self._read_only,
                # Of a run that was killed while it wrote; to a reader they are of one that writes.
                cleanup_tmp_directories=not self._read_only,
                async_options=ocp.AsyncOptions(
                    post_finalization_callback=self._seal,
                    # A folder that cannot be made is then an error at once; otherwise each array
                    # waits minutes for it.
                    create_directories_asynchronously=False,
                ),
            )
            # What is not compressed is written from where it is; compressed, all of it is in memory
            # once more (benchmarks/LOG.md; both on orbax 0.12.8).
            handlers = {
                "state": ocp.PyTreeCheckpointHandler(use_compression=False),
                "run": ocp.JsonCheckpointHandler(),
            }
            self._manager = ocp.CheckpointManager(
                self._folder, options=options, item_handlers=handlers
            )
        return self._manager

    def _seal(self) -> None:
        # Called by orbax's thread on process 0, when all processes have written all their files and
        # before the folder gets its name (checked on orbax 0.12.8; there is no other such hook).
        (folder,) = self._unnamed(self._writing)
        text = json.dumps(checksums(folder), indent=1)
        (folder / CHECKSUMS).write_text(text, encoding="utf-8")

    def _unnamed(self, step: int | None) -> list[Path]:
        """The checkpoint of that step under the name that orbax gives it until it is whole."""
        # Nothing else that begins with the number: a user's copy, say, of a checkpoint.
        return list(self._folder.glob(f"{step}{ocp.utils.TMP_DIR_SUFFIX}*"))

    @contextlib.contextmanager
    def _failures(self):
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError is what tensorstore makes of an OSError
            reason = " ".join(str(error).split())
            self._failed = (
                f"expected to write checkpoint {self._writing} to {self._folder}, got: "
                f"{reason if len(reason) < 300 else reason[:100] + ' ... ' + reason[-200:]}. Make "
                "room there or see to its permissions; older checkpoints are as they were."
            )
            self._say(f"error: {self._failed}")
            # Writes of that save that had not begun are dropped, of which Python says at its end,
            # behind the message that counts, that they were never awaited (orbax 0.12.8).
            unwritten = r"coroutine '(async_serialize|.*write_fragment).*' was never awaited"
            warnings.filterwarnings("ignore", unwritten, RuntimeWarning)
            # It would keep the arrays that it has not written (orbax 0.12.8).
            failed, self._manager = self._manager, None
            if failed is not None:
                failed.close()
            if processes.is_first():
                for left in self._unnamed(self._writing):
                    shutil.rmtree(left, ignore_errors=True)  # no more than room is lost by it
            self._writing = None

    def _newest_whole(self) -> int | None:
        try:
            found = [int(p.name) for p in self._folder.iterdir() if p.name.isdecimal()]
            damaged: list[tuple[int, str]] = []
            for step in sorted(found, reverse=True):
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
        except FileNotFoundError:  # of the folder itself: no checkpoint was begun
            return None
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

    def _check(self, step: int, run: Mapping[str, Any]) -> None:
        folder = self._folder / str(step)
        for name, now in self._description["settings"].items():
            saved = run["settings"].get(name, now)
            if saved != now:
                if self._read_only:
                    remedy = "or give the settings.toml of that run as the config file."
                else:
                    remedy = (
                        "or name another --run to begin a new one. (What may change: "
                        f"{', '.join(sorted(MAY_CHANGE))}.)"
                    )
                raise SettingsError(
                    f"`{name}`: expected {saved}, as in the run that {folder} is of, got {now}. "
                    f"Pass {_flags(name, saved)}, {remedy}"
                )
        for name, now in self._description["model"].items():
            saved = run.get("model", {}).get(name, now)
            if saved != now:
                raise SettingsError(
                    f"`model`: expected a config.json with the {name} of the run that {folder} is "
                    f"of, {saved}, got {now}: that is another model, whose arrays have the same "
                    "shapes. Name the folder that the run has begun with, or a copy of it."
                )
        if run["data"] != self._description.get("data", run["data"]):
            raise SettingsError(
                f"expected the data that the run of {folder} has read, got other data. Go on with "
                "the same files (of standard_library: with the same Python) and the same "
                "tokenizer, or name another --run to begin a new one."
            )


def _flags(name: str, value: Any) -> str:
    """What the command line says to give that value to a setting."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    other = "--full-warm-up-share None " if name == "full_warm_up_rounds" else ""
    return f"{other}--{flag} {value}"


@dataclasses.dataclass
class _NewestAndBest(ocp.checkpoint_managers.PreservationPolicy):
    """Which checkpoints are kept.

    Not orbax's `BestN`: it knows a figure only if that was there when the checkpoint was saved, and
    keeps all that have none.
    """

    newest: int
    best: Callable[[Iterable[int]], int | None] | None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*sorted(steps)[-self.newest :]}
        if self.best is not None:
            kept.add(self.best(steps))
        return [step in kept for step in steps]


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


def description(settings: Settings, data: int, config: Any = None) -> dict[str, Any]:
    """What a run must have in common with the one it goes on from: JSON.

    Args:
        settings: Of the run.
        data: A checksum of all that it reads.
        config: As for `description_of_model`.
    """
    fixed = {k: v for k, v in dataclasses.asdict(settings).items() if k not in MAY_CHANGE}
    # The other two have the same bits, and may be exchanged.
    sums = settings.send_gradients == "per_window"
    fixed["send_gradients"] = "per_window" if sums else "during_step"
    # However they were given.
    del fixed["full_warm_up_share"]
    fixed["full_warm_up_rounds"] = settings.warm_up_rounds
    return {"settings": fixed, "data": data, "model": _described(config)}


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


def write_model(path: Path, masters: Any) -> None:
    """Writes weights as safetensors, named by key path: `blocks.0.gate.kernel`.

    All processes must call it; the first writes, under another name until the file is whole.

    Raises:
        CheckpointError: If it cannot be written.
    """
    arrays = {}
    for name, x in jax.tree_util.tree_leaves_with_path(masters):
        value = processes.whole(x)
        if processes.is_first():
            arrays[name_of(name)] = np.ascontiguousarray(value, np.float32)
    if not processes.is_first():
        return
    part = path.with_name(path.name + ".part")
    try:
        save_file(arrays, part)
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise CheckpointError(
            f"expected to write the model to {path}, got: {error}. Make room there or see to its "
            "permissions, and start the run again: it goes on from its last checkpoint."
        ) from error


def _pass_over_late_writes(report: Callable[[Any], Any], unraisable: Any) -> None:
    """For `sys.unraisablehook`: what orbax leaves behind after a write that has failed is no news.

    The other writes of that save are then still under way in tensorstore. As each ends it wakes an
    event loop that orbax has closed, and Python would show a traceback for each, in front of the
    message that says what is wrong (orbax 0.12.8).
    """
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        report(unraisable)
