"""Memory that does not suffice: refused before anything is allocated, or said in one message."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

import jax

from train.settings import Settings, SettingsError


def check_batch(settings: Settings, *, examples: int | None, vocabulary: int, parts: int) -> None:
    """Refuses a batch that cannot be, by its sizes alone.

    Args:
        settings: Of the run.
        examples: In the training data; None if there is no training.
        vocabulary: For each token of a batch a language model computes so many float32 logits; 0
            for a model that does not.
        parts: Among so many devices a batch is divided.

    Raises:
        SettingsError: If there are fewer examples than the batch takes, or if what is computed of a
            micro-batch is more than the memory of the device.
    """
    if examples is not None and settings.batch_size > examples:
        raise SettingsError(
            f"`batch_size`: expected at most {examples}, which is all the training data, got "
            f"{settings.batch_size}: some examples would be in every batch several times. Pass a "
            "smaller --batch-size, or more data."
        )
    tokens = settings.batch_size * settings.sequence_length / (settings.micro_batches * parts)
    needed, there = 4 * vocabulary * tokens, device_bytes()
    if there is not None and needed > there:
        raise SettingsError(
            f"`batch_size`: expected a micro-batch whose logits have room in the device's "
            f"{_gib(there)}, got {settings.batch_size} sequences of {settings.sequence_length} in "
            f"{settings.micro_batches} micro-batches, whose logits alone take {_gib(needed)} on "
            "each device. Pass a smaller --batch-size, or more --micro-batches."
        )


def check_model(settings: Settings, weights: Any, *, devices: int) -> None:
    """Refuses a model that cannot be trained here, by the sizes of its leaves alone.

    By the least that is needed however it is laid out. One that needs more than that fails later.

    Args:
        settings: Of the run.
        weights: A tree of arrays, or of anything with a shape and a dtype.
        devices: Among which it may be divided.

    Raises:
        SettingsError: If weights and gradients, or with adamw its moments too, are more than the
            memory of the devices, or the state on the host is more than the machine's.
    """
    leaves = jax.tree.leaves(weights)
    parameters = sum(math.prod(x.shape) for x in leaves)
    once = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
    adamw = settings.optimizer == "adamw"
    device = 2 * once + (8 * parameters if adamw else 0)
    # Master and moments of what is not selected; of several processes each has a part of them.
    ratio = settings.topk_ratio if settings.optimizer == "zenflow" else 0.0
    host = 0 if adamw else 12 * (1 - min(max(ratio, 0.0), 1.0)) * parameters / jax.process_count()
    if settings.steps == 0:  # a validation alone
        device, host = once, 0.0
    if jax.local_devices()[0].platform == "cpu":
        host += device / jax.process_count()
    here = f"a model of {parameters:,} parameters with {settings.optimizer}"
    there = device_bytes()
    if there is not None and device / devices > there:
        others = "" if not adamw else ", --optimizer zenflow, which keeps most of that on the host,"
        raise SettingsError(
            f"`model`: expected one that has room in {_gib(there)} on each of {devices} device(s), "
            f"got {here}, which takes {_gib(device)} without anything else. Take a smaller one"
            f"{others} or more devices (--mesh)."
        )
    if host > host_bytes():
        raise SettingsError(
            f"`model`: expected one whose state has room in the host's {_gib(host_bytes())}, got "
            f"{here}, which takes {_gib(host)} there without anything else. Take a smaller one, or "
            "more machines (docs/multi_host.md)."
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
