"""What the host has to do in a step, and how long a machine takes for it.

The host's updates wait for its memory, so their work is counted in bytes.
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Sequence

import numpy as np

from zenflow_jax._device.state import LeafState, ZenFlowState
from zenflow_jax._exchange.checks import check_host_state
from zenflow_jax._exchange.pinned import most_kept
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.masters import Masters
from zenflow_jax._host.moments import bytes_of_moments, new_moments
from zenflow_jax._host.numpy_kernel import GRADIENTS_PER_PASS
from zenflow_jax._host.state import MAILS_KEPT
from zenflow_jax._plan.rules import longest
from zenflow_jax._plan.scalars import AdamScalars, window_step
from zenflow_jax.planning._memory import bytes_of_master

_FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class HostWork:
    """Bytes of host memory that an engine reads and writes, all of the run's devices together.

    Attributes:
        busiest: Of the largest group's update, and of the mail that comes in meanwhile.
        steps: In how many steps that has to be done.
        mean: In a step, on average.
    """

    busiest: float
    steps: int
    mean: float


def host_work(state: ZenFlowState, *, compact: bool = False) -> HostWork:
    """The work of an engine's host.

    Of each parameter: mail is written by the device and read by the update; an update reads and
    writes masters and moments, and what is uploaded is read again. The state may be one of shapes.
    """
    schedule = state.schedule
    window = longest(schedule.window)
    on_device = state.send_gradients.sums_on_device
    added_up = not on_device and most_kept(state) > MAILS_KEPT
    groups = [0.0] * schedule.groups
    arriving = 0.0
    for part in (part for leaf in state.leaves if leaf.offloaded for part in leaf.spec.ranges):
        size = math.prod(part.shape)
        mail = size * part.mail_dtype.itemsize
        sums = _of_sums(window) * size if added_up else 0.0
        read = mail * (1 if on_device else window)
        moments = bytes_of_moments(part.view4(part.n), compact=compact)
        state_bytes = bytes_of_master(part.dtype) * size + moments
        groups[part.group] += 2 * state_bytes + part.dtype.itemsize * size + read + sums
        arriving += mail / (window if on_device else 1)
    mean = float(sum(groups) / window + arriving)
    # An update that must arrive at once still has a step's time, in which the loop waits.
    steps = window if schedule.staleness is None else max(schedule.staleness, 1)
    return HostWork(max(groups, default=0.0) + arriving * steps, steps, mean)


def _of_sums(window: int) -> float:
    """Bytes of float32 sums for each parameter of a window whose mails are too many to keep."""
    times = max(math.ceil((window - MAILS_KEPT) / GRADIENTS_PER_PASS), 1)
    # Written once, read and written again for each pass of gradients, and read by the update.
    return float(_FLOAT32 * 2 * times)


def host_bandwidth(
    leaves: Sequence[LeafState] = (),
    *,
    threads: int | None = None,
    host_state: str = "float32",
    seconds: float = 2.0,
) -> float:
    """Bytes a second that updates get out of this machine's memory, measured.

    Args:
        leaves: A state's, of whose dtypes and layout the largest is taken.
        threads: As for `HostEngine`.
        host_state: As for `HostEngine`.
        seconds: How long, about; compiling comes in front of it.

    Returns:
        Bytes a second: of state read and written, and of gradients read.

    Raises:
        ValueError: If `threads` or `host_state` is out of range.
    """
    compact = check_host_state(host_state)
    specs = [leaf.spec for leaf in leaves if leaf.offloaded]
    largest = max(specs, key=lambda x: math.prod(x.shape), default=None)
    dtype = np.dtype(np.float32) if largest is None else largest.dtype
    mail = np.dtype(np.float32) if largest is None else largest.mail_dtype
    rows = 4096
    trailing = largest is not None and largest.view4(1)[3] == 1
    shape = (1, rows, rows, 1) if trailing else (1, 1, rows, rows)
    masters = Masters.zeros(shape, dtype)
    mu, nu = new_moments(shape, compact=compact)
    for x in (*masters.arrays, *mu.arrays, *nu.arrays):
        x[...] = 0  # until they are written, pages take no memory
    steps, active = np.zeros((1, rows), np.int32), np.ones((1, rows), bool)
    gradients = [(np.ones(shape, mail), 1.0) for _ in range(GRADIENTS_PER_PASS)]
    step = window_step(AdamScalars(*[0.5] * len(AdamScalars._fields)), 4, None, np)
    state = sum(x.nbytes for x in (*masters.arrays, *mu.arrays, *nu.arrays))
    moved = 2 * state + GRADIENTS_PER_PASS * gradients[0][0].nbytes
    took = []
    with contextlib.closing(HostAdam("numba", threads)) as adam:
        # The first time compiles.
        while len(took) < 2 or sum(took[1:]) < seconds:
            start = time.perf_counter()
            for _ in adam.adamw(masters, mu, nu, steps, gradients, 0.25, active, step):
                pass
            took.append(time.perf_counter() - start)
    return moved / statistics.median(took[1:])
