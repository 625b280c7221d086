"""What an engine counts, and how that is saved: as small arrays, the same in every process."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zenflow_jax._exchange.messages import NONE
from zenflow_jax._plan.rules import longest
from zenflow_jax._plan.scalars import AdamScalars
from zenflow_jax._plan.schedule import Schedule, ScheduleState, first_schedule_state


@dataclasses.dataclass(frozen=True)
class Counts:
    """What an engine counts: Python numbers, and a `ScheduleState`. A list is of the groups."""

    schedule_state: ScheduleState
    open_steps: Sequence[int]  # of the open window, skipped ones included
    counted: Sequence[int]  # the steps among them that are in the sums
    pending: Sequence[int]  # NONE, PENDING or EMPTY
    shares: np.ndarray  # float32: `Progress.shares`
    fingerprints: np.ndarray  # uint32, of all leaves: `fingerprints_alive`; 0 before the first step
    step: int = 0
    windows: int = 0  # closed so far
    token: int = 0  # the next step's
    skipped: int = 0
    reselections: int = 0
    window_lengths: Mapping[int, int] = dataclasses.field(default_factory=dict)
    scalars: AdamScalars | None = None  # of the last step; None before the first


_NUMBERS = "step windows token skipped reselections open_steps counted pending".split()


def first_counts(schedule: Schedule, leaves: int, offloaded: int) -> Counts:
    """Before the first step, for so many leaves, of which so many are offloaded."""
    none = [0] * schedule.groups
    return Counts(
        schedule_state=first_schedule_state(schedule, offloaded),
        open_steps=none,
        counted=none,
        pending=[NONE] * schedule.groups,
        shares=np.full(schedule.groups, np.nan, np.float32),
        fingerprints=np.zeros(leaves, np.uint32),
    )


def counts_to_tree(counts: Counts, schedule: Schedule) -> dict[str, Any]:
    """The counts as arrays; `schedule` is that of the optimizer's state."""
    lengths = np.zeros(longest(schedule.window) + 1, np.int32)
    for length, count in counts.window_lengths.items():
        lengths[length] = count
    return {
        **{name: np.array(getattr(counts, name), np.int32) for name in _NUMBERS},
        "window_lengths": lengths,
        "scalars": np.array(counts.scalars or [0.0] * len(AdamScalars._fields), np.float32),
        "shares": np.array(counts.shares, np.float32),
        "fingerprints": counts.fingerprints,
        "schedule_state": {
            name: np.array(x, np.int32 if name in ("length", "windows") else np.float32)
            for name, x in counts.schedule_state._asdict().items()
            if np.size(x)  # orbax writes no empty arrays
        },
    }


def counts_from_tree(tree: Mapping[str, Any]) -> Counts:
    """The counts that `counts_to_tree` gave."""
    schedule_state = {name: np.zeros(0, np.float32) for name in ScheduleState._fields}
    schedule_state |= {name: np.asarray(x)[()] for name, x in tree["schedule_state"].items()}
    lengths = enumerate(np.asarray(tree["window_lengths"]).tolist())
    return Counts(
        **{name: np.asarray(tree[name]).tolist() for name in _NUMBERS},
        window_lengths={i: n for i, n in lengths if n},
        scalars=AdamScalars(*np.asarray(tree["scalars"]).tolist()),
        shares=np.asarray(tree["shares"]),
        fingerprints=np.asarray(tree["fingerprints"]),
        schedule_state=ScheduleState(**schedule_state),
    )
