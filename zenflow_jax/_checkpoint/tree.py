"""An engine's state as a tree of arrays, for checkpoints.

Large arrays are global and in host memory, placed like the parts of their leaf: a saver writes each
part once, from a process that has it. Small values that are the same on every process are NumPy.
Nothing in the tree depends on the number of devices or processes, so another number of them can
read it.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from zenflow_jax import _version
from zenflow_jax._checkpoint.counts import Counts, counts_to_tree, first_counts
from zenflow_jax._device.memory import HOST
from zenflow_jax._device.shards import Layout
from zenflow_jax._device.state import ZenFlowState, find_state
from zenflow_jax._exchange.parts import (
    OffloadedLeaves,
    Part,
    assemble,
    by_leaf,
    joined,
)
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.arrays import blank
from zenflow_jax._host.leaf import HostLeaf
from zenflow_jax._plan.leaf import LeafSpec
from zenflow_jax._plan.rules import AutoSelect, AutoWindow, EpochSelect, SendGradients
from zenflow_jax._plan.schedule import Schedule

#: Arrays of a leaf's shape.
WIDE = ("master", "mu", "nu", "total")
# Elements that are put together at once, where memory does not have them as they are written.
_BLOCK = 1024 * 1024


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
    rules = {"window", "select", "groups"}
    numbers = {f.name for f in dataclasses.fields(schedule)} - rules
    return {
        # The number, the kind of rule, and the rule's share.
        "update_interval": np.array(windows, np.float32),
        "select_interval": np.array(selects, np.float32),
        "rolling": np.array(schedule.groups > 1, np.int32),
        # -1 for None.
        **{
            name: np.array(-1 if (x := getattr(schedule, name)) is None else x, np.float32)
            for name in sorted(numbers)
        },
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

    Examples:
        >>> import jax.numpy as jnp, zenflow_jax
        >>> opt_state = zenflow_jax.zenflow(1e-2).init({"w": jnp.ones((8, 4))})
        >>> tree = zenflow_jax.abstract_engine_state(opt_state)
        >>> tree["leaves"][0]["master"].shape
        (8, 4)
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
    """The small arrays of the tree, equal in every process."""
    return {
        "counts": counts_to_tree(counts, schedule),
        "options": options,
        # As in the optimizer state, so that savers that compare names show both versions.
        "layout": {_version.LAYOUT_NAME: np.array(_version.version_number(), np.int32)},
    }


def _shown(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Wraps the arrays for orbax, in their order, as errors name the first difference."""
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


@dataclasses.dataclass(frozen=True, eq=False)
class Content:
    """The saved content of an engine at one moment, from which trees and files are written.

    Attributes:
        offloaded: The leaves whose arrays the host has.
        arrays: Shape, dtype and sharding of the arrays of each leaf, as `arrays_of` gives them.
        small: Counts and options: a tree of small NumPy arrays, the same in all processes.
        counted: Steps in the sum of each group's open window.
        before: For each part, its channels selected during the pending update's window, as
            `HostLeaf.channels`; None if they still are.
        adam: Adds up mail, on the thread that writes.
    """

    offloaded: OffloadedLeaves
    arrays: Sequence[Mapping[str, tuple[tuple[int, ...], Any, Any]]]
    small: Mapping[str, Any]
    counted: Sequence[int]
    before: Sequence[np.ndarray | None]
    adam: HostAdam

    @classmethod
    def of(
        cls,
        state: ZenFlowState,
        offloaded: OffloadedLeaves,
        counts: Counts,
        before: Sequence[np.ndarray | None],
        adam: HostAdam,
    ) -> "Content":
        """That of an engine that counts `counts`; `state` may be of any step."""
        leaves = zip(offloaded.specs, offloaded.pick(state.mail), strict=True)
        return cls(
            offloaded,
            [arrays_of(spec, mail, state.send_gradients) for spec, mail in leaves],
            _small(counts, state.schedule, options_of(state)),
            counts.counted,
            # A live view of a device's array would block its donation.
            [None if x is None else np.array(x) for x in before],
            adam,
        )

    def places(self, i: int) -> dict[str, tuple[slice, ...]]:
        """Where each array of part `i` is in that of its leaf; a sum without a step is left out."""
        part = self.offloaded.parts[i]
        return {
            name: place_of(name, part, self.offloaded.specs[part.leaf])
            for name in self.arrays[part.leaf]
            if name != "total" or self.counted[part.spec.group]
        }

    def blocks(self, i: int, leaf: HostLeaf, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """The elements of an array of part `i` in pieces, each with the number of its first one.

        A piece is valid until the next one.
        """
        if name == "steps":
            yield 0, leaf.steps
        elif name == "before":
            before = self.before[i]
            channels = leaf.channels if before is None else before
            yield 0, channels + self.offloaded.parts[i].first
        else:
            for begin in range(0, leaf.master.size, _BLOCK):
                end = min(begin + _BLOCK, leaf.master.size)
                if name == "total":
                    yield begin, self._sum(leaf, begin, end)
                else:
                    array = {"master": leaf.master, "mu": leaf.mu, "nu": leaf.nu}[name]
                    yield begin, array.range(begin, end)

    def _sum(self, leaf: HostLeaf, begin: int, end: int) -> np.ndarray:
        """Some of the sum of the leaf's open window, with the bits of any other way to add up."""
        total = np.empty(end - begin, np.float32)
        if leaf.total is not None:
            np.copyto(total, leaf.total.reshape(-1)[begin:end])
        mails = [(mail.reshape(-1)[begin:end], factor) for mail, factor in leaf.mails]
        self.adam.accumulate(total, mails, first=leaf.total is None)
        return total

    def tree(self, leaves: Sequence[HostLeaf]) -> dict[str, Any]:
        """The content in memory, in arrays of its own."""
        offloaded = self.offloaded
        pieces: dict[str, list[Sequence[jax.Array | None]]] = {}
        for numbers, first in zip(offloaded.pieces, offloaded.firsts, strict=True):
            for name in (*WIDE, "steps", "before"):
                on_devices: Sequence[jax.Array | None] = [None] * len(first.devices)
                if name in self.arrays[first.leaf]:
                    array = joined([self._array(i, leaves[i], name) for i in numbers])
                    on_devices = _beside(array, first.devices)
                pieces.setdefault(name, []).append(on_devices)
        # Devices other than CPUs are still copying.
        jax.block_until_ready(pieces)
        columns = {name: by_leaf(offloaded.firsts, found) for name, found in pieces.items()}
        of_leaves = [
            {
                name: assemble(columns[name][i], shape, sharding)
                for name, (shape, _, sharding) in of_leaf.items()
            }
            for i, of_leaf in enumerate(self.arrays)
        ]
        return {"leaves": of_leaves, **self.small}

    def _array(self, i: int, leaf: HostLeaf, name: str) -> np.ndarray:
        part = self.offloaded.parts[i]
        place = place_of(name, part, self.offloaded.specs[part.leaf])
        array = blank([s.stop - s.start for s in place], self.arrays[part.leaf][name][1])
        if name in self.places(i):
            for begin, elements in self.blocks(i, leaf, name):
                array.reshape(-1)[begin : begin + elements.size] = elements.reshape(-1)
        return array


def _beside(x: np.ndarray, devices: Sequence[Any]) -> list[jax.Array]:
    """The array in host memory beside each device; CPU devices take its memory over as it is."""
    return [jax.device_put(x, SingleDeviceSharding(device, memory_kind=HOST)) for device in devices]
