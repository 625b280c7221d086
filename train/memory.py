"""Memory that does not suffice: refused before anything is allocated, or said in one message."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from train.optimizers import weight_dtype
from train.settings import Settings, SettingsError
from train.sharding import batch_parts


def check_memory(settings: Settings, parameters: int, vocabulary: int, mesh: Mesh | None) -> None:
    """Refuses a run that cannot have room here, by the least that it needs however it is laid out.

    One that needs more than that fails later; `--plan` knows before.

    Args:
        settings: Of the run.
        parameters: Of the model.
        vocabulary: For each token of a batch a language model computes so many float32 logits; 0
            for a model that does not.
        mesh: The devices; None for one.

    Raises:
        SettingsError: If weights and gradients, or with adamw its moments too, are more than the
            memory of the devices; the state on the host is more than the machine's; or the logits
            of a micro-batch are more than a device's memory.
    """
    devices, processes = 1 if mesh is None else mesh.size, jax.process_count()
    adamw, trains = settings.optimizer == "adamw", settings.steps != 0
    once = np.dtype(weight_dtype(settings)).itemsize * parameters
    device = (2 * once + (8 * parameters if adamw else 0)) if trains else once
    # Master and moments of what is not selected; of several processes each has a part of them.
    ratio = settings.topk_ratio if settings.optimizer == "zenflow" else 0.0
    state = 6 if settings.host_state == "compact" else 12
    host = 0.0 if adamw or not trains else state * (1 - min(max(ratio, 0.0), 1.0)) * parameters
    if jax.local_devices()[0].platform == "cpu":
        host += device
    here = f"a model of {parameters:,} parameters with {settings.optimizer}"
    there = device_bytes()
    if there is not None and device / devices > there:
        raise SettingsError(
            f"`model`: expected one that has room in {_gib(there)} on each of {devices} device(s), "
            f"got {here}, which takes {_gib(device)} without anything else. Take a smaller one"
            f"{', --optimizer zenflow' if adamw else ''} or more devices (--mesh); --force starts "
            "it all the same."
        )
    if host / processes > host_bytes():
        raise SettingsError(
            f"`model`: expected one whose state has room in the host's {_gib(host_bytes())}, got "
            f"{here}, which takes {_gib(host / processes)} there without anything else. Take a "
            "smaller one, --host-state compact, or more machines (docs/multi_host.md); --force "
            "starts it all the same."
        )
    tokens = settings.batch_size * settings.sequence_length / settings.micro_batches
    logits = 4 * vocabulary * tokens / batch_parts(mesh)
    if there is not None and logits > there:
        raise SettingsError(
            f"`batch_size`: expected a micro-batch whose logits have room in the device's "
            f"{_gib(there)}, got {settings.batch_size} sequences of {settings.sequence_length} in "
            f"{settings.micro_batches} micro-batches, whose logits alone take {_gib(logits)} on "
            "each device. Pass a smaller --batch-size, or more --micro-batches."
        )


def host_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_bytes() -> int | None:
    """The memory that a device has, of a CPU the machine's; None if it does not say."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if jax.local_devices()[0].platform == "cpu":
        return host_bytes() // jax.local_device_count()
    return None


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether NumPy or jax raises that because there is no memory left."""
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    return isinstance(error, jax.errors.JaxRuntimeError) and (
        "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    )


def lack_behind(error: BaseException) -> BaseException | None:
    """The error of which `is_lack_of_memory` is true: this one, or a cause of it; None if none is.

    What goes wrong on a thread of the engine's is raised as the cause of an error of its own.
    """
    cause: BaseException | None = error
    while cause is not None and not is_lack_of_memory(cause):
        cause = cause.__cause__
    return cause


def lack_of_memory(error: BaseException, settings: Settings) -> str:
    """What to show for an error of which `is_lack_of_memory` is true.

    Args:
        error: What was raised.
        settings: Of the run.
    """
    host = isinstance(error, MemoryError)
    asked = re.search(r"\d[\d.,]* ?(?:[KMGT]i?B|bytes)\b.*?(?= for|[.:\n]|$)", str(error), re.I)
    remedies = {
        f"a --batch-size below {settings.batch_size}": settings.batch_size > 1,
        f"more --micro-batches than {settings.micro_batches}": not host,
        "--remat": not (host or settings.remat),
        "--optimizer zenflow, which keeps most of Adam's state on the host": settings.optimizer
        == "adamw",
        "--send-gradients during_step": settings.send_gradients != "during_step",
        "a smaller model": True,
    }
    return (
        f"expected memory enough on the {'host' if host else 'device'} for "
        f"{_described(settings)}, got none for {asked[0] if asked else 'what was asked for'}"
        f"{_room()}. Take {_list(remedies)}."
    )


def _described(settings: Settings) -> str:
    what = settings.model or f"a model of width {settings.width} and {settings.layers} layers"
    return (
        f"{what} with batches of {settings.batch_size} x {settings.sequence_length} tokens in "
        f"{settings.micro_batches} micro-batches and {settings.optimizer}"
    )


def _room() -> str:
    there = device_bytes()
    return "" if there is None else f" ({jax.local_devices()[0].device_kind}: {_gib(there)})"


def _list(remedies: Mapping[str, bool]) -> str:
    *others, last = [remedy for remedy, fits in remedies.items() if fits]
    return f"{', '.join(others)} or {last}" if others else last


def _gib(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB"
