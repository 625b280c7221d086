"""The pinned host memory that a run needs for mail and hand-overs.

`pin_memory_for_mail` pins the mail's memory before the first step.
"""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zenflow_jax._device.memory import copy_to_host, upload
from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._exchange.parts import OffloadedLeaves, Part
from zenflow_jax._host.state import MAILS_KEPT
from zenflow_jax._spec.checks import SendGradients, UnfitRunError
from zenflow_jax._spec.leaf import LeafSpec

#: The maximum number of steps with unread mail: how far Python runs ahead of the device.
IN_FLIGHT = {SendGradients.DURING_STEP: 2, SendGradients.AFTER_STEP: 1}

#: The environment variable with the limit of a GPU's pinned memory in GiB, and XLA's default.
LIMIT_NAME, DEFAULT_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64

#: Platforms on which jax has a separate, limited pool of pinned memory for each device
#: (`GetStreamExecutorGpuDeviceAllocator` in XLA's source).
_GPUS = ("gpu", "cuda", "rocm")


def buffers(state: ZenFlowState) -> float:
    """Returns the maximum number of steps with mail in host memory at once, a fraction included."""
    specs, shares = _offloaded(state)
    written, placeholders = int(state.send_gradients.in_step), 0.0
    if written:  # the state's placeholder mail has full size
        shapes = {(spec.shape, spec.mail_dtype): x for spec, x in zip(specs, shares, strict=True)}
        placeholders = sum(shapes.values())
    unread = IN_FLIGHT[state.send_gradients]
    # An update that must arrive at the next step keeps Python from running ahead: one mail is in
    # flight or is being written.
    if state.schedule.groups > 1 and state.schedule.staleness in (0, 1):
        unread = 0 if written else 1
    kept = most_kept(state)
    most = min(MAILS_KEPT, kept) + unread + written
    if state.schedule.groups == 1:
        most = min(most, kept)  # includes unread mail and mail being written
    return float(most + placeholders)


def most_kept(state: ZenFlowState) -> float:
    """Returns the maximum number of steps whose mail a host would keep if it did not sum any."""
    specs, shares = _offloaded(state)
    window, staleness = state.schedule.window, state.schedule.staleness
    if state.schedule.groups == 1:
        # One window's mail, and the mail of the steps until its update has arrived.
        return float(window + (window if staleness is None else staleness))
    ages = range(1, window + 1)
    # The last range of a leaf frees the leaf's mail.
    opened = max(
        sum(
            max(ages[(turn + group) % window] for group in spec.groups) * share
            for spec, share in zip(specs, shares, strict=True)
        )
        for turn in ages
    )
    held = [0.0] * state.schedule.groups
    for spec, share in zip(specs, shares, strict=True):
        for group in spec.groups:
            held[group] += share
    # The leaves that wait for their updates. The group whose window closed last does not count.
    waiting = sum(sorted(held)[::-1][: (staleness or 1) - 1], 0.0)
    return opened + window * waiting


def _offloaded(state: ZenFlowState) -> tuple[list[LeafSpec], list[float]]:
    """Returns the offloaded leaves, and each leaf's share of a mail's bytes."""
    specs = [leaf.spec for leaf in state.leaves if not leaf.spec.resident]
    sizes = [math.prod(spec.shape) * spec.mail_dtype.itemsize for spec in specs]
    return specs, [size / sum(sizes) for size in sizes]


def check_pinned_memory(state: ZenFlowState, offloaded: OffloadedLeaves) -> None:
    """Rejects a run that needs more pinned memory than jax has for one of the run's devices."""
    mail, selected = Counter[Any](), Counter[Any]()
    for part in offloaded.parts:
        for device in _senders(state, part):
            mail[device] += math.prod(part.spec.shape) * part.spec.mail_dtype.itemsize
        # Float32 masters and moments.
        selected[part.devices[0]] += 3 * 4 * math.prod(part.spec.selected_shape)
    for device in {device for part in offloaded.parts for device in part.devices}:
        held = mail[device] * buffers(state)
        check_pinned({"mail": held, "hand-overs": selected[device]}, device.platform)


def check_pinned(needs: Mapping[str, int | float], platform: str) -> None:
    """Rejects `needs` (bytes by name) if they exceed one GPU's limit of pinned memory."""
    if platform not in _GPUS:
        return
    limit = int(os.environ.get(LIMIT_NAME) or DEFAULT_LIMIT)
    needed = sum(needs.values()) / 2**30
    if needed > limit:
        each = " and ".join(f"{x / 2**30:.1f} for {name}" for name, x in needs.items())
        raise UnfitRunError(
            f"One GPU's pinned host memory is too small: the limit is {limit} GiB, but the run "
            f"needs {needed:.1f} ({each}). Set the environment variable "
            f"{LIMIT_NAME}={limit_for(sum(needs.values()))} before jax starts."
        )


def limit_for(nbytes: float) -> int:
    """Returns the limit in GiB for this need of pinned memory."""
    # jax's pool grows by ever larger regions, and never returns them.
    return max(DEFAULT_LIMIT, math.ceil(1.25 * nbytes / 2**30))


def pin_memory_for_mail(state: ZenFlowState, offloaded: OffloadedLeaves) -> None:
    """Allocates the pinned memory that mail will need, and returns it to jax's pool.

    A driver pins memory when the pool first needs it: slowly, and possibly after waiting for all
    devices. This must not happen during the first steps' collectives. The state already contains
    placeholder mail.
    """
    # Rounds down, so that the total stays within the limit that `check_pinned_memory` checks.
    more, taken = int(buffers(state)) - state.send_gradients.in_step, []
    for part in offloaded.parts:
        for device in _senders(state, part):
            if device.platform in _GPUS:
                zeros = upload(np.zeros(part.spec.shape, part.spec.mail_dtype), device)
                # The device holds one leaf at a time.
                taken.append(jax.block_until_ready(copy_to_host([zeros] * more)))


def _senders(state: ZenFlowState, part: Part) -> Sequence[Any]:
    """Returns the devices that send a part: all holders within a step, the first afterwards."""
    return part.devices if state.send_gradients.in_step else part.devices[:1]
