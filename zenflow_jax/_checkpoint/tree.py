"""An engine's state as a tree of arrays, for checkpoints.

Large arrays are global and in host memory, placed like the parts of their leaf: a saver writes each
part once, from a process that has it. Small values that are the same on every process are NumPy.
Nothing in the tree depends on the number of devices or processes, so another number of them can
read it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from zenflow_jax._checkpoint.layout import written_by
from zenflow_jax._checkpoint.stream import EngineStream, SavedPart
from zenflow_jax._device.memory import HOST
from zenflow_jax._device.shards import Layout
from zenflow_jax._device.state import ZenFlowState, find_state
from zenflow_jax._exchange.messages import NONE
from zenflow_jax._exchange.parts import (
    OffloadedLeaves,
    Part,
    assemble,
    by_leaf,
    joined,
)
from zenflow_jax._exchange.snapshot import Snapshot
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.aligned import blank, copied
from zenflow_jax._host.state import HostLeaf
from zenflow_jax._plan.leaf import LeafSpec
from zenflow_jax._plan.rules import AutoSelect, AutoWindow, EpochSelect, longest
from zenflow_jax._plan.scalars import AdamScalars
from zenflow_jax._plan.schedule import Schedule, ScheduleState, first_schedule_state
from zenflow_jax._plan.sending import SendGradients

#: Arrays of a leaf's shape.
WIDE = ("master", "mu", "nu", "total")


@dataclasses.dataclass(frozen=True)
class Counts:
    """What an engine counts: Python numbers, and a `ScheduleState`. A list is of the groups."""

    schedule_state: ScheduleState
    open_steps: Sequence[int]  # of the open window, skipped ones included
    counted: Sequence[int]  # the steps among them that are in the sums
    pending: Sequence[int]  # NONE, PENDING or EMPTY
    shares: np.ndarray  # float32: `Progress.shares`
    fingerprints: np.ndarray  # of all leaves: `Given.fingerprints`; 0 before the first step
    step: int = 0
    windows: int = 0  # closed so far
    token: int = 0  # the next step's
    skipped: int = 0
    reselections: int = 0
    window_lengths: Mapping[int, int] = dataclasses.field(default_factory=dict)
    scalars: AdamScalars | None = None  # of the last step; None before the first


_NUMBERS = ("step", "windows", "token", "skipped", "reselections")
_OF_GROUPS = ("open_steps", "counted", "pending")


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
    of_groups = {name: getattr(counts, name) for name in _OF_GROUPS}
    return {
        **{name: np.array(getattr(counts, name), np.int32) for name in _NUMBERS},
        **{name: np.array(x, np.int32) for name, x in of_groups.items()},
        "window_lengths": lengths,
        "scalars": _scalars_to_tree(counts.scalars),
        "shares": np.array(counts.shares, np.float32),
        "fingerprints": counts.fingerprints,
        "schedule_state": {
            name: np.array(x, np.int32 if name in ("length", "windows") else np.float32)
            for name, x in counts.schedule_state._asdict().items()
            if np.size(x)  # orbax writes no empty arrays
        },
    }


def _scalars_to_tree(scalars: AdamScalars | None) -> np.ndarray:
    return np.array(scalars or [0.0] * len(AdamScalars._fields), np.float32)


def counts_from_tree(tree: Mapping[str, Any]) -> Counts:
    """The counts that `counts_to_tree` gave."""
    schedule_state = {name: np.asarray(x) for name, x in tree["schedule_state"].items()}
    nothing = np.zeros(0, np.float32)
    lengths = np.asarray(tree["window_lengths"])
    of_groups = {name: np.asarray(tree[name]).tolist() for name in _OF_GROUPS}
    return Counts(
        **{name: int(tree[name]) for name in _NUMBERS},
        **of_groups,
        window_lengths={i: int(n) for i, n in enumerate(lengths) if n},
        scalars=AdamScalars(*map(float, np.asarray(tree["scalars"]))),
        shares=np.asarray(tree["shares"]),
        fingerprints=np.asarray(tree["fingerprints"]),
        schedule_state=ScheduleState(
            length=int(schedule_state["length"]),
            counted=np.float32(schedule_state["counted"]),
            deferred=schedule_state.get("deferred", nothing),
            selected=schedule_state.get("selected", nothing),
            windows=schedule_state["windows"],
            kept_share=schedule_state["kept_share"],
        ),
    )


def options_of(state: ZenFlowState) -> dict[str, Any]:
    """The options that a resumed run must share with the saved one, as numbers."""
    schedule = state.schedule
    window, select = schedule.window, schedule.select
    if isinstance(window, AutoWindow):
        windows = (window.max_interval, 1, window.share)
    else:
        windows = (window, 0, 0)
    if isinstance(select, AutoSelect):
        selects = (select.max_windows, 1, select.keep)
    elif isinstance(select, EpochSelect):
        selects = (select.steps, 2, 0)
    else:
        selects = (select, 0, 0)
    specs = [leaf.spec for leaf in state.leaves]
    rows = [(-1 if s.axis is None else s.axis, s.k, s.decay, len(s.groups)) for s in specs]
    scaling, share = schedule.window_scaling, schedule.provisional_share
    return {
        # The number, the kind of rule, and the rule's share.
        "update_interval": np.array(windows, np.float32),
        "select_interval": np.array(selects, np.float32),
        "full_warm_up_rounds": np.array(schedule.full_warm_up_rounds, np.int32),
        "rolling": np.array(schedule.groups > 1, np.int32),
        # -1 for the next boundary, wherever an adaptive window has it.
        "staleness": np.array(-1 if schedule.staleness is None else schedule.staleness, np.int32),
        # -1 for None.
        "window_scaling": np.array(-1 if scaling is None else scaling, np.float32),
        "provisional_share": np.array(-1 if share is None else share, np.float32),
        # 1 for "per_window", whose sums the optimizer state has; the other two give the same bits.
        "send_gradients": np.array(state.send_gradients.sums_on_device, np.int32),
        # For each leaf its channel axis (-1 if resident), selected channels, weight decay, ranges.
        "leaves": np.array(rows, np.int32).reshape(-1, 4),
        # For each range of each leaf.
        "groups": np.array([group for s in specs for group in s.groups], np.int32),
    }


def abstract_engine_state(opt_state: Any) -> dict[str, Any]:
    """The tree of `HostEngine.state` without values: to restore a checkpoint straight into place.

    Args:
        opt_state: What `tx.init(params)` returned: arrays, or `ShapeDtypeStruct`s.

    Returns:
        A tree of `ShapeDtypeStruct`s with shapes, dtypes, shardings and memory kinds, and of small
        NumPy arrays where the state has them.

    Raises:
        ValueError: If there is not one `ZenFlowState` with `offload=True` in `opt_state`.
    """
    state = find_state(opt_state)
    if not state.offload:
        raise ValueError(
            "expected a state of `zenflow(..., offload=True)`, got one that has its deferred half "
            "in itself. Save that state alone: it is all there is."
        )
    offloaded = [
        (leaf.spec, mail)
        for leaf, mail in zip(state.leaves, state.mail, strict=True)
        if leaf.offloaded
    ]
    counts = first_counts(state.schedule, len(state.leaves), len(offloaded))
    return {
        "leaves": [
            {
                name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
                for name, (shape, dtype, sharding) in arrays_of(
                    spec, mail, state.send_gradients
                ).items()
            }
            for spec, mail in offloaded
        ],
        **_shown(_small(counts, state.schedule, options_of(state))),
    }


def _small(counts: Counts, schedule: Schedule, options: dict[str, Any]) -> dict[str, Any]:
    """What the tree has beside the leaves, the same in every process."""
    return {
        "counts": counts_to_tree(counts, schedule),
        "options": options,
        "layout": written_by(),
    }


def _shown(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The same in the same order, as errors name the first difference; `jax.tree.map` sorts."""
    return {
        name: _shown(x) if isinstance(x, Mapping) else x.view(_Shown) for name, x in tree.items()
    }


class _Shown(np.ndarray):
    """An array of a template that is compared with anything.

    Where a checkpoint has other arrays than its template, orbax shows both, and asks first whether
    what it shows is None: by `==`, to which NumPy gives an answer for each element, and orbax ends
    with an error about that (0.12.8).
    """

    def __eq__(self, other: Any) -> Any:
        return super().__eq__(other) if isinstance(other, np.ndarray) else False

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def arrays_of(
    spec: LeafSpec, mail: Any, sending: SendGradients
) -> dict[str, tuple[tuple[int, ...], Any, Any]]:
    """Shape, dtype and sharding of each array kept for a leaf; `mail` shows where the leaf is.

    The sharding is None for an abstract leaf that was not told where it is.
    """
    sharding = mail.sharding
    if isinstance(sharding, NamedSharding):
        layout, mesh = Layout(spec), sharding.mesh
        wide, each = (
            NamedSharding(mesh, x, memory_kind=HOST) for x in (layout.part, layout.channels)
        )
    elif sharding is None:
        wide = each = None
    else:
        (device,) = sharding.device_set
        wide = each = SingleDeviceSharding(device, memory_kind=HOST)
    arrays = {
        **{name: (spec.shape, np.dtype(np.float32), wide) for name in WIDE},
        "steps": ((*spec.stack, spec.n), np.dtype(np.int32), each),
    }
    if sending.sums_on_device:
        del arrays["total"]  # the optimizer state has the sums, as its mail
    if spec.k:  # orbax writes no empty arrays
        # Channels selected while the pending update's window was open, if there is one.
        arrays["before"] = ((*spec.stack, spec.k), np.dtype(np.int32), each)
    return arrays


def place_of(name: str, part: Part, spec: LeafSpec) -> tuple[slice, ...]:
    """Where a part's array is in that of its leaf, whose `spec` is given."""
    if name in WIDE:
        return part.index
    assert part.spec.axis is not None
    channels = part.index[part.spec.axis]
    if name == "before":
        # Each piece of the channel axis has its share of the channels, in order.
        channels = slice(channels.start * spec.k // spec.n, channels.stop * spec.k // spec.n)
    return (*part.index[: len(part.spec.stack)], channels)


class EngineTree:
    """Writes the state of an engine as a tree, of the same structure whatever is in it."""

    def __init__(self, state: ZenFlowState, offloaded: OffloadedLeaves):
        self._schedule = state.schedule
        self._specs = offloaded.specs
        self._options = options_of(state)
        self._parts = offloaded.parts
        self._pieces = offloaded.pieces
        self._firsts = offloaded.firsts
        mail = offloaded.pick(state.mail)
        self._arrays = [
            arrays_of(spec, x, state.send_gradients)
            for spec, x in zip(offloaded.specs, mail, strict=True)
        ]

    def build(
        self, leaves: Sequence[HostLeaf], counts: Counts, before: Sequence[np.ndarray | None]
    ) -> dict[str, Any]:
        """The tree; its arrays are copies.

        Args:
            leaves: The host's arrays of each part; nobody may write to them meanwhile.
            counts: What the engine counts.
            before: For each part, its channels selected during the pending update's window, as
                `HostLeaf.channels`; None if they still are.
        """
        return {
            "leaves": self._of_leaves(leaves, counts.counted, before),
            **_small(counts, self._schedule, self._options),
        }

    def stream(
        self,
        leaves: Sequence[HostLeaf],
        counts: Counts,
        before: Sequence[np.ndarray | None],
        *,
        order: Sequence[int],
        processes: Sequence[int],
        copy_bytes: int | None,
        adam: HostAdam,
    ) -> EngineStream:
        """The same, to be written while the run goes on; nothing is copied now.

        Args:
            leaves, counts, before: As for `build`.
            order: The groups, in the order in which their windows will close.
            processes: Those that the engine is in, ascending.
            copy_bytes: Memory for copies; None for a byte for each parameter.
            adam: Of the thread that will write; the stream closes it.
        """
        mine = [i for i, part in enumerate(self._parts) if part.saved]
        mine.sort(key=lambda i: order.index(self._parts[i].spec.group))
        if copy_bytes is None:
            copy_bytes = sum(leaf.master.size for leaf in leaves)
        return EngineStream(
            snapshot=Snapshot({i: leaves[i] for i in mine}, copy_bytes),
            parts={
                i: SavedPart(
                    self._parts[i],
                    # A live view of the array would block its donation.
                    None if (then := before[i]) is None else np.array(then),
                    counts.counted[self._parts[i].spec.group] > 0,
                )
                for i in mine
            },
            small=_small(counts, self._schedule, self._options),
            arrays=self._arrays,
            place=lambda name, part: place_of(name, part, self._specs[part.leaf]),
            processes=processes,
            adam=adam,
        )

    def _of_leaves(
        self,
        leaves: Sequence[HostLeaf],
        counted: Sequence[int],
        before: Sequence[np.ndarray | None],
    ) -> list[dict[str, jax.Array]]:
        """The host's arrays of each offloaded leaf; a group's sums have `counted` steps."""
        arrays, firsts = self._arrays, self._firsts
        pieces: dict[str, list[Sequence[jax.Array | None]]] = {}
        for numbers, first in zip(self._pieces, firsts, strict=True):
            ranges = [self._of_part(self._parts[i], leaves[i], counted, before[i]) for i in numbers]
            for name in ranges[0]:
                if name == "total" and "total" not in arrays[first.leaf]:
                    continue
                x = joined([of_range[name] for of_range in ranges])
                # No empty arrays: nobody asks for them, and GPUs have none in host memory.
                on_devices = _beside(x, first.devices) if x.size else []
                pieces.setdefault(name, []).append(on_devices or [None] * len(first.devices))
        # Devices other than CPUs are still copying.
        jax.block_until_ready(pieces)
        columns = {name: by_leaf(firsts, found) for name, found in pieces.items()}
        return [
            {
                name: assemble(columns[name][i], shape, sharding)
                for name, (shape, _, sharding) in of_leaf.items()
            }
            for i, of_leaf in enumerate(arrays)
        ]

    def _of_part(
        self, part: Part, leaf: HostLeaf, counted: Sequence[int], before: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """The arrays of one part, in its shape; not copies where they need not be."""
        spec = part.spec
        channels = leaf.channels if before is None else before
        # Until a step is counted, a sum is missing.
        total = leaf.total if counted[spec.group] else None
        return {
            "master": leaf.master.as_float32().reshape(spec.shape),
            "mu": leaf.mu.as_float32().reshape(spec.shape),
            "nu": leaf.nu.as_float32().reshape(spec.shape),
            "total": (blank(spec.shape) if total is None else total).reshape(spec.shape),
            "steps": leaf.steps.reshape(*spec.stack, spec.n),
            "before": (channels + part.first).reshape(*spec.stack, spec.k),
        }


def _beside(x: np.ndarray, devices: Sequence[Any]) -> list[jax.Array]:
    """A copy in host memory beside each device; on CPUs one for all of them."""
    if devices[0].platform == "cpu":
        x = copied(x)  # a CPU device takes the memory over as it is
    return [jax.device_put(x, SingleDeviceSharding(device, memory_kind=HOST)) for device in devices]
