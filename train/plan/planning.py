"""Plans a run's memory and speed, and other settings that fit.

Planning reads no weights and needs no device. `zenflow_jax.planning` contains the arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from train.cli.command_line import Planning
from train.cli.settings import Settings, SettingsError, StepSettings, option_words
from train.distributed.sharding import batch_parts, batch_sharding, mesh_axes, weight_shardings
from train.huggingface.config import ARCHITECTURES, CONFIG, ModelError, read_config
from train.huggingface.hub import model_folder
from train.huggingface.json_files import read_object
from train.huggingface.loading import Pretrained
from train.run import models
from train.run.optimizers import leafwise_optimizer, make_optimizer
from train.run.step import PER_EXAMPLE, make_train_step
from train.tasks.chosen import check_length
from zenflow_jax import planning

# Values for a run whose steps and classes depend on its data; sizes do not depend on them.
STEPS, LABELS = 1000, 2
# Without a device, jax 0.11.2 cannot select a deterministic matrix product.
_OPTIONS = {"xla_gpu_exclude_nondeterministic_ops": False}
_DEFAULTS = {"stream": "none", "send_gradients": "during_step"}
_DEFAULTS |= {"layer_updates": "after_backward", "layer_inputs": "device"}
_BY_LAYERS = {"stream": "weights", "scan_layers": False, "layer_updates": "during_backward"}
#: The ways of docs/gradients.md. Of two that take equally long, the first is better.
WAYS: Mapping[str, dict[str, Any]] = {
    "A": {"optimizer": "adamw"},
    "B": {"optimizer": "adamw", "host_state": "compact"},
    "C": {"optimizer": "zenflow"},
    "D": {"optimizer": "zenflow", "scan_layers": True, "stream": "gradients"},
    "D after_step": {"optimizer": "zenflow", "scan_layers": True, "send_gradients": "after_step"},
    "E": {"optimizer": "offload"},
    "F": {"optimizer": "adamw", **_BY_LAYERS},
    "F compact": {"optimizer": "adamw", **_BY_LAYERS, "host_state": "compact"},
}


class Way(NamedTuple):
    """An optimizer, with other settings that differ from the run's."""

    name: str
    changes: Mapping[str, Any]  # values by name
    settings: StepSettings
    plan: planning.Plan

    @property
    def options(self) -> str:
        return " ".join(word for change in self.changes.items() for word in option_words(*change))


class RunPlan(NamedTuple):
    settings: StepSettings
    plan: planning.Plan | None  # if the run's way is chosen
    ways: Sequence[Way]  # if it is not, or does not fit; those that fit come first, by time


class _Planner:
    """Plans runs of one model on one kind of device; caches traced and compiled programs."""

    def __init__(self, settings: StepSettings, options: Planning):
        self.origin = None if settings.model is None else folder_of_config(settings.model)
        local = planning.gpu_here()
        kinds = [name for name, gpu in planning.GPUS.items() if gpu is local]
        self._device = options.device or (kinds[0] if kinds else "h100")
        self._compiles = has_compiler()
        self._mesh = mesh_of(settings.mesh, self._device, described=self._compiles)
        host = options.host_memory and int(options.host_memory * 1e9)
        if host is None and planning.GPUS[self._device] is local:
            host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._machine = {} if host is None else {"host_capacity_bytes": host}
        self._step = functools.cache(
            lambda run: planned_step(run, self.origin, self._mesh, placed=self._compiles)
        )
        self._peak = functools.cache(
            lambda run: planning.peak_bytes(compiled_step(self._step(run)))
        )
        self._layers = functools.cache(lambda run: _layers_of(run, self.origin, self._mesh))

    def plan(self, run: StepSettings) -> planning.Plan:
        """Plans a run; compiles its step if this is possible and the rest fits."""
        plan = self._planned(run, compiles=False)
        return plan if plan.short or not self._compiles else self._planned(run, compiles=True)

    def _planned(self, run: StepSettings, *, compiles: bool) -> planning.Plan:
        if run.stream == "weights":
            return self._by_layers(run, compiles)
        key, host = run, {}
        if run.has_engine:  # whose step does not depend on the setting
            key, host = dataclasses.replace(run, host_state="float32"), run.subset(["host_state"])
        plan = planning.plan(*self._step(key), **host, device=self._device)
        plan = dataclasses.replace(plan, **self._machine)
        return plan.with_peak(self._peak(key)) if compiles else plan

    def _by_layers(self, run: StepSettings, compiles: bool) -> planning.Plan:
        programs = {"optimizer": "adamw", "host_state": "float32"}
        programs |= {"layer_updates": "after_backward", "layer_inputs": "device"}
        model, batch = self._layers(dataclasses.replace(run, **programs))
        plan = planning.plan_layerwise(
            model.shapes,
            batch,
            **model.functions,
            optimizer=leafwise_optimizer(_with_steps(run)),
            micro_batches=run.micro_batches,
            updates=run.layer_updates,
            inputs=run.layer_inputs,
            device=self._device,
            compiles=compiles,
        )
        return dataclasses.replace(plan, **self._machine)

    def way(self, settings: StepSettings, name: str) -> Way:
        """Plans a way, with settings that save the memory that it lacks."""
        run = dataclasses.replace(settings, **_DEFAULTS | WAYS[name])
        while saving := _saving(run, (plan := self.plan(run))):
            run = dataclasses.replace(run, **saving)
        values = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
        changes = {name: x for name, x in values.items() if getattr(settings, name) != x}
        return Way(name, {"optimizer": run.optimizer} | changes, run, plan)


def _saving(run: StepSettings, plan: planning.Plan) -> Mapping[str, Any]:
    """Returns a setting that saves memory that is short; none if there is no other."""
    short = plan.short
    if "device" in short and run.stream == "weights":
        return {"layer_inputs": "host"} if run.layer_inputs == "device" else {}
    if "device" in short:  # only a compiler counts activations
        return {} if run.remat or planning.TEMPORARIES not in plan.device else {"remat": True}
    if "host" in short and run.has_engine and run.host_state == "float32":
        return {"host_state": "compact"}
    return {}


def plan_run(
    settings: Settings, options: Planning, *, chosen: bool, say: Callable[[str], None]
) -> RunPlan:
    """Plans a run for the machine in `options`, and all ways unless one is `chosen` and fits."""
    settings.check_task(["model"])
    planner = _Planner(settings, options)
    if planner.origin is not None:
        check_length(settings.sequence_length, planner.origin)
    own = planner.plan(settings) if chosen else None
    ways: dict[StepSettings, Way] = {}
    failure: SettingsError | None = None
    for name in WAYS if own is None or own.short else ():
        try:
            way = planner.way(settings, name)
        except SettingsError as error:  # such as micro-batches with streamed gradients
            failure = error
            say(f"{name}: not possible. {error}")
        else:
            say(f"{name}: {way.options}")
            ways.setdefault(way.settings, way)

    if failure is not None and own is None and not ways:
        raise failure

    def order(way: Way) -> tuple[bool, float]:
        return bool(way.plan.short), float(f"{way.plan.step_s:.2g}")  # as they are shown

    return RunPlan(settings, own, sorted(ways.values(), key=order))


@functools.cache
def has_compiler() -> bool:
    """Returns whether steps can be compiled for GPUs that this machine does not have."""
    try:
        planning.described_mesh("h100", {"data": 1})
    except RuntimeError:
        return False
    return True


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


def _layers_of(
    run: StepSettings, origin: Pretrained | None, mesh: Any
) -> tuple[models.LayeredModel, dict[str, Any]]:
    """Returns a model's functions for the trainer, and the shapes of a micro-batch."""
    kind, build, batches = _model_of(run, origin, divided := mesh if run.mesh else None)
    where = NamedSharding(mesh, PartitionSpec())
    model = models.abstract_layered(build, divided, where)[1]
    return model, _batch(kind, run, run.batch_size // run.micro_batches, batches or where)


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
        # Factored moments have fewer axes than their parameters, and scales of compact ones may be
        # too few to share.
        try:
            fits = x.ndim == p.ndim and p.sharding.shard_shape(x.shape) is not None
        except ValueError:
            fits = False
        return _shape_at(x, p.sharding if fits else everywhere)

    return optax.tree.map_params(
        tx,
        placed,
        jax.eval_shape(tx.init, params),
        params,
        transform_non_params=lambda x: _shape_at(x, everywhere),
    )
