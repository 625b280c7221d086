"""Refuses a run that cannot fit on the machine that is here, before anything of it is read.

What decides is a plan (`planning.py`) by formula, which needs a second for a large model. Where the
model is small for the machine nobody asks for one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
from jax.sharding import Mesh

import zenflow_jax
from train.memory import device_bytes, host_bytes
from train.models import own_config
from train.planned_step import planned_step
from train.pretrained import Pretrained
from train.settings import Settings, SettingsError
from zenflow_jax._exchange.host_memory import host_memory
from zenflow_jax._planner.plan import nbytes_here, on_device

#: Bytes of a parameter that no way of training takes, with its gradients and mail; and float32
#: arrays of a batch's logits.
_MOST_OF_PARAMETER, _MOST_OF_LOGITS = 80, 16
#: How much too high a plan by formula may be (`benchmarks/LOG.md`).
_TOO_HIGH = 1.25
#: What helps where the host's memory is too small.
_FOR_HOST = (
    {},
    {"host_state": "compact"},
    {"host_state": "compact", "send_gradients": "per_window"},
)


def check_fits(settings: Settings, origin: Pretrained | None, mesh: Mesh | None) -> None:
    """Refuses a run that cannot fit on the devices that are here.

    Args:
        settings: Of the run.
        origin: The folder of its model.
        mesh: Its devices.

    Raises:
        SettingsError: With the plan's numbers, and the nearest settings that would fit.
    """
    if _is_small(settings, origin):
        return
    need = needs(settings, origin, mesh)
    if need.fits:
        return
    # Blocks written out take seconds to trace, and of these there are many.
    quick = dataclasses.replace(settings, scan_layers=True)
    other = nearest(
        quick, lambda x: needs(dataclasses.replace(x, scan_layers=True), origin, mesh).fits
    )
    if other is not None:
        other = dataclasses.replace(other, scan_layers=settings.scan_layers)
        if not needs(other, origin, mesh).fits:
            other = dataclasses.replace(other, scan_layers=True)
    remedy = (
        f"The nearest that would fit: {as_flags(settings, other)}."
        if other is not None
        else "No batch, micro-batches, remat or optimizer would make it fit: take a smaller model, "
        "or more devices (--mesh)."
    )
    raise SettingsError(
        f"`model`: expected a run that has room on this machine, got one that {need.text}. "
        f"{remedy} --plan shows where it goes; --force starts it all the same."
    )


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a run needs at least, and whether the machine has it."""

    fits: bool
    text: str


def needs(settings: Settings, origin: Pretrained | None, mesh: Mesh | None) -> Needs:
    """What a run of these settings needs of the machine that is here."""
    there, processes = device_bytes(), jax.process_count()
    planned = planned_step(settings, origin, mesh)
    if _on_cpu():
        # Both are in one memory, and what the CPU's compiler makes of a step is another matter.
        arrays = [*jax.tree.leaves(planned.params), *on_device(planned.opt_state)]
        device = sum(map(nbytes_here, arrays)) * (jax.local_device_count() if mesh else 1)
        masters = 0.0
        if settings.optimizer != "adamw":
            state = zenflow_jax.find_state(planned.opt_state)
            masters = host_memory(state, host_state=settings.host_state).state / processes
        return Needs(
            device + masters <= host_bytes(),
            f"takes {_gb(device)} of weights and state and {_gb(masters)} of masters and moments "
            f"of this machine's {_gb(host_bytes())}, without anything else",
        )
    # Of the GPU only what it has counts here, not how fast it is.
    found = zenflow_jax.plan(*planned, host_state=settings.host_state)
    certain = found.device["weights"] + found.device["optimizer state"]
    host = found.host_bytes / processes
    lower = max(certain, found.device_bytes / _TOO_HIGH)
    if there is not None and lower > there:
        classes = ", ".join(f"{name} {_gb(size)}" for name, size in found.device.items() if size)
        return Needs(
            False, f"takes {_gb(found.device_bytes)} of each device's {_gb(there)} ({classes})"
        )
    if host > host_bytes():
        classes = ", ".join(f"{name} {_gb(size)}" for name, size in found.host.items() if size)
        return Needs(False, f"takes {_gb(host)} of the host's {_gb(host_bytes())} ({classes})")
    return Needs(True, "")


def nearest(settings: Settings, fits: Callable[[Settings], bool]) -> Settings | None:
    """The nearest settings that fit, if any of the usual remedies does.

    Args:
        settings: Of a run that does not fit.
        fits: Whether others do.
    """
    batch, parts = settings.batch_size, settings.micro_batches
    most = max((i for i in range(1, batch + 1) if batch % (parts * i) == 0), default=1)
    smaller = {"micro_batches": parts * most}
    ways = [{}, {"remat": True}, smaller, {"remat": True} | smaller]
    ways.append({"remat": True, "batch_size": parts})
    changes = [way | of_host for of_host in _FOR_HOST for way in ways]
    if settings.optimizer != "zenflow":
        changes += [{"optimizer": "zenflow"} | change for change in changes]
    if _on_cpu():  # where the state alone counts
        changes = [x for x in changes if x.keys() <= {"optimizer", "host_state"}]
    for change in changes:
        other = dataclasses.replace(settings, **change)
        if other != settings and fits(other):
            return other
    return None


def as_flags(settings: Settings, other: Settings) -> str:
    """What to pass for the other settings."""
    flags = []
    for field in dataclasses.fields(settings):
        value = getattr(other, field.name)
        if value != getattr(settings, field.name):
            flag = "--" + field.name.replace("_", "-")
            flags.append(flag if value is True else f"{flag} {value}")
    return " ".join(flags)


def _is_small(settings: Settings, origin: Pretrained | None) -> bool:
    """Whether the model and a batch of it are far below the machine's memory, at a glance."""
    if origin is None:
        config = own_config(settings)
        block = 4 * config.width**2 + 3 * config.width * config.ffn
        parameters, vocabulary = config.layers * block, config.vocabulary
    else:
        parameters = sum(math.prod(x.shape) for x in origin.tensors.values())
        vocabulary = origin.config.vocabulary
    tokens = settings.batch_size * settings.sequence_length / settings.micro_batches
    least = min(x for x in (device_bytes(), host_bytes()) if x is not None)
    wide = max(vocabulary, 0 if origin is None else origin.config.ffn)
    return _MOST_OF_PARAMETER * parameters + 4 * _MOST_OF_LOGITS * tokens * wide < least


def _on_cpu() -> bool:
    return jax.local_devices()[0].platform == "cpu"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB"
