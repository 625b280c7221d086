"""An engine's needs on host and device, and how well its host work is hidden.

States may consist of shapes. Host memory limits the speed of updates, so work is counted in bytes.
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from zenflow_jax._device.memory import read
from zenflow_jax._device.state import LeafState, LeafStates, ZenFlowState, find_state
from zenflow_jax._diagnostics.stats import EngineStats
from zenflow_jax._exchange.checks import is_compact
from zenflow_jax._exchange.parts import within
from zenflow_jax._exchange.pinned import buffers, most_kept
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.masters import Masters
from zenflow_jax._host.moments import bytes_of_moments, new_moments
from zenflow_jax._host.numpy_kernel import GRADIENTS_PER_PASS
from zenflow_jax._host.state import MAILS_KEPT
from zenflow_jax._spec.groups import in_groups
from zenflow_jax._spec.scalars import AdamScalars, window_step

#: The window lengths that are compared, in steps.
INTERVALS = (1, 2, 4, 8, 16)
#: The share of the available time that host work may take; a fifth stays in reserve.
BUSY = 0.8
_FLOAT32 = 4


class Needs(NamedTuple):
    """Bytes in total; on a mesh, each process and each device has its share.

    Counts host memory that may be in use at once. Pages take no memory until they are written, and
    moments are first written by the first update.
    """

    state: int  # masters, casts for uploads, moments, counts and channel indices: NumPy
    sums: int  # sums of mail beyond the limit: NumPy
    mail: int  # pinned: kept, unread, in flight, and placeholders
    hand_over: int  # a group's selected channels: pinned on the way in, NumPy on the way out
    saving: int  # copies that `EngineSave` makes by default while writing
    # Device memory while a step runs, besides the step's own. (A merge runs between two steps. It
    # reuses its uploads' memory, but needs a copy of each leaf that is cut into ranges.)
    uploads: int  # updates that wait to be merged; limited by `prefetch_bytes`
    late: int  # the largest group's other updates, uploaded at a boundary, not during a step
    under_way: int  # gradients of the previous step, or a group's sums, until they are on the host
    # Bytes that the host reads and writes. The device writes mail, and the update reads it; an
    # update also reads and writes masters and moments; an upload reads the new weights.
    busiest: float  # for the largest group's update, and for mail that arrives during the update
    steps: int  # the number of steps that this work may take
    mean: float  # per step, on average
    late_mean: float  # bytes that boundaries wait for, per step, on average


def needs_of(
    state: ZenFlowState, *, host_state: str = "float32", prefetch_bytes: int | None = None
) -> Needs:
    """Returns the needs of an engine for this state."""
    compact = is_compact(host_state)
    schedule, sending = state.schedule, state.send_gradients
    window, staleness = schedule.longest_window, schedule.staleness
    of_groups = np.zeros((schedule.groups, 8))
    specs = [leaf.spec for leaf in state.leaves if not leaf.spec.resident]
    early = within(specs, prefetch_bytes)
    for leaf, part in ((i, x) for i, spec in enumerate(specs) for x in spec.ranges):
        size, entries = math.prod(part.shape), math.prod(part.stack)
        masters = sum(x.itemsize for x in Masters.zeros((0,), part.dtype).arrays)
        of_groups[part.group] += (
            size,
            size * masters + bytes_of_moments(part.view4(part.n), compact=compact),
            entries * (part.n + part.k) * np.dtype(np.int32).itemsize,
            math.prod(part.selected_shape) * 3 * _FLOAT32,
            size * part.mail_dtype.itemsize,
            size * part.mail_dtype.itemsize * (part.copies if sending.in_step else 1),
            size * part.dtype.itemsize,
            size * part.dtype.itemsize * ((leaf, part.start) not in early),
        )
    size, kept, counts, selected, mail, sent, upload, late = of_groups.T
    on_device = sending.sums_on_device
    added_up = not on_device and most_kept(state) > MAILS_KEPT
    read = mail * (1 if on_device else window)
    if added_up:
        # Written once, read and written for each pass of gradients, and read by the update.
        passes = max(math.ceil((window - MAILS_KEPT) / GRADIENTS_PER_PASS), 1)
        read = read + 2 * _FLOAT32 * passes * size
    updates = 2 * kept + upload + read
    arriving = mail.sum() / (window if on_device else 1)
    # Even an update without staleness has the time of one step, while the loop waits.
    steps = window if staleness is None else max(staleness, 1)
    # If groups take turns, this many updates wait at once; otherwise, only one does.
    waiting = min(staleness or 1, schedule.groups)
    neighbours = np.tile(upload - late, 2)
    under_way = mail.max() if on_device else mail.sum()
    return Needs(
        state=int(kept.sum() + counts.sum()),
        # A leaf's open window may have a sum, and so may the window that is being updated.
        sums=int(2 * _FLOAT32 * size.sum()) if added_up else 0,
        mail=round(buffers(state) * sent.sum()),
        hand_over=int(selected.max()),
        saving=int(size.sum()),
        uploads=int(max(neighbours[j : j + waiting].sum() for j in range(schedule.groups))),
        late=int(late.max()),
        under_way=0 if sending.in_step else int(under_way),
        busiest=float(updates.max() + arriving * steps),
        steps=steps,
        mean=float(updates.sum() / window + arriving),
        late_mean=float(late.sum() / window),
    )


def with_interval(state: ZenFlowState, interval: int) -> ZenFlowState:
    """Returns the same run's state (arrays or shapes) with another window length.

    Select intervals are the defaults. Leaves take turns if the state has several groups.
    """
    schedule = state.schedule
    in_turn, staleness = schedule.groups > 1 or schedule.window == 1, schedule.staleness
    if staleness is None or (staleness == schedule.window and not in_turn):
        staleness = interval  # an update may take until the next window ends
    schedule = dataclasses.replace(
        schedule,
        window=interval,
        select=16 * interval,
        groups=interval if in_turn else 1,
        staleness=min(staleness, interval),
    )
    whole = [dataclasses.replace(leaf.spec, groups=(0,)) for leaf in state.leaves]
    specs, schedule = in_groups(whole, schedule)
    leaves = map(lambda leaf, spec: leaf.replace(spec=spec), state.leaves, specs)
    static = dataclasses.replace(state.leaves.static, schedule=schedule)
    return state._replace(leaves=LeafStates(tuple(leaves), static))


@dataclasses.dataclass(frozen=True)
class Hiding:
    """How well the host work is hidden, in a plan or in a run.

    Attributes:
        interval: Steps per window; None if windows adapt.
        busy: The share of the available time that the host needs, in the worst case.
        of_intervals: `busy` for other window lengths; empty if windows adapt.
    """

    interval: int | None
    busy: float
    of_intervals: Mapping[int, float]

    @property
    def smallest_interval(self) -> int | None:
        """Returns the shortest window, in steps, that hides the work with a fifth in reserve."""
        hidden = [s for s, busy in self.of_intervals.items() if busy <= BUSY]
        return min(hidden, default=None)

    @property
    def advice(self) -> str:
        """Describes how busy the host is, and which longer windows would suffice."""
        smallest = self.smallest_interval
        text = (
            f"The host needs {self.busy:.0%} of the available time with "
            f"update_interval={self.interval}"
        )
        if smallest is None:
            return (
                f"{text}, and more than {BUSY:.0%} with any other interval up to {INTERVALS[-1]}. "
                "Use a larger batch, more threads or faster memory."
            )
        if self.interval is None or smallest <= self.interval:
            return f"{text}."
        waits = ", so steps wait for it" if self.busy > 1 else ""
        return f"{text}{waits}: update_interval={smallest} needs at most {BUSY:.0%}."


def hiding_of(state: ZenFlowState, rate: float, step_s: float, *, host_state: str) -> Hiding:
    """Returns how well steps of `step_s` seconds hide an engine's work.

    Updates read and write `rate` bytes of host memory per second.
    """

    def busy(of: ZenFlowState) -> float:
        work = needs_of(of, host_state=host_state)
        # Without offloaded leaves, there is neither work nor a rate.
        return work.busiest / rate / (work.steps * step_s) if work.busiest else 0.0

    window = state.schedule.window
    interval = window if isinstance(window, int) else None
    of_intervals = {} if interval is None else {s: busy(with_interval(state, s)) for s in INTERVALS}
    return Hiding(interval, busy(state), of_intervals)


def hiding(
    opt_state: Any, stats: EngineStats, seconds: float, *, host_state: str = "float32"
) -> Hiding | None:
    """Returns how busy the host was in a run, and which windows would have hidden its work.

    The work for other windows is the measured work, scaled by the bytes that these windows move.

    Args:
        opt_state: The run's last state.
        stats: `engine.stats` after the run.
        seconds: Total time of all steps in `stats`.
        host_state: As for `HostEngine`.

    Returns:
        None before the second window, if windows adapt, or if every step waits for its update.

    Raises:
        ValueError: If there is not exactly one `ZenFlowState`, or `host_state` is unknown.

    Examples:
        >>> import jax.numpy as jnp, zenflow_jax
        >>> opt_state = zenflow_jax.zenflow(1e-3).init({"w": jnp.ones((8, 4))})
        >>> stats = zenflow_jax.EngineStats(steps=100, work_s=2.0)
        >>> hiding(opt_state, stats, seconds=10.0).interval
        4
    """
    is_compact(host_state)
    state = find_state(opt_state)
    window = state.schedule.window
    if not isinstance(window, int) or state.schedule.staleness == 0 or stats.steps < 2 * window:
        return None
    # The device's own time, because it did not compute while the loop waited.
    step_s = max(seconds - stats.wait_s, 1e-9) / stats.steps
    before = int(read(state.step)) - stats.steps
    # During the warm-up, each step updated all channels.
    warm = min(max(state.schedule.full_warm_up_rounds - before, 0), stats.steps)
    moved = sum(
        steps * needs_of(of, host_state=host_state).mean
        for of, steps in ((with_interval(state, 1), warm), (state, stats.steps - warm))
    )
    return hiding_of(state, moved / max(stats.work_s, 1e-9), step_s, host_state=host_state)


def host_bandwidth(
    leaves: Sequence[LeafState] = (),
    *,
    threads: int | None = None,
    host_state: str = "float32",
    seconds: float = 2.0,
) -> float:
    """Measures the bytes per second that updates get from this machine's memory.

    Args:
        leaves: A state's leaves; the measurement uses the largest leaf's dtypes and shape.
        threads: As for `HostEngine`.
        host_state: As for `HostEngine`.
        seconds: Approximate measuring time, without compilation.

    Returns:
        Bytes per second of state read and written, and of gradients read.

    Raises:
        ValueError: If `threads` or `host_state` is out of range.

    Examples:
        >>> host_bandwidth(seconds=0.0) > 0
        True
    """
    compact = is_compact(host_state)
    dtype, mail, rows = np.dtype(np.float32), np.dtype(np.float32), 4096
    shape = (1, 1, rows, rows)
    if specs := [leaf.spec for leaf in leaves if not leaf.spec.resident]:
        largest = max(specs, key=lambda x: math.prod(x.shape))
        dtype, mail = largest.dtype, largest.mail_dtype
        if largest.view4(1)[3] == 1:
            shape = (1, rows, rows, 1)
    masters = Masters.zeros(shape, dtype)
    mu, nu = new_moments(shape, compact=compact)
    arrays = (*masters.arrays, *mu.arrays, *nu.arrays)
    for x in arrays:
        x[...] = 0  # pages take no memory until they are written
    steps, active = np.zeros((1, rows), np.int32), np.ones((1, rows), bool)
    gradients = [(np.ones(shape, mail), 1.0) for _ in range(GRADIENTS_PER_PASS)]
    step = window_step(AdamScalars(*[0.5] * len(AdamScalars._fields)), 4, None)
    moved = 2 * sum(x.nbytes for x in arrays) + sum(g.nbytes for g, _ in gradients)
    took = []
    with contextlib.closing(HostAdam("numba", threads)) as adam:
        # The first call compiles.
        while len(took) < 2 or sum(took[1:]) < seconds:
            start = time.perf_counter()
            for _ in adam.adamw(masters, mu, nu, steps, gradients, 0.25, active, step):
                pass
            took.append(time.perf_counter() - start)
    return moved / statistics.median(took[1:])
