"""Estimates how much memory an engine may need of host and device.

A state may be one of shapes alone. On a mesh each process, and each device, has its share.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._exchange.checks import check_host_state
from zenflow_jax._exchange.pinned import buffers, most_kept
from zenflow_jax._host.masters import Masters
from zenflow_jax._host.moments import bytes_of_moments
from zenflow_jax._host.state import MAILS_KEPT
from zenflow_jax._plan.leaf import LeafSpec

FLOAT32 = 4


def offloaded_ranges(state: ZenFlowState) -> Iterator[LeafSpec]:
    """The ranges of all leaves whose gradients go to an engine; most leaves are one."""
    return (part for leaf in state.leaves if leaf.offloaded for part in leaf.spec.ranges)


class HostMemory(NamedTuple):
    """Bytes that an engine on one device may have in use at once, by what they are for.

    Pages that nobody has written take no memory yet: moments do from the first update on.
    """

    state: int  # masters, with what is uploaded, moments, counts and numbers of channels: NumPy
    sums: int  # of mails that are too many to keep: NumPy
    mail: int  # pinned: kept, unread, being written, and blank
    hand_over: int  # of the channels selected in a group: pinned where they come, NumPy as they go
    saving: int  # copies that `EngineSave` makes while it writes, unless it is told otherwise


def host_memory(state: ZenFlowState, *, host_state: str = "float32") -> HostMemory:
    """What the engine of this state may need."""
    compact = check_host_state(host_state)
    arrays = mails = parameters = 0
    of_groups = [0] * state.schedule.groups
    for spec in offloaded_ranges(state):
        size, channels = math.prod(spec.shape), math.prod(spec.stack) * spec.n
        selected = math.prod(spec.stack) * spec.k
        parameters += size
        arrays += size * bytes_of_master(spec.dtype)
        arrays += bytes_of_moments(spec.view4(spec.n), compact=compact)
        arrays += (channels + selected) * np.dtype(np.int32).itemsize
        mails += size * spec.mail_dtype.itemsize
        of_groups[spec.group] += math.prod(spec.selected_shape) * 3 * FLOAT32
    on_device = state.send_gradients.sums_on_device
    # A leaf's open window may have one, and the window that is being updated another.
    added_up = not on_device and most_kept(state) > MAILS_KEPT
    return HostMemory(
        state=arrays,
        sums=2 * FLOAT32 * parameters if added_up else 0,
        mail=round(buffers(state) * mails),
        hand_over=max(of_groups),
        saving=parameters,
    )


def bytes_of_master(dtype: np.dtype) -> int:
    """Bytes of the master of one parameter, with what is uploaded."""
    return sum(x.itemsize for x in Masters.zeros((0,), dtype).arrays)


class DeviceMemory(NamedTuple):
    """Bytes on one device that an engine may have in use while a step runs, besides the step's own.

    A merge runs between two steps, in the memory of its uploads, and of a leaf that is cut into
    ranges once more.
    """

    uploads: int  # updates that wait to be merged; `prefetch_bytes` bounds them
    mail: int  # gradients of the step before, or a group's sums, until they are in host memory


def device_memory(state: ZenFlowState) -> DeviceMemory:
    """What the engine of this state may have there."""
    schedule = state.schedule
    updates, mails = [0] * schedule.groups, [0] * schedule.groups
    for spec in offloaded_ranges(state):
        size = math.prod(spec.shape)
        updates[spec.group] += size * spec.dtype.itemsize
        mails[spec.group] += size * spec.mail_dtype.itemsize
    # In turn, the updates of so many groups wait at once; together, one of all.
    waiting = min(schedule.staleness or 1, schedule.groups)
    neighbours = [*updates, *updates]
    under_way = 0
    if not state.send_gradients.in_step:
        under_way = max(mails) if state.send_gradients.sums_on_device else sum(mails)
    return DeviceMemory(
        uploads=max(sum(neighbours[j : j + waiting]) for j in range(schedule.groups)),
        mail=under_way,
    )
