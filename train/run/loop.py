"""Drives a run: call `resume`, `loop`, `finish` and `report`, in this order."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from elves.atomic import write_text_atomically
from train import command_of
from train.checkpoints.checkpoints import CheckpointError, Checkpoints
from train.checkpoints.compatibility import description
from train.cli.settings import PAIRS, SettingsError, task_name
from train.distributed import processes
from train.distributed.stopping import Stopped, StopRequest, how_to_resume
from train.log import results
from train.log.meter import Meter, Totals, causes_of_infinity, check_finite
from train.log.results import RunLog, show
from train.run import models
from train.run.folder import write_settings
from train.run.setup import Job
from train.run.training import LayerTraining, StepTraining
from zenflow_jax import HostEngine


class Result(NamedTuple):
    totals: Totals
    best: int  # the step of the written weights
    written: str  # name of the model's file or folder


class Run:
    """Trains a job in a folder that this process has locked; `stack` closes its resources."""

    def __init__(
        self,
        job: Job,
        opt_state: Any,
        folder: Path,
        console: Console,
        stop: StopRequest,
        stack: contextlib.ExitStack,
    ):
        self.job, self.folder, self.console = job, folder, console
        self.stop, self.stack = stop, stack
        self.training: StepTraining | LayerTraining = (
            StepTraining(job, opt_state) if job.layered is None else LayerTraining(job, job.layered)
        )
        self.validations: list[tuple[int, dict[str, float]]] = []  # each step with its metrics
        self.done = 0  # steps taken before this process started
        self.failure: CheckpointError | None = None  # of the last save; the model is written first
        self.steps = job.settings.steps
        config = job.model.origin and job.model.origin.config
        self.checkpoints = stack.enter_context(
            Checkpoints(
                folder / "checkpoints",
                keep=job.settings.keep,
                keep_best=job.settings.keep_best,
                larger_is_better=job.settings.metric != "loss",
                describe=description(vars(job.settings), job.task.checksum, config),
            )
        )

    def resume(self) -> bool:
        """Restores the newest checkpoint, if any; returns whether steps are left."""
        progress: Mapping[str, Any] = {}
        if (newest := self.checkpoints.newest()) is not None:
            progress = self.training.restore(self.checkpoints, newest)
            self.done = newest
            self.validations = [(step, figures) for step, figures in progress["validations"]]
            if self._has_ended():
                return False
        elif (self.folder / "settings.toml").is_file():  # a start that ended before its first save
            self._say(f"{self.folder} has no checkpoint to resume from: the run starts over")
        drawn = models.describe_new_weights(self.job.model, self.job.task.labels)
        if drawn and not self.done:
            self._say(drawn)
        self.training.open(self.stack)
        self._open_log(progress)
        if not self.done:
            check_finite(self._validated(0), causes_of_infinity(self.job.settings))
        elif self._is_validated(self.done):
            # The last start was stopped before this validation, or ended with this step.
            figures = self._validated(self.done)
            self.checkpoints.figures[self.done] = figures[self.job.settings.metric]
        return True

    def _has_ended(self) -> bool:
        """Returns whether the run is complete; rejects a run with too many steps."""
        done, steps = self.done, self.steps
        if done == steps == results.completed_steps(self.folder):
            self._say(
                f"{self.folder} has completed all {done} steps. Pass a larger --steps to "
                f"continue it, with {self.folder / 'settings.toml'} as the config, or pass "
                "another --run to start again."
            )
            return True
        self._say(f"resuming from checkpoint {done} in {self.folder}")
        if done > steps:
            raise SettingsError(
                f"`steps`: must be at least {done}, the number of steps in {self.folder}, but is "
                f"{steps}."
            )
        return False

    def _open_log(self, progress: Mapping[str, Any]) -> None:
        """Opens the metrics, which continue from the last checkpoint."""
        job, host = self.job, self.training.host
        self.meter = Meter(
            log_every=job.settings.log_every,
            stats=(lambda: host.stats) if isinstance(host, HostEngine) else None,
            max_skipped=job.settings.max_skipped,
            remedy=f"{causes_of_infinity(job.settings)} With --run {self.folder.name} and a lower "
            "--learning-rate, the run resumes from its last checkpoint, if any; another --run "
            "starts again.",
            steps_done=self.done,
            state=progress.get("meter"),
        )
        if processes.is_first():
            write_settings(self.folder, vars(job.settings), job.texts)
        self.log = RunLog(
            self.folder,
            steps=self.steps,
            console=self.console,
            rows=self.meter.rows,
            validations=self.validations,
        )

    def loop(self) -> None:
        """Takes the remaining steps; raises `Stopped` after a save if a signal requests it."""
        # The loop blocks in the first step, until it is compiled and finished; for a row, until the
        # device is within `log_every` steps of the loop; in `exchange`, if the loop is two steps
        # ahead of the device, or a window closes before the host has finished the previous update
        # (only this counts as waiting); and in `_save`, until the step is finished and copied, and
        # the previous save is written.
        saved = self.done
        lengths: set[int | None] = set()  # batch lengths that the step is compiled for
        if self.done < self.steps:
            self._say("compiling the training step")
        for step in range(self.done + 1, self.steps + 1):
            self._step(step, lengths)
            number = self.stop.after(step)
            if not number and self._is_validated(step):
                self._validated(step)
                number = self.stop.after(step) if jax.process_count() == 1 else None
            if number:  # the signal's sender may not wait long
                self._save(step)
                self.checkpoints.wait()
                raise Stopped(how_to_resume(number, step, self.folder), signal_number=number)
            if is_due(self.job.settings.save_every, step):
                if self.meter.skipped_last():
                    # The weights may be unusable by now; only older checkpoints are safe.
                    self._say(f"step {step} was skipped: no checkpoint is saved")
                else:
                    self._save(saved := step)
        try:
            if saved < self.steps:
                # Saved before the final flush, so that a run that is resumed with more steps equals
                # a run that had these steps from the start.
                self._save(self.steps)
            self.checkpoints.wait()
        except CheckpointError as error:
            if jax.process_count() > 1:  # the others would wait for this process
                raise
            self.failure = error
        if number := self.stop.end():
            raise self.failure or Stopped(
                how_to_resume(number, self.steps, self.folder), signal_number=number
            )

    def _step(self, step: int, lengths: set[int | None]) -> None:
        job = self.job
        length, tokens = job.batches.length(step - 1), job.batches.tokens(step - 1)
        if tokens is None:
            tokens = job.settings.batch_size * job.settings.sequence_length
        with contextlib.ExitStack() as compiling:
            if is_new := length not in lengths:
                lengths.add(length)
                self.training.wait()
                compiling.enter_context(self.meter.paused())
            loss, skipped = self.training.step(job.batches[step - 1])
            if is_new:
                self.training.wait()
                tokens = 0  # steps that compile are excluded from rates
        if step == self.done + 1:
            self.training.wait()
            self.meter.start()
            self.stop.begin()
            self.log.begin(step)
        if row := self.meter.step(loss, skipped=skipped, tokens=tokens):
            self.log.add(row)
        self.checkpoints.poll()

    def finish(self) -> Result:
        """Flushes and validates, and writes the model; then raises the failure of the last save."""
        steps = self.steps
        if self.done == steps:
            self.meter.start()
        self._log_rows()
        self.meter.finish()
        self.training.flush()  # the measured time includes the last update
        totals = self.meter.since_start()
        if self.validations[-1][0] == steps:
            self.validations.pop()  # from a start with more steps, before the flush
        figures = self._validated(steps)
        self.checkpoints.figures[steps] = figures[self.job.settings.metric]
        best = self.checkpoints.best(or_step=steps)
        written = self._write_model(best)
        if self.failure is not None:
            self._say(f"{self.folder / written} contains the trained weights")
            raise self.failure
        return Result(totals, best, written)

    def report(self, ended: Result, begun_s: float) -> None:
        """Writes and shows the summary of a run that began at `begun_s`, with its files closed."""
        figures = self._figures(ended, begun_s)
        if not processes.is_first():
            return
        title = f"{figures['optimizer']}, {figures['parameters'] / 1e6:.1f} M parameters"
        host = self.training.host
        timeline = host.timeline if isinstance(host, HostEngine) else []
        curves = self.meter.rows, self.validations, timeline
        results.write_pictures(self.folder, *curves, title=title, target=figures["target"])
        # Last, because its existence means that all files are written.
        text = json.dumps(figures, indent=2) + "\n"
        write_text_atomically(self.folder / "summary.json", text)
        if self.job.settings.keep_best:
            weights = f"the weights of step {ended.best}, the best validated checkpoint"
            self._say(f"{ended.written} contains {weights}")
        self._say(f"metrics, loss curve, settings and {ended.written}: {self.folder}")
        if ended.written == models.FOLDER and task_name(self.job.settings) != PAIRS:
            model = shlex.quote(str(self.folder / models.FOLDER))
            self._say(f'Try it: {command_of("generate")} --model {model} "A text"')

    def _write_model(self, best: int) -> str:
        """Writes the weights of the best step; returns the name of their file or folder."""
        if best != self.steps:
            # As validated, without the updates that were pending at that step.
            weights = self.training.weights_of(self.checkpoints, best)
        else:
            weights = self.training.final_weights()
        job, origin = self.job, self.job.model.origin
        folder = self.folder if origin is None else self.folder / models.FOLDER
        options = {"labels": job.task.labels, "texts": job.texts, "task": task_name(job.settings)}
        models.write(folder, origin, *weights, **options)
        return models.WEIGHTS if origin is None else models.FOLDER

    def _figures(self, ended: Result, begun_s: float) -> dict[str, Any]:
        job, host = self.job, self.training.host
        return {
            "optimizer": job.settings.optimizer,
            "device": jax.devices()[0].device_kind,
            "devices": job.mesh.size if job.mesh else 1,
            "processes": jax.process_count(),
            "parameters": self.training.parameters,
            "target": job.task.target,
            "classes": job.task.labels,
            "steps": self.steps,
            "skipped": self.meter.total_skipped,
            "best_step": ended.best if job.settings.keep_best else None,
            "resumed_at": self.done,
            "tokens_per_s": ended.totals.tokens_per_s,
            "wait_share": ended.totals.wait_share,
            "train_s": ended.totals.seconds,
            "total_s": time.perf_counter() - begun_s,
            "validation_before": self.validations[0][1],
            "validation_after": self.validations[-1][1],
            "engine": dataclasses.asdict(host.stats) if isinstance(host, HostEngine) else None,
        }

    def _validated(self, step: int) -> dict[str, float]:
        """Returns the metrics after `step`, the last step taken."""
        if not self.validations or self.validations[-1][0] != step:
            self.training.wait()
            self._log_rows(whole=True)  # before the validation's line
            with self.meter.paused():
                self.validations.append((step, self.training.figures(self.job.validate)))
            self.log.validation(*self.validations[-1])
        return self.validations[-1][1]

    def _is_validated(self, step: int) -> bool:
        """Returns whether a validation is due; the final validation follows later."""
        settings = self.job.settings
        is_compared = settings.keep_best and is_due(settings.save_every, step)
        return step < self.steps and (is_compared or is_due(settings.evaluate_every, step))

    def _save(self, step: int) -> None:
        self._log_rows(whole=True)
        # A copy, because orbax writes it in another thread.
        progress = {"validations": [*self.validations], "meter": self.meter.state()}
        at, figures = self.validations[-1] if self.validations else (0, {})
        figure = figures[self.job.settings.metric] if at == step else None
        self.training.save(self.checkpoints, step, progress, figure)

    def _log_rows(self, *, whole: bool = False) -> None:
        for row in self.meter.drain(whole=whole):
            self.log.add(row)

    def _say(self, line: str) -> None:
        show(self.console, line)


def is_due(every: int, step: int) -> bool:
    """Returns whether an action is due after this step, given its interval (0: never)."""
    return every > 0 and step % every == 0
