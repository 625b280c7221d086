"""Holds the weights and state that a run trains: on the devices, or layer by layer on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

import zenflow_jax
from train.checkpoints.checkpoints import Checkpoints
from train.run.by_layer import LayeredModel, micro_batches
from train.run.setup import Job, make_trainer
from zenflow_jax import layerwise

Figures = dict[str, float]


class StepTraining:
    """Runs one program per step: an optimizer of optax, or zenflow with an engine."""

    def __init__(self, job: Job, opt_state: Any):
        self._job = job
        self.params, self.opt_state = job.model.params, opt_state
        self._engine_state: Any = None
        self.host: zenflow_jax.HostEngine | None = None  # None without zenflow

    @property
    def parameters(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.params))

    def restore(self, checkpoints: Checkpoints, step: int) -> dict[str, Any]:
        """Restores a checkpoint; returns its record of the run's progress."""
        self.params, self.opt_state, self._engine_state, progress = checkpoints.restore(
            step, self.params, self.opt_state
        )
        return progress

    def open(self, stack: contextlib.ExitStack) -> None:
        """Creates the engine, which `stack` closes."""
        if not self._job.settings.has_engine:
            return
        engine = zenflow_jax.HostEngine(
            self.params,
            self.opt_state,
            **self._job.settings.subset(("host_kernel", "host_state")),
            engine_state=self._engine_state,
        )
        self.host = stack.enter_context(engine)
        self._engine_state = None

    def step(self, batch: Any) -> tuple[jax.Array, Any]:
        """Takes a step; returns its loss, and the number of steps skipped so far."""
        assert self._job.train_step is not None
        self.params, self.opt_state, loss, skipped = self._job.train_step(
            self.params, self.opt_state, batch
        )
        if self.host:
            self.params, self.opt_state = self.host.exchange(self.params, self.opt_state)
        return loss, skipped

    def wait(self) -> None:
        """Waits until the last step has finished."""
        jax.block_until_ready(self.params)

    def flush(self) -> None:
        """Merges pending updates after the last step."""
        if self.host:
            self.params, self.opt_state = self.host.flush(self.params, self.opt_state)
        self.wait()

    def figures(self, validate: Callable[[Any], Figures]) -> Figures:
        return validate(self.params)

    def save(self, checkpoints: Checkpoints, step: int, progress: Any, figure: Any) -> None:
        state = self.params, self.opt_state, self.host
        checkpoints.save(step, *state, progress, figure=figure)

    def final_weights(self) -> tuple[Any, Iterator[Any] | None]:
        """Returns the weights, and their float32 masters, or None without masters."""
        if self.host is None:
            return self.params, None
        masters = zenflow_jax.iter_master_params(self.params, self.opt_state, self.host)
        return self.params, (x for _, x in masters)

    def weights_of(self, checkpoints: Checkpoints, step: int) -> tuple[Any, None]:
        """Returns the weights of a checkpoint, in place of the current weights."""
        return checkpoints.weights(step, self.params), None


class LayerTraining:
    """Runs one program per layer, with weights in host memory; has `StepTraining`'s methods."""

    def __init__(self, job: Job, layered: LayeredModel):
        self._job, self._layered = job, layered
        self._state: Any = None
        self._trainer: layerwise.Trainer | None = None

    @property
    def host(self) -> layerwise.Trainer:
        assert self._trainer is not None
        return self._trainer

    @property
    def parameters(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self._layered.model))

    def restore(self, checkpoints: Checkpoints, step: int) -> dict[str, Any]:
        shapes = self._layered.shapes
        restored = checkpoints.restore(step, shapes, None, only_engine=True)
        self._state = restored.engine_state
        return restored.progress

    def open(self, stack: contextlib.ExitStack) -> None:
        trainer = make_trainer(self._job, self._state)
        self._trainer, self._state = stack.enter_context(trainer), None

    def step(self, batch: Any) -> tuple[jax.Array, jax.Array]:
        parts = micro_batches(batch, self._job.settings.micro_batches)
        return self.host.step(*parts), self.host.skipped

    def wait(self) -> None:
        if self._trainer is not None:
            self._trainer.wait()

    def flush(self) -> None:
        self.wait()

    def figures(self, validate: Callable[[Any], Figures]) -> Figures:
        return validate(self.host)

    def save(self, checkpoints: Checkpoints, step: int, progress: Any, figure: Any) -> None:
        checkpoints.save(step, self.host.params(), None, self.host, progress, figure=figure)

    def final_weights(self) -> tuple[Any, Iterator[Any]]:
        return self._layered.model, self._layered.leaves(self.host.master_params)

    def weights_of(self, checkpoints: Checkpoints, step: int) -> tuple[Any, Iterator[Any]]:
        return self._layered.whole(checkpoints.weights(step, self._layered.shapes))
