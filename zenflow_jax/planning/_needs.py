"""What an engine needs of host and device, from its state, which may be one of shapes alone."""

import math
from typing import NamedTuple

import numpy as np

from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._exchange.checks import check_host_state
from zenflow_jax._exchange.pinned import buffers, most_kept
from zenflow_jax._host.masters import Masters
from zenflow_jax._host.moments import bytes_of_moments
from zenflow_jax._host.numpy_kernel import GRADIENTS_PER_PASS
from zenflow_jax._host.state import MAILS_KEPT

_FLOAT32 = 4


class Needs(NamedTuple):
    """Bytes; on a mesh each process, and each device, has its share.

    Of the host's memory that may be in use at once, by what it is for. Pages that nobody has
    written take no memory yet: moments do from the first update on.
    """

    state: int  # masters, with what is uploaded, moments, counts and numbers of channels: NumPy
    sums: int  # of mails that are too many to keep: NumPy
    mail: int  # pinned: kept, unread, being written, and blank
    hand_over: int  # of the channels selected in a group: pinned where they come, NumPy as they go
    saving: int  # copies that `EngineSave` makes while it writes, unless it is told otherwise
    # Of the device while a step runs, besides the step's own. (A merge runs between two steps, in
    # the memory of its uploads, and of a leaf that is cut into ranges once more.)
    uploads: int  # updates that wait to be merged; `prefetch_bytes` bounds them
    under_way: int  # gradients of the step before, or a group's sums, until they are on the host
    # That the host reads and writes. Mail is written by the device and read by the update; an
    # update reads and writes masters and moments, and what is uploaded is read again.
    busiest: float  # for the largest group's update, and the mail that comes in meanwhile
    steps: int  # in how many steps that has to be done
    mean: float  # in a step, on average


def needs_of(state: ZenFlowState, *, host_state: str = "float32") -> Needs:
    """The needs of the engine of this state."""
    compact = check_host_state(host_state)
    schedule, sending = state.schedule, state.send_gradients
    window, staleness = schedule.longest_window, schedule.staleness
    of_groups = np.zeros((schedule.groups, 6))
    for part in (x for leaf in state.leaves if leaf.offloaded for x in leaf.spec.ranges):
        size, entries = math.prod(part.shape), math.prod(part.stack)
        masters = sum(x.itemsize for x in Masters.zeros((0,), part.dtype).arrays)
        of_groups[part.group] += (
            size,
            size * masters + bytes_of_moments(part.view4(part.n), compact=compact),
            entries * (part.n + part.k) * np.dtype(np.int32).itemsize,
            math.prod(part.selected_shape) * 3 * _FLOAT32,
            size * part.mail_dtype.itemsize,
            size * part.dtype.itemsize,
        )
    size, kept, counts, selected, mail, upload = of_groups.T
    on_device = sending.sums_on_device
    added_up = not on_device and most_kept(state) > MAILS_KEPT
    read = mail * (1 if on_device else window)
    if added_up:
        # Written once, read and written again for each pass of gradients, and read by the update.
        passes = max(math.ceil((window - MAILS_KEPT) / GRADIENTS_PER_PASS), 1)
        read = read + 2 * _FLOAT32 * passes * size
    updates = 2 * kept + upload + read
    arriving = mail.sum() / (window if on_device else 1)
    # An update that must arrive at once still has a step's time, in which the loop waits.
    steps = window if staleness is None else max(staleness, 1)
    # In turn, the updates of so many groups wait at once; together, one of all.
    waiting = min(staleness or 1, schedule.groups)
    neighbours = np.tile(upload, 2)
    under_way = mail.max() if on_device else mail.sum()
    return Needs(
        state=int(kept.sum() + counts.sum()),
        # A leaf's open window may have one, and the window that is being updated another.
        sums=int(2 * _FLOAT32 * size.sum()) if added_up else 0,
        mail=round(buffers(state) * mail.sum()),
        hand_over=int(selected.max()),
        saving=int(size.sum()),
        uploads=int(max(neighbours[j : j + waiting].sum() for j in range(schedule.groups))),
        under_way=0 if sending.in_step else int(under_way),
        busiest=float(updates.max() + arriving * steps),
        steps=steps,
        mean=float(updates.sum() / window + arriving),
    )
