"""Whether a run fits and hides its host work, for the three optimizers side by side.

    python -m train.finetune CONFIG --model DIR --plan

Nothing of the weights is read, and no device is needed. The arithmetic is the library's
(`zenflow_jax.plan`); here are the run's model, the search for its largest batch, and what a start
is refused for. What is shown is in `plan_report.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh

import zenflow_jax
from train.memory import host_bytes
from train.optimizers import with_deepspeed
from train.planned_step import PlannedStep, folder_of_config, planned_step, with_batch
from train.settings import Planning, Settings, SettingsError
from train.sharding import batch_parts, mesh_axes
from zenflow_jax._planner.compiled import described_mesh, has_compiler
from zenflow_jax._planner.gpus import gpu_of_kind

OPTIMIZERS = ("adamw", "offload", "zenflow")
#: How often the compiler may be asked for the largest batch.
COMPILATIONS = 6
#: Traces for the same by formula, and sequences that are more than anybody takes.
_POINTS, _MOST = 5, 2**20
#: How many ways to make a run fit are named.
WAYS = 3


class Memory(NamedTuple):
    """What a run with some settings takes, in bytes, and whether there is so much."""

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
    of_optimizers: Mapping[str, zenflow_jax.Plan]
    largest_batch: int | None  # of the settings' optimizer; None if not even the least fits
    measured: bool  # whether the host's bandwidth was
    ways: tuple[Way, ...]  # that fit, the best first; () where the settings themselves do

    @property
    def chosen(self) -> zenflow_jax.Plan:
        return self.of_optimizers[self.settings.optimizer]


def plan_run(settings: Settings, asked: Planning) -> RunPlan:
    """What a run of these settings takes.

    Args:
        settings: Of the run.
        asked: For which device and host.

    Raises:
        SettingsError, ModelError: If the settings or the model's config cannot be followed; or if
            the compiler is asked for and not installed.
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
    here = gpu_of_kind(jax.local_devices()[0].device_kind)
    device = asked.device
    if device is None:
        kinds = [name for name, gpu in zenflow_jax.GPUS.items() if gpu is here]
        device = kinds[0] if kinds else "h100"
    by_compiler = {"auto": has_compiler(), "compiler": True, "formula": False}[asked.plan_by]
    mesh = mesh_of(settings, device, described=by_compiler)
    bandwidth, measured = asked.host_bandwidth, False
    if bandwidth is not None:
        rate = None if bandwidth == "here" else float(bandwidth) * 1e9
    else:
        devices = math.prod(mesh_axes(settings.mesh).values()) if settings.mesh else 1
        gpu = zenflow_jax.GPUS[device]
        rate = None if here is gpu else gpu.host_beside(devices)[0]
    if rate is None:
        planned = planned_step(dataclasses.replace(settings, optimizer="zenflow"), origin, None)
        state = zenflow_jax.find_state(planned.opt_state)
        rate = zenflow_jax.host_bandwidth(
            state.leaves, threads=settings.threads, host_state=settings.host_state
        )
        measured = True
    host = None if asked.host_memory is None else int(asked.host_memory * 1e9)
    if host is None and here is zenflow_jax.GPUS[device]:
        host = host_bytes()

    made: dict[tuple[Settings, bool], PlannedStep] = {}

    def steps(settings: Settings, *, placed: bool) -> PlannedStep:
        if settings.mesh is not None:  # which batches of another size divide otherwise
            return planned_step(settings, origin, mesh, placed=placed)
        # Neither the batch nor what the host keeps changes model and state.
        alike = dataclasses.replace(
            settings, batch_size=settings.micro_batches, host_state="float32"
        )
        which = alike, placed
        if which not in made:
            made[which] = planned_step(settings, origin, mesh, placed=placed)
        return with_batch(made[which], settings.batch_size)

    def one(settings: Settings, *, compile_it: bool) -> zenflow_jax.Plan:
        planned = steps(settings, placed=compile_it)
        step: Any = planned.step
        arguments = planned[1:]
        compiled = step.lower(*arguments).compile() if compile_it else None
        return zenflow_jax.plan(
            step,
            *arguments,
            device=device,
            host_memory_bytes=host,
            bandwidth=rate,
            host_state=settings.host_state,
            compiled=compiled,
        )

    def chosen(batch: int, *, compile_it: bool) -> zenflow_jax.Plan:
        return one(dataclasses.replace(settings, batch_size=batch), compile_it=compile_it)

    found = {
        name: one(dataclasses.replace(settings, optimizer=name), compile_it=by_compiler)
        for name in OPTIMIZERS
    }
    parts = batch_parts(mesh if settings.mesh else None)
    unit = settings.micro_batches * parts
    largest = largest_batch(
        settings.batch_size,
        unit,
        found[settings.optimizer],
        lambda batch: chosen(batch, compile_it=False),
        (lambda batch: chosen(batch, compile_it=True)) if by_compiler else None,
    )
    ways: list[Way] = []
    if not (plan := found[settings.optimizer]).fits:
        # The formula, made to agree with the compiler at these settings.
        off = 1.0
        if by_compiler:
            off = plan.device_bytes / one(settings, compile_it=False).device_bytes

        def memory_of(other: Settings) -> Memory | None:
            try:
                if with_deepspeed(other, parts)[0] != other:
                    return None  # its config goes over what is changed here
                found = one(other, compile_it=False)
            except SettingsError:
                return None
            fits = off * found.device_bytes <= found.device_bytes_there and found.fits_host
            return Memory(off * found.device_bytes, found.host_bytes, fits)

        ways = ways_that_fit(settings, unit, memory_of)
    return RunPlan(settings, found, largest, measured, tuple(ways))


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
    now: int,
    unit: int,
    known: zenflow_jax.Plan,
    by_formula: Callable[[int], zenflow_jax.Plan],
    by_compiler: Callable[[int], zenflow_jax.Plan] | None,
) -> int | None:
    """The largest batch, in multiples of `unit`, that fits on the device.

    By formula a search of its own. The compiler is asked at most `COMPILATIONS` times: where the
    formula, made to agree with it at the batch that is known, says that the limit is, and by
    bisection between the largest batch known to fit and the smallest known not to.

    Args:
        now: The run's batch.
        unit: What a batch is a multiple of.
        known: The plan of that batch.
        by_formula, by_compiler: Plans of others; without a compiler the formula decides.
    """
    there = known.device_bytes_there
    found: dict[int, float] = {}

    def needs(units: int) -> float:
        if units not in found:
            found[units] = by_formula(units * unit).device_bytes
        return found[units]

    start = max(now // unit, 1)
    off = known.device_bytes / max(needs(start), 1)
    low = _last_that_fits(lambda units: off * needs(units), there, start)
    if by_compiler is None:
        return low * unit or None
    asked: dict[int, float] = {start: known.device_bytes}
    guess = max(low, 1)
    for _ in range(COMPILATIONS):
        if guess in asked:
            break
        asked[guess] = by_compiler(guess * unit).device_bytes
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
    return max((x for x, size in asked.items() if size <= there), default=0) * unit or None


def _last_that_fits(needs: Callable[[int], float], there: float, start: int) -> int:
    """The largest count that needs no more than there is, to a hundredth; 0 if not even one does.

    What is needed grows with the count, nearly as a straight line does: a few points are enough.
    """
    low, high = (start, 2 * start) if needs(start) <= there else (max(start // 2, 1), start)
    guess = low
    for _ in range(_POINTS):
        at_low, at_high = needs(low), needs(high)
        slope = (at_high - at_low) / max(high - low, 1)
        if slope <= 0:
            return _MOST if at_high <= there else 0
        guess = min(max(int(low + (there - at_low) / slope), 0), _MOST)
        if guess == 0:
            return int(low == 1 and at_low <= there)
        near = abs(guess - high) <= max(high // 100, 0) or abs(guess - low) <= max(low // 100, 0)
        low, high = sorted((high if abs(guess - high) < abs(guess - low) else low, guess))
        if near or low == high:
            break
    while guess and needs(guess) > there:
        guess -= max(guess // 100, 1)
    return guess


def mesh_of(settings: Settings, device: str, *, described: bool) -> Mesh | None:
    """The mesh of the settings, of GPUs that need not be there or of this machine's devices."""
    sizes = mesh_axes(settings.mesh) if settings.mesh else {"data": 1}
    if described:
        try:
            return described_mesh(device, sizes)
        except RuntimeError as error:
            raise SettingsError(f"`--plan-by`: {error}") from error
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
