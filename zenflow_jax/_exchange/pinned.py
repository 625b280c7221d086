"""How much pinned host memory a run needs: mail, and what hand-overs take from the device.

And what has it pinned before the first step.
"""

import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zenflow_jax._device.memory import copy_to_host, upload
from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._exchange.parts import OffloadedLeaves, Part
from zenflow_jax._host.state import MAILS_KEPT
from zenflow_jax._spec.leaf import LeafSpec
from zenflow_jax._spec.rules import SendGradients, UnfitRunError
from zenflow_jax._spec.schedule import Schedule

#: The most mails that may be unread, which lets Python run ahead of the device. With "per_window"
#: `Mailbox.send` has another limit.
IN_FLIGHT = {SendGradients.DURING_STEP: 2, SendGradients.AFTER_STEP: 1}

#: Platforms on which jax has a pool of pinned memory for each device, with a limit of its own
#: (`GetStreamExecutorGpuDeviceAllocator` in XLA's source).
_GPUS = ("gpu", "cuda", "rocm")


def buffers(state: ZenFlowState) -> float:
    """The most mails that exist in host memory; those of some leaves count as a part of one."""
    specs, shares = _offloaded(state)
    if state.send_gradients.sums_on_device:
        of_groups = [0.0] * state.schedule.groups
        for spec, share in zip(specs, shares, strict=True):
            for part in spec.ranges:
                of_groups[part.group] += share * part.shape[0] / spec.shape[0]
        # The sums of windows that are updated, and of those that close next.
        return min(2.0, _waiting(state.schedule, of_groups) + 2 * max(of_groups))
    written, blank = int(state.send_gradients.in_step), 0.0
    hosted = any(spec.hosted for spec in specs)
    if written and not hosted:  # blank mail in the state has a size
        shapes = {(spec.shape, spec.mail_dtype): x for spec, x in zip(specs, shares, strict=True)}
        blank = sum(shapes.values())
    unread = IN_FLIGHT[state.send_gradients]
    # An update that must arrive at the next step keeps Python from running ahead: one mail is on
    # its way, or is being written.
    if hosted or (state.schedule.groups > 1 and state.schedule.staleness in (0, 1)):
        unread = 0 if written else 1
    kept = most_kept(state)
    most = min(MAILS_KEPT, kept) + unread + written
    if state.schedule.groups == 1:
        most = min(most, kept)  # has those that are unread or being written
    return float(most + blank)


def most_kept(state: ZenFlowState) -> float:
    """The most mails that would be kept if none were added up, unless the device does that."""
    specs, shares = _offloaded(state)
    window, staleness = state.schedule.longest_window, state.schedule.staleness
    if state.schedule.groups == 1:
        # A window's, and those of the steps until its update has arrived.
        return float(window + (window if staleness is None else staleness))
    ages = range(1, window + 1)
    # Mail of a leaf in ranges is there until the last of them has used it.
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
    return opened + window * _waiting(state.schedule, held)


def weight_bytes(state: ZenFlowState) -> int:
    """Bytes of parameters in host memory, next to all devices together.

    Those in use, and what an update makes beside mail.

    It frees a leaf's mail before it makes the new parameter; not of a leaf in ranges, which others
    need.
    """
    in_use, made = 0, [0] * state.schedule.groups
    for spec in (leaf.spec for leaf in state.leaves if leaf.spec.hosted):
        size, in_ranges = math.prod(spec.shape) * spec.copies, len(spec.groups) > 1
        in_use += size * spec.dtype.itemsize
        # Ranges are put together in NumPy first.
        more = spec.dtype.itemsize * (1 + in_ranges) - spec.mail_dtype.itemsize * (not in_ranges)
        for group in spec.groups:
            made[group] += size * max(more, 0)
    return in_use + max(made)


def _offloaded(state: ZenFlowState) -> tuple[list[LeafSpec], list[float]]:
    """The offloaded leaves, and the share of each in the bytes of one mail."""
    specs = [leaf.spec for leaf in state.leaves if not leaf.spec.resident]
    sizes = [math.prod(spec.shape) * spec.mail_dtype.itemsize for spec in specs]
    return specs, [size / sum(sizes) for size in sizes]


def _waiting(schedule: Schedule, of_groups: Sequence[float]) -> float:
    """The most of the leaves whose window has closed, and whose update is not made yet.

    Beside those whose window is the last to have closed.
    """
    whole = schedule.window if isinstance(schedule.window, int) else 1
    staleness = whole if schedule.staleness is None else schedule.staleness
    return sum(sorted(of_groups)[::-1][: max(staleness - 1, 0)], 0.0)


def check_pinned_memory(state: ZenFlowState, offloaded: OffloadedLeaves) -> None:
    """Refuses a run that needs more pinned memory than jax has next to one of its devices."""
    mail, selected = Counter[Any](), Counter[Any]()
    for part in offloaded.parts:
        for device in _senders(state, part):
            mail[device] += math.prod(part.spec.shape) * part.spec.mail_dtype.itemsize
        # Float32 masters and moments.
        selected[part.devices[0]] += 3 * 4 * math.prod(part.spec.selected_shape)
    limit = os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
    places = (leaf.spec.placement for leaf in state.leaves if not leaf.spec.resident)
    everywhere = max((place.mesh.size for place in places if place is not None), default=1)
    weights = weight_bytes(state) // everywhere
    for device in {device for part in offloaded.parts for device in part.devices}:
        check_pinned(
            mail[device], buffers(state), selected[device], device.platform, limit, weights
        )


def check_pinned(
    mail_bytes: int,
    mails: float,
    selected_bytes: int,
    platform: str,
    limit_gib: str | None,
    weight_bytes: int = 0,
) -> None:
    """Refuses `mails`, a hand-over of selected channels and weights beyond one GPU's limit."""
    if platform not in _GPUS:
        return
    try:
        # XLA's own default, which it also takes for a number that is not whole.
        limit = int(limit_gib) if limit_gib else 64
    except ValueError:
        raise UnfitRunError(
            "expected a whole number of GiB in XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, got "
            f"{limit_gib!r}. Correct the environment variable, or unset it for 64."
        ) from None
    needed = (mail_bytes * mails + selected_bytes + weight_bytes) / 2**30
    if needed > limit:
        raise UnfitRunError(
            f"expected room for {mails:.3g} mails of {mail_bytes / 2**30:.1f} GiB, a hand-over of "
            f"{selected_bytes / 2**30:.1f} GiB and weights of {weight_bytes / 2**30:.1f} GiB in "
            f"the pinned host memory of one GPU, got a limit of {limit} GiB. Set the environment "
            # jax's pool grows by regions, each larger than the last, and gives none back.
            f"variable XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB={math.ceil(1.25 * needed)} before jax "
            "starts: the need and a quarter, as what is free lies in several regions."
        )


def pin_memory_for_mail(state: ZenFlowState, offloaded: OffloadedLeaves) -> None:
    """Takes what mail will have of pinned memory, and gives it back to jax's pool.

    A driver pins memory when the pool first needs it: slowly, and it may wait for all devices. It
    must not do that in the first steps, beside their collectives. The state has one mail already,
    which is blank.
    """
    in_state = state.send_gradients.in_step and not any(x.spec.hosted for x in state.leaves)
    # Whole mails, so that what is taken is within a limit that `check_pinned_memory` has passed.
    more, taken = int(buffers(state)) - in_state, []
    for part in offloaded.parts:
        for device in _senders(state, part):
            if device.platform in _GPUS:
                zeros = upload(np.zeros(part.spec.shape, part.spec.mail_dtype), device)
                # One leaf at a time is on the device.
                taken.append(jax.block_until_ready(copy_to_host([zeros] * more)))


def _senders(state: ZenFlowState, part: Part) -> Sequence[Any]:
    """The devices that send a part: in the step all that hold it, afterwards the first alone."""
    return part.devices if state.send_gradients.in_step else part.devices[:1]
