"""Whether a run fits and hides its host work, for the three optimizers side by side.

    python -m train.finetune CONFIG --model DIR --plan

Nothing of the weights is read, and no device is needed. The arithmetic is the library's
(`zenflow_jax.planning`); here are the run's model, what the compiler is asked, and the searches for
the largest batch and for ways to fit. What is shown is in `plan_report.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh

from train.memory import host_bytes
from train.models import own_config
from train.optimizers import with_deepspeed
from train.planned_step import PlannedStep, folder_of_config, planned_step, with_batch
from train.pretrained import Pretrained
from train.settings import Planning, Settings, SettingsError
from train.sharding import batch_parts, mesh_axes
from zenflow_jax import find_state, planning

OPTIMIZERS = ("adamw", "offload", "zenflow")
#: Layers of the two models that are compiled in place of a deeper one that is written out, to
#: compare a run with other optimizers.
DEPTHS = (2, 4)
#: How often the compiler may be asked for the largest batch, and one that nobody takes.
COMPILATIONS, _MOST = 3, 2**20
#: How many ways to make a run fit are named.
WAYS = 3


class Memory(NamedTuple):
    """What a run with some settings takes, in bytes, and whether there is so much.

    Without a compiler gradients and activations are not in it.
    """

    device: float
    host: float
    fits: bool


class Way(NamedTuple):
    """Settings with which a run fits."""

    changes: Mapping[str, Any]  # by name, beside that of the batch
    batch_size: int
    memory: Memory


class RunPlan(NamedTuple):
    """What is planned of a run."""

    settings: Settings
    of_optimizers: Mapping[str, planning.Plan]
    largest_batch: int | None  # of the settings' optimizer; None if not even the least fits
    measured: bool  # whether the host's bandwidth was
    ways: tuple[Way, ...]  # that fit, the best first; () where the settings themselves do

    @property
    def chosen(self) -> planning.Plan:
        return self.of_optimizers[self.settings.optimizer]


def plan_run(settings: Settings, asked: Planning) -> RunPlan:
    """What a run of these settings takes.

    Args:
        settings: Of the run.
        asked: For which device and host.

    Raises:
        SettingsError, ModelError: If the settings or the model's config cannot be followed.
    """
    if (settings.model is None) != (settings.task == "standard_library"):
        raise SettingsError(
            "`model`: expected a folder with a config.json, or none with the task standard_library,"
            f" which makes its own model; got {settings.model or 'none'} with {settings.task}. "
            "Pass --model DIR, or another --task."
        )
    origin = None if settings.model is None else folder_of_config(settings.model)
    if origin is not None and origin.architecture == "encoder":
        most = origin.config.positions
        if settings.sequence_length > most:
            raise SettingsError(
                f"`sequence_length`: expected at most {most}, for which the model has positions, "
                f"got {settings.sequence_length}. Pass a smaller --sequence-length."
            )
    here = planning.gpu_of_kind(jax.local_devices()[0].device_kind)
    device = asked.device
    if device is None:
        kinds = [name for name, gpu in planning.GPUS.items() if gpu is here]
        device = kinds[0] if kinds else "h100"
    by_compiler = planning.has_compiler()
    mesh = mesh_of(settings, device, described=by_compiler)
    bandwidth, measured = asked.host_bandwidth, False
    if bandwidth is not None:
        rate = None if bandwidth == "here" else float(bandwidth) * 1e9
    else:
        devices = math.prod(mesh_axes(settings.mesh).values()) if settings.mesh else 1
        gpu = planning.GPUS[device]
        rate = None if here is gpu else gpu.host_beside(devices)[0]
    if rate is None:
        planned = planned_step(dataclasses.replace(settings, optimizer="zenflow"), origin, None)
        state = find_state(planned.opt_state)
        rate = planning.host_bandwidth(
            state.leaves, threads=settings.threads, host_state=settings.host_state
        )
        measured = True
    host = None if asked.host_memory is None else int(asked.host_memory * 1e9)
    if host is None and here is planning.GPUS[device]:
        host = host_bytes()

    made: dict[Settings, PlannedStep] = {}

    def step_of(settings: Settings) -> PlannedStep:
        if settings.mesh is not None:  # which batches of another size divide otherwise
            return planned_step(settings, origin, mesh, placed=by_compiler)
        # Neither the batch nor what the host keeps changes model and state.
        alike = dataclasses.replace(
            settings, batch_size=settings.micro_batches, host_state="float32"
        )
        if alike not in made:
            made[alike] = planned_step(settings, origin, mesh, placed=by_compiler)
        return with_batch(made[alike], settings.batch_size)

    def by_shapes(settings: Settings) -> planning.Plan:
        return planning.plan(
            *step_of(settings),
            device=device,
            host_memory_bytes=host,
            bandwidth=rate,
            host_state=settings.host_state,
        )

    layers = (own_config(settings) if origin is None else origin.config).layers

    @functools.cache
    def at_depth(run: Settings, layers: int) -> int:
        return compiled_peak(*with_layers(run, origin, layers), mesh)

    def peak_of(run: Settings) -> int:
        # No step's gradients and activations depend on these.
        run = dataclasses.replace(
            run, host_state="float32", update_interval=settings.update_interval
        )
        # Many layers written out take the compiler a minute. For comparing, a few will do.
        alike = run.optimizer == settings.optimizer
        if alike or run.scan_layers or layers <= DEPTHS[-1]:
            return at_depth(run, layers)
        low, high = (at_depth(run, few) for few in DEPTHS)
        return extended(low, high, layers)

    def one(run: Settings) -> planning.Plan:
        plan = by_shapes(run)
        return plan.with_peak(peak_of(run)) if by_compiler else plan

    plans = {name: one(dataclasses.replace(settings, optimizer=name)) for name in OPTIMIZERS}
    plan = plans[settings.optimizer]
    parts = batch_parts(mesh if settings.mesh else None)
    unit = settings.micro_batches * parts

    def in_all(batch: int) -> int:
        """Bytes of the device with another batch, on which nothing but the peak depends."""
        return plan.with_peak(peak_of(dataclasses.replace(settings, batch_size=batch))).device_bytes

    largest = None
    if by_compiler:
        least = by_shapes(settings).device_bytes
        largest = largest_batch(settings.batch_size, unit, plan.device_bytes_there, least, in_all)
    ways: list[Way] = []
    if not plan.fits:
        most = max(settings.batch_size, unit)

        def memory_of(other: Settings) -> Memory | None:
            try:
                if with_deepspeed(other, parts)[0] != other:
                    return None  # its config goes over what is changed here
                # What is exact depends on neither; the trace of a deep model takes seconds.
                found = by_shapes(dataclasses.replace(other, batch_size=unit, remat=settings.remat))
                if found.fits and by_compiler:
                    found = found.with_peak(between(other, unit, most, peak_of))
            except SettingsError:
                return None
            return Memory(found.device_bytes, found.host_bytes, found.fits)

        ways = ways_that_fit(settings, unit, memory_of)
    return RunPlan(settings, plans, largest, measured, tuple(ways))


def extended(low: int, high: int, layers: int) -> int:
    """The peak with so many layers, on the line through those of `DEPTHS`: layers are alike."""
    few, many = DEPTHS
    return high + math.ceil((layers - many) * (high - low) / (many - few))


def with_layers(
    settings: Settings, origin: Pretrained | None, layers: int
) -> tuple[Settings, Pretrained | None]:
    """The same run of a model with so many layers."""
    if origin is None:
        return dataclasses.replace(settings, layers=layers), None
    return settings, origin._replace(config=origin.config._replace(layers=layers))


def compiled_peak(settings: Settings, origin: Pretrained | None, mesh: Mesh | None) -> int:
    """Bytes of one device at the peak of a step, by the compiler."""
    planned = planned_step(settings, origin, mesh, placed=True)
    step: Any = planned.step
    return planning.peak_bytes(step.lower(*planned[1:]).compile())


def between(run: Settings, least: int, most: int, peak_of: Callable[[Settings], int]) -> int:
    """The peak with a batch between two others, on the line through theirs.

    As a rule it is below that line: a peak grows faster with a larger batch.
    """
    low, high = (peak_of(dataclasses.replace(run, batch_size=batch)) for batch in (least, most))
    return math.ceil(low + (high - low) * (run.batch_size - least) / max(most - least, 1))


def ways_that_fit(
    settings: Settings, unit: int, memory_of: Callable[[Settings], Memory | None]
) -> list[Way]:
    """At most `WAYS` ways to make a run fit: larger batches first, then fewer changes.

    None of them has all the changes of another one and a batch that is no larger.

    Args:
        settings: Of a run that does not fit.
        unit: What a batch is a multiple of.
        memory_of: What a run takes; None if its settings cannot be followed.
    """

    def fitting(changes: dict[str, Any], batch: int) -> Way | None:
        other = dataclasses.replace(settings, batch_size=batch, **changes)
        memory = memory_of(other)
        return Way(changes, batch, memory) if memory and memory.fits else None

    # What does not fit with the smallest batch fits with none.
    combined = [changes for changes in _changes(settings) if fitting(changes, unit)]
    found: list[Way] = []
    batch = settings.batch_size
    while batch >= unit and len(found) < WAYS:
        for changes in combined:
            is_more = any(way.changes.items() <= changes.items() for way in found)
            if not is_more and (way := fitting(changes, batch)):
                found.append(way)
        batch = batch // 2 // unit * unit
    return found[:WAYS]


def _changes(settings: Settings) -> Iterator[dict[str, Any]]:
    """What may be changed beside the batch, and together: few changes first."""
    choices: list[tuple[str, Any]] = []
    if settings.optimizer != "adamw" and settings.host_state != "compact":
        choices.append(("host_state", "compact"))
    if settings.scan_layers:
        choices.append(("scan_layers", False))
    interval = settings.update_interval
    if settings.optimizer == "zenflow" and isinstance(interval, int):
        choices += [("update_interval", 2 * interval)]
        choices += [("update_interval", interval // 2)] * (interval > 1)
    if not settings.remat:
        choices.append(("remat", True))
    for count in range(len(choices) + 1):
        for chosen in itertools.combinations(choices, count):
            if len(dict(chosen)) == count:  # no setting twice
                yield dict(chosen)


def largest_batch(
    now: int, unit: int, there: int, least: int, needs: Callable[[int], int]
) -> int | None:
    """The largest batch, in multiples of `unit`, that fits on the device; None if none does.

    What a batch needs is asked at most `COMPILATIONS` times beside the run's own, between the
    largest known to fit and the smallest known not to.

    Args:
        now: The run's batch.
        unit: What a batch is a multiple of.
        there: Bytes that the device has.
        least: Bytes that it needs whatever the batch.
        needs: Bytes that it needs with a batch.
    """
    if least > there:
        return None
    start = max(now // unit, 1)
    asked = {0: least, start: needs(start * unit)}
    for _ in range(COMPILATIONS):
        good = max((x for x, size in asked.items() if size <= there), default=0)
        bad = min((x for x, size in asked.items() if size > there), default=_MOST)
        if bad - good <= max(good // 64, 1):
            break
        # On the line through the two that are next to the limit; between what fits and what does
        # not, in the middle if the line leaves that.
        one, other = sorted(asked, key=lambda x: abs(asked[x] - there))[:2]
        slope = (asked[one] - asked[other]) / (one - other)
        guess = int(one + (there - asked[one]) / slope) if slope > 0 else 0
        if not good < guess < bad:
            guess = (good + bad) // 2 if bad < _MOST else 2 * good
        asked[guess] = needs(guess * unit)
    return max((x for x, size in asked.items() if size <= there), default=0) * unit or None


def mesh_of(settings: Settings, device: str, *, described: bool) -> Mesh | None:
    """The mesh of the settings, of GPUs that need not be there or of this machine's devices."""
    sizes = mesh_axes(settings.mesh) if settings.mesh else {"data": 1}
    if described:
        return planning.described_mesh(device, sizes)
    if settings.mesh is None:
        return None
    count = math.prod(sizes.values())
    # Those of the CPU, of which there may be any number: nothing is computed on them.
    there = jax.devices("cpu")
    if count > len(there):
        raise SettingsError(
            f"`--plan`: expected {count} devices of the CPU to lay the model out on, for --mesh "
            f"{settings.mesh}, got {len(there)}. Set JAX_NUM_CPU_DEVICES={count} in the "
            "environment."
        )
    auto = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=auto, devices=there[:count]
    )
