"""Plans a run's memory and speed, and other settings that fit.

Planning reads no weights and needs no device. `zenflow_jax.planning` contains the arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from train.cli.command_line import Planning
from train.cli.settings import WITHOUT_MOMENTS, Settings, SettingsError, StepSettings
from train.distributed.sharding import (
    batch_parts,
    batch_sharding,
    mesh_axes,
    weight_shardings,
)
from train.huggingface.config import ARCHITECTURES, CONFIG, ModelError, read_config
from train.huggingface.hub import model_folder
from train.huggingface.json_files import read_object
from train.huggingface.loading import Pretrained
from train.run import models
from train.run.optimizers import leafwise_optimizer, make_optimizer
from train.run.step import PER_EXAMPLE, make_train_step
from train.tasks.chosen import check_length
from zenflow_jax import planning

# The maximum number of suggested settings.
WAYS = 3
# Values for a run whose steps and classes depend on its data; sizes do not depend on them.
STEPS, LABELS = 1000, 2
# Without a device, jax 0.11.2 cannot select a deterministic matrix product.
_OPTIONS = {"xla_gpu_exclude_nondeterministic_ops": False}
# Settings that save memory, in the order in which they are tried.
_SAVING = {"host_state": "compact", "remat": True}
_SAVING_BY_LAYERS = {
    "host_state": "compact",
    "layer_updates": "during_backward",
    "layer_inputs": "host",
}
# Settings that may fit if no others do.
_BY_LAYERS = {
    "optimizer": "adamw",
    "stream": "weights",
    "scan_layers": False,
    "layer_updates": "during_backward",
}


class Way(NamedTuple):
    """Other settings that make a run fit."""

    changes: Mapping[str, Any]  # values by name
    plan: planning.Plan


class RunPlan(NamedTuple):
    settings: StepSettings
    plan: planning.Plan
    ways: tuple[Way, ...]  # other settings that fit, if the run does not


class _Planner:
    """Plans runs of one model on one kind of device; caches traced steps and compiled peaks."""

    def __init__(self, settings: StepSettings, options: Planning):
        self.origin = None if settings.model is None else folder_of_config(settings.model)
        local = planning.gpu_here()
        kinds = [name for name, gpu in planning.GPUS.items() if gpu is local]
        device = options.device or (kinds[0] if kinds else "h100")
        self.by_compiler = planning.has_compiler()
        self.mesh = mesh_of(settings.mesh, device, described=self.by_compiler)
        host = options.host_memory and int(options.host_memory * 1e9)
        if host is None and planning.GPUS[device] is local:
            host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        rate = options.host_bandwidth and options.host_bandwidth * 1e9
        self._machine = {"device": device, "host_memory_bytes": host, "bandwidth": rate}
        self._step = functools.cache(
            lambda run: planned_step(run, self.origin, self.mesh, placed=self.by_compiler)
        )
        self._peak = functools.cache(lambda run: compiled_peak(run, self.origin, self.mesh))

    def plan(self, run: StepSettings, *, compiles: bool) -> planning.Plan:
        """Plans a run, without gradients and activations unless it `compiles`."""
        if run.stream == "weights":
            machine = {name: x for name, x in self._machine.items() if name != "bandwidth"}
            return plan_layers(run, self.origin, self.mesh, compiles=compiles, **machine)
        # The step does not depend on these settings.
        key = dataclasses.replace(run, host_state="float32", prefetch_bytes=None)
        host = {"host_state": run.host_state, "prefetch_bytes": run.prefetch_bytes}
        plan = planning.plan(*self._step(key), **host, **self._machine)
        return plan.with_peak(self._peak(key)) if compiles else plan

    def plan_that_fits(self, run: StepSettings) -> planning.Plan | None:
        """Plans a run; None if it does not fit. Compiles only if its arrays fit."""
        try:
            plan = self.plan(run, compiles=False)
            if self.by_compiler and not plan.short:
                plan = self.plan(run, compiles=True)
        except SettingsError:  # such as a batch size that the mesh does not divide
            return None
        return None if plan.short else plan


def plan_run(settings: Settings, options: Planning) -> RunPlan:
    """Plans a run for the machine in `options`."""
    settings.check_task(["model"])
    planner = _Planner(settings, options)
    if planner.origin is not None:
        check_length(settings.sequence_length, planner.origin)
    own = planner.plan(settings, compiles=planner.by_compiler)
    ways: list[Way] = []
    if own.short:
        smallest = settings.micro_batches * batch_parts(planner.mesh if settings.mesh else None)
        for changes in _changes(settings, smallest):
            plan = planner.plan_that_fits(dataclasses.replace(settings, **changes))
            if plan is not None:
                ways.append(Way(changes, plan))
            if len(ways) == WAYS:
                break
    return RunPlan(settings, own, tuple(ways))


def _changes(settings: StepSettings, smallest: int) -> Iterator[dict[str, Any]]:
    """Yields settings to try: each that saves memory, all, smaller batches, streamed weights."""
    by_layers = settings.stream == "weights"
    saving = _changed(settings, _SAVING_BY_LAYERS if by_layers else _SAVING)
    if settings.optimizer in WITHOUT_MOMENTS:
        saving.pop("host_state", None)
    if len(saving) > 1:
        yield from ({name: x} for name, x in saving.items())
    batch = settings.batch_size
    if saving:
        yield saving
    while (batch := batch // 2 // smallest * smallest) > 0:
        yield {"batch_size": batch} | saving
    if not by_layers:
        yield _changed(settings, _BY_LAYERS)


def _changed(settings: StepSettings, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in values.items() if getattr(settings, name) != x}


def compiled_peak(run: StepSettings, origin: Pretrained | None, mesh: Any) -> int:
    """Returns the bytes on a device at a step's peak, according to the compiler."""
    return planning.peak_bytes(compiled_step(planned_step(run, origin, mesh, placed=True)))


def compiled_step(planned: PlannedStep) -> jax.stages.Compiled:
    """Compiles a planned step for the described device of its arguments."""
    step: Any = planned.step
    try:
        return step.lower(*planned[1:]).compile(_OPTIONS)
    except NotImplementedError as error:  # streaming needs a newer jax
        raise SettingsError(str(error)) from error


def mesh_of(text: str | None, device: str, *, described: bool) -> Any:
    """Returns the mesh for a setting, over described GPUs or without devices."""
    sizes = mesh_axes(text) if text else {"data": 1}
    if described:
        return planning.described_mesh(device, sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def pinned_limit(settings: Settings) -> int:
    """Returns the limit of pinned memory, in GiB, for a run whose weights stream.

    Starts no backend of jax, which reads the limit when it starts.
    """
    origin = None if settings.model is None else folder_of_config(settings.model)
    mesh = mesh_of(settings.mesh, "", described=False)
    _, build, _ = _model_of(settings, origin, divided := mesh if settings.mesh else None)
    shapes = models.abstract_layered(build, divided, NamedSharding(mesh, PartitionSpec()))[1].shapes
    optimizer = leafwise_optimizer(_with_steps(settings))
    sends = settings.layer_updates == "after_backward"
    pinned = planning.pinned_bytes(shapes, optimizer, gradients=sends)
    if settings.layer_inputs == "host":  # at least the stream
        config = models.config_of(origin, settings)
        tokens = settings.batch_size * settings.sequence_length // batch_parts(divided)
        pinned += tokens * config.width * jnp.dtype(settings.dtype).itemsize * config.layers
    return planning.limit_for(pinned)


class PlannedStep(NamedTuple):
    step: Callable
    params: Any
    opt_state: Any
    batch: Any


def folder_of_config(model: str) -> Pretrained:
    """Returns a model's folder after reading only its `config.json`."""
    folder = model_folder(model, [CONFIG])
    raw = read_object(folder / CONFIG, ModelError)
    config = read_config(folder / CONFIG, raw)
    return Pretrained(folder, ARCHITECTURES[raw["model_type"]], config, {}, None, raw)


def planned_step(
    settings: StepSettings, origin: Pretrained | None, mesh: Any, *, placed: bool = False
) -> PlannedStep:
    """Returns the step that a run would compile; `placed` puts its arguments on the mesh."""
    kind, build, batches = _model_of(settings, origin, divided := mesh if settings.mesh else None)
    settings = _with_steps(settings)
    graphdef, params = jax.eval_shape(lambda: models.split(build()))
    tx = make_optimizer(settings)
    sharding = None if mesh is None or not placed else NamedSharding(mesh, PartitionSpec())
    if divided is None:
        opt_state = jax.eval_shape(tx.init, params)
    else:
        params = jax.tree.map(_shape_at, params, weight_shardings(divided, params))
        everywhere = NamedSharding(divided, PartitionSpec())
        opt_state = (
            tx.init(params) if settings.has_engine else _state_shapes(tx, params, everywhere)
        )
        sharding = batches
    if sharding is not None:
        params, opt_state = planning.placed((params, opt_state), mesh)
    placement = divided and jax.tree.map(lambda x: x.sharding, (params, opt_state))
    step = make_train_step(
        graphdef,
        tx,
        PER_EXAMPLE[kind],
        micro_batches=settings.micro_batches,
        stream=settings.stream != "none",
        placement=placement,
    )
    batch = _batch(kind, settings, settings.batch_size, sharding)
    return PlannedStep(step, params, opt_state, batch)


def plan_layers(
    settings: StepSettings,
    origin: Pretrained | None,
    mesh: Any,
    *,
    compiles: bool,
    device: str,
    host_memory_bytes: int | None,
) -> planning.Plan:
    """Plans a run with streamed weights."""
    kind, build, batches = _model_of(settings, origin, divided := mesh if settings.mesh else None)
    where = NamedSharding(mesh, PartitionSpec())
    batches = batches or (where if compiles else None)
    model = models.abstract_layered(build, divided, where)[1]
    rows = settings.batch_size // settings.micro_batches
    return planning.plan_layerwise(
        model.shapes,
        _batch(kind, settings, rows, batches),
        first=model.first,
        layer=model.layers,
        last=model.last,
        optimizer=leafwise_optimizer(_with_steps(settings)),
        micro_batches=settings.micro_batches,
        updates=settings.layer_updates,
        inputs=settings.layer_inputs,
        device=device,
        host_memory_bytes=host_memory_bytes,
        compiles=compiles,
        compiler_options=_OPTIONS if compiles else None,
    )


def _with_steps(settings: StepSettings) -> StepSettings:
    return settings if settings.steps else dataclasses.replace(settings, steps=STEPS)


def _model_of(
    settings: StepSettings, origin: Pretrained | None, mesh: Any
) -> tuple[str, Callable[[], Any], NamedSharding | None]:
    """Returns the kind of a run's model, its `builder`, and the batch's sharding."""
    kind = "decoder" if origin is None else origin.architecture
    batches = mesh and batch_sharding(mesh, settings.batch_size, settings.micro_batches)
    config = models.config_of(origin, settings)
    return kind, models.builder(config, settings, sharding=batches, labels=LABELS), batches


def _batch(kind: str, settings: StepSettings, rows: int, sharding: Any) -> dict[str, Any]:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *shape), jnp.int32, sharding=sharding)

    length = settings.sequence_length
    if kind == "decoder":
        return {"tokens": array(length + 1)}
    return {name: array(length) for name in ("tokens", "types", "mask")} | {"label": array()}


def _shape_at(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _state_shapes(tx: Any, params: Any, everywhere: NamedSharding) -> Any:
    """Returns a state with moments sharded like their parameters, and the rest `everywhere`."""

    def placed(x: Any, p: Any) -> Any:
        # Factored moments have fewer axes than their parameters.
        return _shape_at(x, p.sharding if x.ndim == p.ndim else everywhere)

    return optax.tree.map_params(
        tx,
        placed,
        jax.eval_shape(tx.init, params),
        params,
        transform_non_params=lambda x: _shape_at(x, everywhere),
    )
