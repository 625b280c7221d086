"""Writes a run's checkpoints in parallel with training, and reads them.

    checkpoints/300/state   parameters and optimizer state, by orbax, without mail
    checkpoints/300/engine  the engine's state, written from its own memory
    checkpoints/300/run     step, settings, array names, metrics (JSON)
    checkpoints/300/checksums.json   size and CRC-32 of every file in these folders

The step is the position in the data (`tasks/batches.py`). A checkpoint gets its final name when it
is complete. orbax decodes most flipped bits without an error, so checksums are compared
before anything is restored. No data is ever unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

import zenflow_jax
from train import Failure
from train.checkpoints.checksums import CHECKSUMS, checksums, find_damage
from train.checkpoints.compatibility import (
    check_arrays,
    check_same_run,
    describe_arrays,
    join_arrays,
    split_arrays,
)
from train.cli.settings import ON_DEVICE, SettingsError
from train.distributed import processes
from zenflow_jax import layerwise


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


class Checkpoints:
    """The checkpoints of one run; keeps the newest `keep`. Every process must make the same calls.

    `describe` is the run's description, which must match that in a checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        keep_best: bool,
        larger_is_better: bool = False,
        describe: Mapping[str, Any],
    ):
        check_path(folder)
        self._folder = folder.absolute()
        self._sign = 1 if larger_is_better else -1
        self._description = describe
        self.figures: dict[int, float] = {}  # validation metric by step
        for name in ("absl", "asyncio"):  # orbax logs failures here, in addition to raising them
            logging.getLogger(name).addFilter(lambda record: record.exc_info is None)
        self._keep = keep
        self._keep_best = keep_best
        self._writing: int | None = None  # the step of the pending save
        self._manager: ocp.CheckpointManager | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception) -> None:
        self.wait()
        if self._manager is not None:  # None after a failed save
            self._manager.close()

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
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
            run = reader.restore(folder / "run")
        check_same_run(folder, run, self._description)
        self.figures = dict(run["figures"])
        fresh = {"params": params, "opt_state": opt_state}
        saved, rest = split_arrays(fresh)
        check_arrays(folder, run, describe_arrays(saved))
        arrays = saved if only_engine else self._read_state(folder, saved)
        engine_state = None
        kind = run["settings"]
        if kind["stream"] == "weights" or kind["optimizer"] not in ON_DEVICE:
            with ocp.Checkpointer(zenflow_jax.EngineCheckpointHandler()) as reader:
                engine_state = reader.restore(folder / "engine")
        trees = join_arrays(fresh, arrays, rest)
        return Restored(**trees, engine_state=engine_state, progress=run["progress"])

    def weights(self, step: int, like: Any) -> Any:
        """Restores only the parameters, in place of those in `like`, which are consumed."""
        folder = self._intact(step)
        saved, rest = split_arrays({"params": like, "opt_state": ()})
        restored = self._read_state(folder, saved, partial_restore=True)
        return join_arrays({"params": like}, restored, rest)["params"]

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
        rated = [(self._sign * self.figures[s], s) for s in steps if s in self.figures]
        # NaN is neither better nor worse. Among equals, the latest wins.
        return max((pair for pair in rated if not math.isnan(pair[0])), default=(0, None))[1]

    def save(
        self,
        step: int,
        params: Any,
        opt_state: Any,
        engine: zenflow_jax.HostEngine | layerwise.Trainer | None,
        progress: Mapping[str, Any],
        figure: float | None = None,
    ) -> None:
        """Starts writing a checkpoint; training may continue at once, and donate the arrays.

        Waits for the previous save, and until the device has finished `step` and the writer has
        copies. On a CPU, the writer reads the arrays themselves, which the runtime does not donate
        in the meantime (checked on jax 0.10.2 and 0.11.2 with orbax 0.12.8). This call or a later
        one raises a failure as a `CheckpointError`. `progress` must be JSON; `figure`, from a
        validation, decides which checkpoint is best.
        """
        if figure is not None:
            self.figures[step] = figure
        self.wait()
        saved, _ = split_arrays({"params": params, "opt_state": opt_state})
        run = {
            **self._description,
            "zenflow_jax": zenflow_jax.__version__,
            "step": step,
            "arrays": describe_arrays(saved),
            "figures": list(self.figures.items()),
            "progress": progress,
        }
        items: dict[str, Any] = {
            # One file per process, because orbax would copy arrays to divide them among several
            # files.
            "state": ocp.args.PyTreeSave(saved, ocdbt_target_data_file_size=0),
            "run": ocp.args.JsonSave(run),
        }
        if engine is not None:
            items["engine"] = zenflow_jax.EngineSave(engine)
        self._writing = step
        with self._failures():
            # Forced, because orbax would otherwise skip a step that is older than its newest.
            self._opened().save(step, args=ocp.args.Composite(**items), force=True)

    def poll(self) -> None:
        """Raises an error if the pending save has failed, without waiting."""
        if self._writing is not None and not self._opened().is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits for the pending save; raises an error if it has failed."""
        if self._writing is not None:
            with self._failures():
                self._opened().wait_until_finished()
            self._writing = None

    def best(self, *, or_step: int) -> int:
        """Returns the best checkpoint's step; `or_step` if it is better, or without `keep_best`."""
        if not self._keep_best:
            return or_step
        # Process 0 has already removed the checkpoints that are not kept.
        step = self._best_of([*self.steps(), or_step]) if processes.is_first() else None
        return int(processes.from_first(str(step or or_step)))

    def _opened(self) -> ocp.CheckpointManager:
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                preservation_policy=_NewestAndBest(
                    self._keep, self._best_of if self._keep_best else None
                ),
                cleanup_tmp_directories=True,  # from a killed run
                async_options=ocp.AsyncOptions(
                    post_finalization_callback=self._seal,
                    # A folder that cannot be created then raises an error at once.
                    create_directories_asynchronously=False,
                    # Enough for 125 GB (a 7B checkpoint) at 10 MB/s. By default, a save fails after
                    # 20 min.
                    timeout_secs=4 * 3600,
                ),
            )
            # Compression would keep a second copy of everything in memory (LOG.md, orbax 0.12.8).
            handlers = {
                "state": ocp.PyTreeCheckpointHandler(use_compression=False),
                "run": ocp.JsonCheckpointHandler(),
                "engine": zenflow_jax.EngineCheckpointHandler(),
            }
            self._manager = ocp.CheckpointManager(
                self._folder, options=options, item_handlers=handlers
            )
        return self._manager

    def _seal(self) -> None:
        # orbax's thread calls this in process 0 after all processes have written their files and
        # before the folder gets its final name (checked on orbax 0.12.8, which has no other such
        # hook).
        # The suffix is needed, because a name that begins with the number could be a user's copy.
        (folder,) = self._folder.glob(f"{self._writing}{ocp.utils.TMP_DIR_SUFFIX}*")
        text = json.dumps(checksums(folder), indent=1)
        (folder / CHECKSUMS).write_text(text, encoding="utf-8")

    @contextlib.contextmanager
    def _failures(self):
        try:
            yield
        except (OSError, ValueError) as error:
            # tensorstore (0.1.86) turns an OSError into a ValueError that contains its number. Any
            # other ValueError is a bug.
            if isinstance(error, ValueError) and not re.search(r"(?i)\bos[ _]error", str(error)):
                raise
            text = " ".join(str(error).split())
            got = text if len(text) < 300 else f"{text[:100]} ... {text[-200:]}"
            # At exit, Python warns about writes that never started, after the message that matters
            # (orbax 0.12.8).
            unwritten = r"coroutine '(async_serialize|.*write_fragment).*' was never awaited"
            warnings.filterwarnings("ignore", unwritten, RuntimeWarning)
            # tensorstore's threads end other writes, for which orbax waits no longer.
            show = sys.unraisablehook
            sys.unraisablehook = lambda x: "loop is closed" in str(x.exc_value) or show(x)
            step, self._writing = self._writing, None
            failed, self._manager = self._manager, None
            if failed is not None:
                # A save writes in several threads; this raises the errors after the first.
                with contextlib.suppress(OSError, ValueError):
                    failed.close()
            if processes.is_first():  # the model may need the space
                for part in self._folder.glob(f"{step}{ocp.utils.TMP_DIR_SUFFIX}*"):
                    shutil.rmtree(part, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {step} cannot be written to {self._folder}: {got}. Free disk space or "
                "fix the permissions, and start again with --run: older checkpoints are unchanged."
            ) from error


@dataclasses.dataclass
class _NewestAndBest(ocp.checkpoint_managers.PreservationPolicy):
    """Decides which checkpoints are kept; orbax's `BestN` keeps all steps without a metric."""

    newest: int
    best: Callable[[Iterable[int]], int | None] | None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept: set[int | None] = {*sorted(steps)[-self.newest :]}
        if self.best is not None:
            kept.add(self.best(steps))
        return [step in kept for step in steps]
