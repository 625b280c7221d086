"""Plans whether a run fits and hides its host work, for the three optimizers side by side.

No weights are read, and no device is needed. The arithmetic is `zenflow_jax.planning`'s.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train import hosted, models
from train.command_line import Planning
from train.hf_config import ARCHITECTURES, CONFIG, read_config, read_raw
from train.hub import model_folder
from train.memory import host_bytes
from train.optimizers import initial_state, make_optimizer, with_values_of
from train.pretrained import Pretrained
from train.settings import Settings, SettingsError, StepSettings, may_stream
from train.sharding import batch_parts, batch_sharding, mesh_axes, mesh_over, weight_shardings
from train.step import PER_EXAMPLE, make_train_step
from train.tasks.chosen import check_length
from zenflow_jax import find_state, planning
from zenflow_jax.deepspeed import DeepSpeedOptions

OPTIMIZERS = ("adamw", "offload", "zenflow")
#: Layers of the two models that are compiled in place of a deeper one that is written out, to
#: compare a run with other optimizers.
DEPTHS = (2, 4)
#: How often the compiler may be asked for the largest batch, and a batch that nobody takes.
COMPILATIONS, _MOST = 3, 2**20
#: How many ways to make a run fit are named.
WAYS = 3
# For a run whose steps and classes follow from its data: no size depends on the steps.
STEPS, LABELS = 1000, 2


class Memory(NamedTuple):
    """The bytes that a run takes; without a compiler, gradients and activations are not in them."""

    device: float
    host: float
    fits: bool


class Way(NamedTuple):
    """Settings with which a run fits."""

    changes: Mapping[str, Any]  # by name, apart from the batch
    batch_size: int
    memory: Memory


class RunPlan(NamedTuple):
    """The plan of a run, for all three optimizers."""

    settings: StepSettings
    of_optimizers: Mapping[str, planning.Plan]
    largest_batch: int | None  # of the settings' optimizer; None if not even the least fits
    measured: bool  # whether the host's bandwidth was
    ways: tuple[Way, ...]  # that fit, the best first; () where the settings themselves do

    @property
    def chosen(self) -> planning.Plan:
        return self.of_optimizers[self.settings.optimizer]


class _Planner:
    """Plans runs of one model on one kind of device; caches shapes and compiled peaks."""

    def __init__(self, settings: StepSettings, asked: Planning):
        self.settings = settings
        self.origin = None if settings.model is None else folder_of_config(settings.model)
        local = planning.gpu_here()
        kinds = [name for name, gpu in planning.GPUS.items() if gpu is local]
        self.device = asked.device or (kinds[0] if kinds else "h100")
        is_here = local is planning.GPUS[self.device]
        self.by_compiler = planning.has_compiler()
        self.mesh = mesh_of(settings.mesh, self.device, described=self.by_compiler)
        self.host = host_bytes() if is_here else None
        if asked.host_memory is not None:
            self.host = int(asked.host_memory * 1e9)
        bandwidth = asked.host_bandwidth or ("here" if is_here else None)
        self.measured = bandwidth == "here"
        self.rate = self._rate(bandwidth)
        options = {"origin": self.origin, "mesh": self.mesh, "placed": self.by_compiler}
        self._step = functools.cache(functools.partial(planned_step, **options))
        self._peak_at_depth = functools.cache(
            lambda run, layers: compiled_peak(run, self.origin, self.mesh, layers)
        )

    def _rate(self, bandwidth: float | str | None) -> float:
        """Bytes a second of the host's memory."""
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
        """The plan of a run without gradients and activations."""
        machine = {"device": self.device, "host_memory_bytes": self.host, "bandwidth": self.rate}
        step = self._step(dataclasses.replace(run, host_state="float32", prefetch_bytes=None))
        machine |= {"host_state": run.host_state, "prefetch_bytes": run.prefetch_bytes}
        return planning.plan(*step, **machine)

    def plan(self, run: StepSettings) -> planning.Plan:
        """The plan of a run, with all that can be known here."""
        plan = self.by_shapes(run)
        return plan.with_peak(self.peak(run, run.batch_size)) if self.by_compiler else plan

    def peak(self, run: StepSettings, batch_size: int) -> int:
        """Bytes of one device at the peak of a step with such batches, by the compiler."""
        # No step's gradients and activations depend on the others.
        same = {name: getattr(self.settings, name) for name in ("update_interval", "staleness")}
        same |= {"host_state": "float32", "prefetch_bytes": None}
        run = dataclasses.replace(run, batch_size=batch_size, **same)
        layers = models.config_of(self.origin, run).layers
        # Many layers written out take the compiler a minute. For comparing, a few will do.
        if run.optimizer == self.settings.optimizer or run.scan_layers or layers <= DEPTHS[-1]:
            return self._peak_at_depth(run, layers)
        low, high = (self._peak_at_depth(run, few) for few in DEPTHS)
        return extended(low, high, layers)


def plan_run(
    settings: Settings, asked: Planning, deepspeed: DeepSpeedOptions | None = None
) -> RunPlan:
    """Plans a run, with the values of its DeepSpeed config, on the machine that is `asked` for."""
    if (settings.model is None) != (settings.task == "standard_library"):
        raise SettingsError(
            "`model`: expected a folder with a config.json, or none with the task standard_library,"
            f" got {settings.model or 'none'} with {settings.task}."
        )
    planner = _Planner(settings, asked)
    if planner.origin is not None:
        check_length(settings.sequence_length, planner.origin)
    plans = {
        name: planner.plan(
            settings
            if name == settings.optimizer
            else dataclasses.replace(settings, optimizer=name, stream="none")
        )
        for name in OPTIMIZERS
    }
    plan = plans[settings.optimizer]
    parts = batch_parts(planner.mesh if settings.mesh else None)
    unit = settings.micro_batches * parts

    def device_bytes(batch: int) -> int:
        """With another batch, on which nothing but the peak depends."""
        return plan.with_peak(planner.peak(settings, batch)).device_bytes

    largest = None
    if planner.by_compiler:
        least = planner.by_shapes(settings).device_bytes
        memory = plan.device_bytes_there
        largest = largest_batch(settings.batch_size, unit, memory, least, device_bytes)

    def memory_of(other: StepSettings) -> Memory | None:
        try:
            if deepspeed is not None and with_values_of(deepspeed, other) != other:
                return None  # its config overrides what is changed here
            # What is exact depends on neither; the trace of a deep model takes seconds.
            exact = planner.by_shapes(
                dataclasses.replace(other, batch_size=unit, remat=settings.remat)
            )
            if exact.fits and planner.by_compiler:
                most = max(settings.batch_size, unit)
                peak_of = functools.partial(planner.peak, other)
                exact = exact.with_peak(between(unit, other.batch_size, most, peak_of))
        except SettingsError:
            return None
        return Memory(exact.device_bytes, exact.host_bytes, exact.fits)

    ways = [] if plan.fits else ways_that_fit(settings, unit, memory_of)
    return RunPlan(settings, plans, largest, planner.measured, tuple(ways))


def extended(low: int, high: int, layers: int) -> int:
    """The peak with so many layers, on the line through those of `DEPTHS`: layers are alike."""
    few, many = DEPTHS
    return high + math.ceil((layers - many) * (high - low) / (many - few))


def compiled_peak(
    run: StepSettings, origin: Pretrained | None, mesh: Mesh | None, layers: int
) -> int:
    """Bytes of one device at the peak of a step of a model with so many layers, by the compiler."""
    planned = planned_step(run, origin, mesh, placed=True, layers=layers)
    peak = planning.peak_bytes(compiled_step(planned))
    return peak - (hosted.nbytes(planned.params) if run.stream == "weights" else 0)


def compiled_step(planned: PlannedStep) -> jax.stages.Compiled:
    """Compiles a planned step for the described device on which its arguments are."""
    step: Any = planned.step
    # Without a device to try them on, jax 0.11.2 finds no deterministic matrix product.
    options = {"xla_gpu_exclude_nondeterministic_ops": False}
    with warnings.catch_warnings():
        # Of weights that the step moves to host memory.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        try:
            return step.lower(*planned[1:]).compile(options)
        except NotImplementedError as error:  # layers that stream, with an older jax
            raise SettingsError(str(error)) from error


def between(least: int, batch: int, most: int, peak_of: Callable[[int], int]) -> int:
    """The peak with a batch between two others, on the line through theirs, which is above it."""
    low, high = peak_of(least), peak_of(most)
    return math.ceil(low + (high - low) * (batch - least) / max(most - least, 1))


def ways_that_fit(
    settings: StepSettings, unit: int, memory_of: Callable[[StepSettings], Memory | None]
) -> list[Way]:
    """At most `WAYS` ways to make a run fit: larger batches first, then fewer changes.

    `memory_of` returns None for settings that cannot be followed.
    """

    def fitting(changes: dict[str, Any], batch: int) -> Way | None:
        memory = memory_of(dataclasses.replace(settings, batch_size=batch, **changes))
        return Way(changes, batch, memory) if memory and memory.fits else None

    # What does not fit with the smallest batch fits with none.
    combined = [changes for changes in _changes(settings) if fitting(changes, unit)]
    ways: list[Way] = []
    batch = settings.batch_size
    while batch >= unit and len(ways) < WAYS:
        for changes in combined:
            is_more = any(way.changes.items() <= changes.items() for way in ways)
            if not is_more and (way := fitting(changes, batch)):
                ways.append(way)
        batch = batch // 2 // unit * unit
    return ways[:WAYS]


def _changes(settings: StepSettings) -> Iterator[dict[str, Any]]:
    """Changes other than the batch, and combinations of them: few changes first."""
    offloads, interval = settings.optimizer != "adamw", settings.update_interval
    choices: list[dict[str, Any]] = []
    choices += [{"host_state": "compact"}] * (offloads and settings.host_state != "compact")
    choices += [{"scan_layers": False}] * (settings.scan_layers and settings.stream == "none")
    if may_stream(dataclasses.replace(settings, scan_layers=True)):
        hosted = {"stream": "weights", "scan_layers": True, "update_interval": 1}
        hosted = {name: x for name, x in hosted.items() if getattr(settings, name) != x}
        choices += [hosted] * bool(hosted)
        choices += [{"staleness": 0}] * (settings.staleness != 0)  # one mail less
    if settings.optimizer == "zenflow" and isinstance(interval, int):
        choices.append({"update_interval": 2 * interval})
        choices += [{"update_interval": interval // 2}] * (interval > 1)
    choices += [{"remat": True}] * (not settings.remat)
    choices += [{"prefetch_bytes": 0}] * (offloads and settings.prefetch_bytes is None)
    for count in range(len(choices) + 1):
        for chosen in itertools.combinations(choices, count):
            changes = dict(item for choice in chosen for item in choice.items())
            twice = len(changes) < sum(map(len, chosen))
            hosts = changes.get("stream", settings.stream) == "weights"
            # Layers in host memory cannot be written out, and upload nothing. Others have too many
            # mails for one less to matter.
            wrong = [("scan_layers", False), ("prefetch_bytes", 0)] if hosts else [("staleness", 0)]
            if not twice and changes.items().isdisjoint(wrong):
                yield changes


def largest_batch(
    start: int, unit: int, memory: int, least: int, needs: Callable[[int], int]
) -> int | None:
    """The largest batch, in multiples of `unit`, that fits, asking `needs` a few times; or None."""
    if least > memory:
        return None
    begin = max(start // unit, 1)
    asked = {0: least, begin: needs(begin * unit)}
    for _ in range(COMPILATIONS):
        good = max((x for x, size in asked.items() if size <= memory), default=0)
        bad = min((x for x, size in asked.items() if size > memory), default=_MOST)
        if bad - good <= max(good // 64, 1):
            break
        # On the line through the two that are next to the limit; if it leaves the range between
        # what fits and what does not, in the middle of that.
        one, other = sorted(asked, key=lambda x: abs(asked[x] - memory))[:2]
        slope = (asked[one] - asked[other]) / (one - other)
        guess = int(one + (memory - asked[one]) / slope) if slope > 0 else 0
        if not good < guess < bad:
            guess = (good + bad) // 2 if bad < _MOST else 2 * good
        asked[guess] = needs(guess * unit)
    return max((x for x, size in asked.items() if size <= memory), default=0) * unit or None


def mesh_of(text: str | None, device: str, *, described: bool) -> Mesh | None:
    """The mesh of a setting: of GPUs that need not exist, or of this machine's CPU devices."""
    sizes = mesh_axes(text) if text else {"data": 1}
    if described:
        return planning.described_mesh(device, sizes)
    if text is None:
        return None
    count = math.prod(sizes.values())
    devices = jax.devices("cpu")
    if count > len(devices):
        raise SettingsError(
            f"`--plan`: expected {count} devices of the CPU to lay the model out on, for --mesh "
            f"{text}, got {len(devices)}. Set JAX_NUM_CPU_DEVICES={count} in the environment."
        )
    return mesh_over(sizes, devices[:count])


class PlannedStep(NamedTuple):
    step: Callable
    params: Any
    opt_state: Any
    batch: Any


def folder_of_config(model: str) -> Pretrained:
    """A model's folder, whose `config.json` alone is read."""
    folder = model_folder(model, [CONFIG])
    raw = read_raw(folder)
    config = read_config(folder / CONFIG, raw)
    return Pretrained(folder, ARCHITECTURES[raw["model_type"]], config, {}, None, raw)


def planned_step(
    settings: StepSettings,
    origin: Pretrained | None,
    mesh: Mesh | None,
    *,
    placed: bool = False,
    layers: int | None = None,
) -> PlannedStep:
    """The step that a run would compile, its arguments `placed` also without a mesh.

    `layers` replaces their number in the model.
    """
    kind = "decoder" if origin is None else origin.architecture
    if not settings.steps:
        settings = dataclasses.replace(settings, steps=STEPS)
    divided = mesh if settings.mesh else None
    batches = divided and batch_sharding(divided, settings.batch_size, settings.micro_batches)
    config = models.config_of(origin, settings)
    config = config if layers is None else config._replace(layers=layers)
    build = models.builder(config, settings, sharding=batches, labels=LABELS)
    graphdef, params = jax.eval_shape(lambda: models.split(build()))
    tx = make_optimizer(settings, steps_per_epoch=settings.steps)
    size, parts = settings.batch_size, settings.micro_batches
    sharding = None if mesh is None or not placed else NamedSharding(mesh, PartitionSpec())
    in_host_memory = settings.stream == "weights"
    if divided is None:
        put = hosted.put if in_host_memory else lambda params: params
        opt_state = jax.eval_shape(lambda params: initial_state(tx, put(params)), params)
    else:
        params = jax.tree.map(_at, params, weight_shardings(divided, params))
        is_adamw = settings.optimizer == "adamw"
        everywhere = NamedSharding(divided, PartitionSpec())
        shapes = hosted.put_shapes(params) if in_host_memory else params
        opt_state = _beside(tx, params, everywhere) if is_adamw else tx.init(shapes)
        sharding = batches
    if sharding is not None:
        params, opt_state = planning.placed((params, opt_state), mesh)
    returned = (hosted.on_device(params) if in_host_memory else params), opt_state
    placement = divided and jax.tree.map(lambda x: x.sharding, returned)
    step = make_train_step(
        graphdef,
        tx,
        PER_EXAMPLE[kind],
        micro_batches=parts,
        stream=settings.stream != "none",
        placement=placement,
        on_gpu=placed,
        described=in_host_memory,
    )

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size, *shape), jnp.int32, sharding=sharding)

    length = settings.sequence_length
    if kind == "decoder":
        return PlannedStep(step, params, opt_state, {"tokens": array(length + 1)})
    batch = {name: array(length) for name in ("tokens", "types", "mask")}
    return PlannedStep(step, params, opt_state, batch | {"label": array()})


def _at(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _beside(tx: Any, params: Any, everywhere: NamedSharding) -> Any:
    """A state whose moments lie as their parameters do, and all else `everywhere`."""
    return optax.tree.map_params(
        tx,
        lambda x, p: _at(x, p.sharding),
        jax.eval_shape(tx.init, params),
        params,
        transform_non_params=lambda x: _at(x, everywhere),
    )
