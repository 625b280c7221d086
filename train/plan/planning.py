"""Plans a run's memory and speed for three optimizers, and finds settings that fit.

Planning reads no weights and needs no device. `zenflow_jax.planning` contains the arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from train.cli.command_line import Planning
from train.cli.settings import Settings, SettingsError, StepSettings
from train.distributed.sharding import (
    batch_parts,
    batch_sharding,
    mesh_axes,
    mesh_over,
    weight_shardings,
)
from train.huggingface.config import ARCHITECTURES, CONFIG, ModelError, read_config
from train.huggingface.hub import model_folder
from train.huggingface.json_files import read_object
from train.huggingface.loading import Pretrained
from train.run import models
from train.run.memory import host_bytes
from train.run.optimizers import make_optimizer, with_deepspeed_values
from train.run.step import PER_EXAMPLE, make_train_step
from train.tasks.chosen import check_length
from zenflow_jax import find_state, planning
from zenflow_jax.deepspeed import DeepSpeedOptions

OPTIMIZERS = ("adamw", "offload", "zenflow")
#: The maximum number of suggested settings, and of steps that are compiled to find them.
WAYS, COMPILATIONS = 3, 12
# Values for a run whose steps and classes depend on its data; sizes do not depend on them.
STEPS, LABELS = 1000, 2
# Without a device, jax 0.11.2 cannot select a deterministic matrix product.
_OPTIONS = {"xla_gpu_exclude_nondeterministic_ops": False}
#: Settings for a run that fits when no other does, and for one that streams nothing.
_BY_LAYERS = {
    "optimizer": "offload",
    "stream": "weights",
    "scan_layers": False,
    "layer_updates": "during_backward",
}
_AT_ONCE = {"stream": "none", "layer_updates": "after_backward", "layer_inputs": "device"}


class Way(NamedTuple):
    """Other settings that make a run fit."""

    changes: Mapping[str, Any]  # values by name, apart from the batch
    batch_size: int
    plan: planning.Plan


class RunPlan(NamedTuple):
    """The plan of a run, and of the same run with the other optimizers."""

    settings: StepSettings
    of_optimizers: Mapping[str, planning.Plan]
    measured: bool  # whether the host's bandwidth was measured
    ways: tuple[Way, ...]  # other settings that fit, if the run does not

    @property
    def chosen(self) -> planning.Plan:
        return self.of_optimizers[self.settings.optimizer]


class _Planner:
    """Plans runs of one model on one kind of device; caches shapes and compiled peaks."""

    def __init__(self, settings: StepSettings, options: Planning):
        self.settings = settings
        self.origin = None if settings.model is None else folder_of_config(settings.model)
        local = planning.gpu_here()
        kinds = [name for name, gpu in planning.GPUS.items() if gpu is local]
        self.device = options.device or (kinds[0] if kinds else "h100")
        is_local = local is planning.GPUS[self.device]
        self.by_compiler = planning.has_compiler()
        self.mesh = mesh_of(settings.mesh, self.device, described=self.by_compiler)
        self.host = host_bytes() if is_local else None
        if options.host_memory is not None:
            self.host = int(options.host_memory * 1e9)
        bandwidth = options.host_bandwidth or ("here" if is_local else None)
        self.measured = bandwidth == "here"
        self.rate = self._rate(bandwidth)
        self._step = functools.cache(
            functools.partial(
                planned_step, origin=self.origin, mesh=self.mesh, placed=self.by_compiler
            )
        )
        self._peak = functools.cache(lambda run: compiled_peak(run, self.origin, self.mesh))
        self._layers = functools.partial(
            plan_layers,
            origin=self.origin,
            mesh=self.mesh,
            device=self.device,
            host_memory_bytes=self.host,
            bandwidth=self.rate,
        )
        self._compiled_layers = functools.cache(functools.partial(self._layers, compiles=True))

    def _rate(self, bandwidth: float | str | None) -> float:
        """Returns the host memory's bytes per second."""
        if bandwidth is None:
            axes = mesh_axes(self.settings.mesh) if self.settings.mesh else {}
            return planning.GPUS[self.device].host_beside(math.prod(axes.values()))[0]
        if bandwidth != "here":
            return float(bandwidth) * 1e9
        zenflow = dataclasses.replace(self.settings, optimizer="zenflow")
        leaves = find_state(planned_step(zenflow, self.origin, None).opt_state).leaves
        options = {"threads": self.settings.threads, "host_state": self.settings.host_state}
        return planning.host_bandwidth(leaves, **options)

    def by_shapes(self, run: StepSettings) -> planning.Plan:
        """Plans a run without gradients and activations."""
        if run.stream == "weights":
            return self._layers(run, compiles=False)
        machine = {"device": self.device, "host_memory_bytes": self.host, "bandwidth": self.rate}
        step = self._step(dataclasses.replace(run, host_state="float32", prefetch_bytes=None))
        machine |= {"host_state": run.host_state, "prefetch_bytes": run.prefetch_bytes}
        return planning.plan(*step, **machine)

    def plan(self, run: StepSettings) -> planning.Plan:
        """Plans a run, with the compiler if it is installed."""
        if run.stream == "weights":
            return self._compiled_layers(run) if self.by_compiler else self.by_shapes(run)
        plan = self.by_shapes(run)
        if not self.by_compiler:
            return plan
        # The gradients and activations of a step do not depend on these settings.
        same = {name: getattr(self.settings, name) for name in ("update_interval", "staleness")}
        run = dataclasses.replace(run, **same, host_state="float32", prefetch_bytes=None)
        return plan.with_peak(self._peak(run))

    def plan_to_fit(self, run: StepSettings) -> planning.Plan | None:
        """Plans a run, and compiles only if it fits by shapes; None if it cannot be planned."""
        try:
            # These bytes do not depend on remat, and tracing a deep model takes seconds.
            plan = self.by_shapes(dataclasses.replace(run, remat=self.settings.remat))
            if not plan.fits or not self.by_compiler:
                return plan
            caches = self._peak, self._compiled_layers
            compiled = sum(x.cache_info().misses for x in caches)
            return self.plan(run) if compiled < COMPILATIONS else None
        except SettingsError:
            return None


def plan_run(
    settings: Settings, options: Planning, deepspeed: DeepSpeedOptions | None = None
) -> RunPlan:
    """Plans a run, which has its DeepSpeed config's values, for the machine in `options`."""
    settings.check_task(["model"])
    planner = _Planner(settings, options)
    if planner.origin is not None:
        check_length(settings.sequence_length, planner.origin)
    plans = {
        name: planner.plan(
            settings
            if name == settings.optimizer
            else dataclasses.replace(settings, optimizer=name, **_AT_ONCE)
        )
        for name in OPTIMIZERS
    }

    def plan_of(other: StepSettings) -> planning.Plan | None:
        if deepspeed is not None and with_deepspeed_values(deepspeed, other) != other:
            return None  # the config overrides the change
        return planner.plan_to_fit(other)

    ways: list[Way] = []
    if not plans[settings.optimizer].fits:
        unit = settings.micro_batches * batch_parts(planner.mesh if settings.mesh else None)
        ways = ways_that_fit(settings, unit, plan_of)
        if not ways and settings.stream != "weights":
            layered = dataclasses.replace(settings, **_BY_LAYERS)
            ways = [
                way._replace(changes={**_changed(settings, _BY_LAYERS), **way.changes})
                for way in ways_that_fit(layered, unit, plan_of)
            ]
    return RunPlan(settings, plans, planner.measured, tuple(ways))


def ways_that_fit(
    settings: StepSettings, unit: int, plan_of: Callable[[StepSettings], planning.Plan | None]
) -> list[Way]:
    """Returns at most `WAYS` ways to make a run fit, large batches first.

    Each has few changes, and the first batch that fits when batches are halved in multiples of
    `unit`. `plan_of` returns None for settings that cannot be planned.
    """
    ways: list[Way] = []
    for changes in _changes(settings):
        # More changes are useful only with a larger batch.
        fewer = [way.batch_size for way in ways if way.changes.items() <= changes.items()]
        batch, least = settings.batch_size, max(fewer, default=0)
        while batch > least:
            plan = plan_of(dataclasses.replace(settings, batch_size=batch, **changes))
            if plan is None or (plan.by == "shapes" and not plan.fits):
                break  # a smaller batch does not fit either
            if plan.fits:
                ways.append(Way(changes, batch, plan))
                break
            batch = batch // 2 // unit * unit
        if len(ways) == WAYS:
            break
    return sorted(ways, key=lambda way: -way.batch_size)


def _changes(settings: StepSettings) -> Iterator[dict[str, Any]]:
    """Yields changes other than the batch, alone and combined, fewest changes first."""
    offloads, interval = settings.optimizer != "adamw", settings.update_interval
    choices: dict[str, Any] = {"remat": True}
    if settings.stream == "weights":  # each layer is recomputed anyway
        choices = {"layer_inputs": "host", "layer_updates": "during_backward"}
    if offloads:
        choices["host_state"] = "compact"
    if settings.stream == "none":
        choices["scan_layers"] = False
    if settings.optimizer == "zenflow" and isinstance(interval, int):
        choices["update_interval"] = max(interval // 2, 1)
    if offloads and settings.prefetch_bytes is None and settings.stream != "weights":
        choices["prefetch_bytes"] = 0
    changes = list(_changed(settings, choices).items())
    for count in range(len(changes) + 1):
        yield from map(dict, itertools.combinations(changes, count))


def _changed(settings: StepSettings, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in values.items() if getattr(settings, name) != x}


def compiled_peak(run: StepSettings, origin: Pretrained | None, mesh: Mesh | None) -> int:
    """Returns the bytes on a device at a step's peak, according to the compiler."""
    return planning.peak_bytes(compiled_step(planned_step(run, origin, mesh, placed=True)))


def compiled_step(planned: PlannedStep) -> jax.stages.Compiled:
    """Compiles a planned step for the described device of its arguments."""
    step: Any = planned.step
    try:
        return step.lower(*planned[1:]).compile(_OPTIONS)
    except NotImplementedError as error:  # streaming needs a newer jax
        raise SettingsError(str(error)) from error


def mesh_of(text: str | None, device: str, *, described: bool) -> Mesh | None:
    """Returns the setting's mesh, of described GPUs or of this machine's CPU devices."""
    sizes = mesh_axes(text) if text else {"data": 1}
    if described:
        return planning.described_mesh(device, sizes)
    if text is None:
        return None
    return mesh_over(sizes, jax.devices("cpu")[: math.prod(sizes.values())])


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
    settings: StepSettings,
    origin: Pretrained | None,
    mesh: Mesh | None,
    *,
    placed: bool = False,
) -> PlannedStep:
    """Returns the step that a run would compile; `placed` puts its arguments on the mesh."""
    kind, build, batches = _model_of(settings, origin, divided := mesh if settings.mesh else None)
    if not settings.steps:
        settings = dataclasses.replace(settings, steps=STEPS)
    graphdef, params = jax.eval_shape(lambda: models.split(build()))
    tx = make_optimizer(settings, steps_per_epoch=settings.steps)
    sharding = None if mesh is None or not placed else NamedSharding(mesh, PartitionSpec())
    if divided is None:
        opt_state = jax.eval_shape(tx.init, params)
    else:
        params = jax.tree.map(_shape_at, params, weight_shardings(divided, params))
        is_adamw = settings.optimizer == "adamw"
        everywhere = NamedSharding(divided, PartitionSpec())
        opt_state = _state_shapes(tx, params, everywhere) if is_adamw else tx.init(params)
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
    mesh: Mesh | None,
    *,
    compiles: bool,
    **machine: Any,
) -> planning.LayerPlan:
    """Plans a run whose weights stream; `machine` is passed to `plan_layerwise`."""
    kind, build, batches = _model_of(settings, origin, divided := mesh if settings.mesh else None)
    graphdef, shapes = jax.eval_shape(lambda: models.split(build()))
    if divided is not None:
        shardings: Any = weight_shardings(divided, shapes)
    else:
        where = SingleDeviceSharding(jax.devices("cpu")[0])
        if mesh is not None and compiles:
            where = batches = NamedSharding(mesh, PartitionSpec())
        shardings = jax.tree.map(lambda _: where, shapes)
    model = models.layered_shapes(graphdef, shapes, shardings)
    rows = settings.batch_size // settings.micro_batches
    return planning.plan_layerwise(
        model.shapes,
        _batch(kind, settings, rows, batches),
        first=model.first,
        layer=model.layers,
        last=model.last,
        micro_batches=settings.micro_batches,
        updates=settings.layer_updates,
        inputs=settings.layer_inputs,
        host_state=settings.host_state,
        compiles=compiles,
        compiler_options=_OPTIONS if compiles else None,
        **machine,
    )


def _model_of(
    settings: StepSettings, origin: Pretrained | None, mesh: Mesh | None
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
    return optax.tree.map_params(
        tx,
        lambda x, p: _shape_at(x, p.sharding),
        jax.eval_shape(tx.init, params),
        params,
        transform_non_params=lambda x: _shape_at(x, everywhere),
    )
