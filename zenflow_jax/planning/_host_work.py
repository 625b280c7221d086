"""The memory that an engine needs on host and device, and its traffic.

States may consist of shapes. Host memory limits the speed of updates, so work is counted in bytes.
"""

import math
from typing import Any

import numpy as np

from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._exchange.pinned import buffers, most_kept
from zenflow_jax._host.arrays import bytes_of
from zenflow_jax._host.numpy_kernel import GRADIENTS_PER_PASS
from zenflow_jax._host.state import MAILS_KEPT
from zenflow_jax._spec.checks import is_compact

_FLOAT32 = 4


def needs_of(
    state: ZenFlowState,
    *,
    devices: int = 1,
    host_state: str = "float32",
) -> dict[str, Any]:
    """Returns an engine's memory, and its traffic per step, as the fields of a `Plan`.

    Counts memory that may be in use at once. A merge, between steps, reuses its uploads' memory,
    but needs a copy of each leaf that is cut into ranges, or whose channels are its last axis.
    """
    compact = is_compact(host_state)
    schedule, sending = state.schedule, state.send_gradients
    window, groups = schedule.window, schedule.groups
    totals = np.zeros((groups, 7))
    specs = [leaf.spec for leaf in state.leaves if not leaf.spec.resident]
    for part in (x for spec in specs for x in spec.ranges):
        size, entries, mail = math.prod(part.shape), math.prod(part.stack), part.mail_dtype.itemsize
        totals[part.group] += (
            size,
            bytes_of(part.on_host.view3(part.n), part.dtype, compact=compact),
            entries * (part.n + part.k) * np.dtype(np.int32).itemsize,
            math.prod(part.selected_shape) * 3 * _FLOAT32,
            size * mail,
            size * mail * (part.copies if sending.in_step else 1),
            size * part.dtype.itemsize,
        )
    size, kept, counts, selected, mail, sent, upload = totals.T
    read = mail * window
    # Without scaling, an update first sums its gradients, because its only gradient is their mean.
    added_up = most_kept(state) > MAILS_KEPT or not (schedule.window_scaling or window == 1)
    if added_up:
        # Two sums are written once, read and written for each pass over gradients, and read by the
        # update.
        passes = max(math.ceil((window - MAILS_KEPT) / GRADIENTS_PER_PASS), 1)
        read = read + 4 * _FLOAT32 * passes * size

    def most(of_groups: np.ndarray) -> float:
        """Returns the maximum over groups whose updates wait at once, if they take turns."""
        waiting, twice = min(schedule.staleness or 1, groups), np.tile(of_groups, 2)
        return max(twice[j : j + waiting].sum() for j in range(groups))

    usual = 2 if schedule.auto_window else schedule.window
    device = {
        "mail under way": 0 if sending.in_step else mail.sum(),
        "uploads": most(upload),  # that wait to be merged
    }
    return {
        "host": {
            "masters, moments": int(kept.sum() + counts.sum()),
            # Every open window may have two sums, and so may the windows that are being updated.
            "sums": int(2 * _FLOAT32 * (size.sum() + most(size))) if added_up else 0,
            "mail, pinned": round(buffers(state) * sent.sum()),
            # One group's selected channels, on the way in and out.
            "hand-over, pinned": int(selected.max()),
            "hand-over": int(selected.max()),
            "a save": int(size.sum()),  # the copies that `EngineSave` makes by default
        },
        "device": {name: int(x) // devices for name, x in device.items()},
        "to_host": int(sent.sum() / devices),
        "to_device": int(upload.sum() / usual / devices),
        # The device writes mail, and the update reads it; an update also reads and writes masters
        # and moments; an upload reads the new weights.
        "host_work": float((2 * kept + upload + read).sum() / window + mail.sum()),
        "waits": schedule.staleness == 0,
    }
