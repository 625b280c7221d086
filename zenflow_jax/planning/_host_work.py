"""The memory that an engine needs on host and device, and how busy the host is.

States may consist of shapes. Host memory limits the speed of updates, so work is counted in bytes.
"""

import math
from typing import NamedTuple

import numpy as np

from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._exchange.parts import within
from zenflow_jax._exchange.pinned import buffers, most_kept
from zenflow_jax._host.arrays import bytes_of
from zenflow_jax._host.numpy_kernel import GRADIENTS_PER_PASS
from zenflow_jax._host.state import MAILS_KEPT
from zenflow_jax._spec.rules import is_compact

_FLOAT32 = 4


class Needs(NamedTuple):
    """An engine's total memory and traffic in bytes; on a mesh, each device has a share.

    Counts host memory that may be in use at once. Pages take no memory until they are written, and
    moments are first written by the first update.
    """

    state: int  # masters, casts for uploads, moments, counts and channel indices: NumPy
    sums: int  # sums of mail beyond the limit: NumPy
    mail: int  # pinned: kept, unread, in flight, and placeholders
    hand_over: int  # a group's selected channels: pinned on the way in, NumPy on the way out
    saving: int  # copies that `EngineSave` makes by default while writing
    # Device memory while a step runs, besides the step's own. (A merge runs between two steps. It
    # reuses its uploads' memory, but needs a copy of each leaf that is cut into ranges, or whose
    # channels are its last axis.)
    uploads: int  # updates that wait to be merged; limited by `prefetch_bytes`
    late: int  # the largest group's other updates, uploaded at a boundary, not during a step
    under_way: int  # gradients of the previous step, until they are on the host
    # Bytes that the host reads and writes. The device writes mail, and the update reads it; an
    # update also reads and writes masters and moments; an upload reads the new weights.
    busiest: float  # for the largest group's update, and for mail that arrives during the update
    steps: int  # the number of steps that this work may take
    mean: float  # per step, on average
    late_mean: float  # bytes that the loop waits for at boundaries, per step, on average
    to_host: float  # bytes of mail per step
    to_device: float  # bytes of uploads per step, on average


def needs_of(
    state: ZenFlowState, *, host_state: str = "float32", prefetch_bytes: int | None = None
) -> Needs:
    """Returns the memory and traffic of an engine for this state."""
    compact = is_compact(host_state)
    schedule, sending = state.schedule, state.send_gradients
    window, staleness = schedule.longest_window, schedule.staleness
    group_totals = np.zeros((schedule.groups, 8))
    specs = [leaf.spec for leaf in state.leaves if not leaf.spec.resident]
    early = within(specs, prefetch_bytes)
    for leaf, part in ((i, x) for i, spec in enumerate(specs) for x in spec.ranges):
        size, entries = math.prod(part.shape), math.prod(part.stack)
        group_totals[part.group] += (
            size,
            bytes_of(part.on_host.view3(part.n), part.dtype, compact=compact),
            entries * (part.n + part.k) * np.dtype(np.int32).itemsize,
            math.prod(part.selected_shape) * 3 * _FLOAT32,
            size * part.mail_dtype.itemsize,
            size * part.mail_dtype.itemsize * (part.copies if sending.in_step else 1),
            size * part.dtype.itemsize,
            size * part.dtype.itemsize * ((leaf, part.start) not in early),
        )
    size, kept, counts, selected, mail, sent, upload, late = group_totals.T
    read = mail * window
    # Without scaling, an update first sums its gradients, because its only gradient is their mean.
    added_up = most_kept(state) > MAILS_KEPT or not (schedule.window_scaling or window == 1)
    if added_up:
        # Two sums are written once, read and written for each pass over gradients, and read by the
        # update.
        passes = max(math.ceil((window - MAILS_KEPT) / GRADIENTS_PER_PASS), 1)
        read = read + 4 * _FLOAT32 * passes * size
    updates, arriving = 2 * kept + upload + read, mail.sum()
    # Even without staleness, an update has the time of one step, during which the loop waits.
    steps = window if staleness is None else max(staleness, 1)
    # If groups take turns, this many updates wait at once; otherwise, only one does.
    waiting = min(staleness or 1, schedule.groups)

    def most(of_groups: np.ndarray) -> float:
        """Returns the maximum over groups whose updates wait at once."""
        twice = np.tile(of_groups, 2)
        return max(twice[j : j + waiting].sum() for j in range(schedule.groups))

    usual = schedule.window if isinstance(schedule.window, int) else 2
    return Needs(
        state=int(kept.sum() + counts.sum()),
        # Every open window may have two sums, and so may the windows that are being updated.
        sums=int(2 * _FLOAT32 * (size.sum() + most(size))) if added_up else 0,
        mail=round(buffers(state) * sent.sum()),
        hand_over=int(selected.max()),
        saving=int(size.sum()),
        uploads=int(most(upload - late)),
        late=int(late.max()),
        under_way=0 if sending.in_step else int(arriving),
        busiest=float(updates.max() + arriving * steps),
        steps=steps,
        mean=float(updates.sum() / window + arriving),
        late_mean=float(late.sum() / window),
        to_host=float(sent.sum()),
        to_device=float(upload.sum() / usual),
    )
