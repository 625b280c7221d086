"""The caller's side of a boundary: the pending update, the merge, and hand-overs.

It moves data between parameters, the device's state and the host half where a window closes. Every
process dispatches everything here in the same order.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from zenflow_jax._device.boundary import (
    Merged,
    choose,
    compare,
    enter,
    measure,
    merge,
    merge_programs,
)
from zenflow_jax._device.memory import upload
from zenflow_jax._device.samples import abstract_samples, samples
from zenflow_jax._device.state import LeafState, ZenFlowState
from zenflow_jax._exchange.ahead import Ahead, abstract
from zenflow_jax._exchange.messages import EMPTY, NONE, PENDING, Close, HandOver
from zenflow_jax._exchange.parts import (
    Group,
    OffloadedLeaves,
    as_before,
    assemble,
    by_leaf,
    part_sharding,
    select_anew,
)
from zenflow_jax._exchange.worker import Worker
from zenflow_jax._host.state import HostState


@dataclasses.dataclass
class _Pending:
    """A group's update that has not reached the parameters."""

    made: Future  # as `Close.done`
    # For each leaf, the channels that were selected while its window was open; None if they still
    # are.
    before: list[jax.Array] | None = None


class Updates:
    """One engine's updates, and its channels that change hands. For one calling thread.

    Args:
        worker: Makes the updates.
        host: The worker's arrays; read here only while the worker has nothing to do.
        offloaded: The leaves whose arrays `host` has.
        ahead: Compiles the programs.
    """

    def __init__(self, worker: Worker, host: HostState, offloaded: OffloadedLeaves, ahead: Ahead):
        self._ahead = ahead
        self._worker = worker
        self._host = host
        self._offloaded = offloaded
        self._parts = offloaded.parts
        self._specs = offloaded.specs
        #: Bytes of updates that were not prefetched.
        self.late_bytes = 0
        #: What merges found since it was last taken from here: leaves, and how much had changed.
        self.changed: list[tuple[list[int], jax.Array]] = []
        self._samples: list[jax.Array] = []
        #: Updates on their way, by group, in the order in which their windows closed.
        self._pending: dict[int, _Pending] = {}

    def prepare(
        self, weights: Sequence[jax.Array], leaves: Sequence[LeafState], *, measures: bool
    ) -> None:
        """Begins to compile what the run's boundaries need, in the order in which they come.

        Args:
            weights: The parameter of each offloaded leaf.
            leaves: The states of all leaves.
            measures: Whether the run asks for the share of the score that is kept.
        """
        # The last group's first window is the shortest.
        for number, group in reversed(list(enumerate(self._offloaded.groups))):
            mine = [abstract(x) for x in group.pick(weights)]
            states = group.pick(self._offloaded.pick(leaves))
            if not mine:
                continue
            scores, channels = [s.scores for s in states], [s.channels for s in states]
            masters = [
                jax.ShapeDtypeStruct(spec.selected_shape, np.float32, sharding=s.mu.sharding)
                for spec, s in zip(group.specs, states, strict=True)
            ]
            kept = [None if s.master is None else m for s, m in zip(states, masters, strict=True)]
            self._ahead.prepare(
                ("choose", number), choose, mine, scores, channels, kept, specs=group.specs
            )
            some = [i for i, spec in enumerate(group.specs) if spec.k]
            if some:
                columns = ([x[i] for i in some] for x in (mine, masters, channels))
                specs = tuple(group.specs[i] for i in some)
                self._ahead.prepare(("enter", number), enter, *columns, specs=specs)
            uploads = [
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=part_sharding(x, spec))
                for x, spec in zip(mine, group.specs, strict=True)
            ]
            seen = [abstract_samples(x, s) for x, s in zip(mine, group.specs, strict=True)]
            for kind, program, which in merge_programs(group.specs):
                columns = (
                    tuple(x[i] for i in which) for x in (mine, uploads, channels, channels, seen)
                )
                specs = tuple(group.specs[i] for i in which)
                self._ahead.prepare((kind, number), program, *columns, specs=specs)
            if measures:
                key = ("measure", number)
                self._ahead.prepare(key, measure, scores, channels, specs=group.specs)

    @property
    def some_pending(self) -> bool:
        """Whether any update has not reached the parameters."""
        return bool(self._pending)

    @property
    def before(self) -> list[jax.Array | None]:
        """For each leaf, the channels selected in the pending update's window; None: as now."""
        channels: list[jax.Array | None] = [None] * len(self._specs)
        for group, pending in self._pending.items():
            if pending.before is not None:
                leaves = self._offloaded.groups[group].leaves
                for i, x in zip(leaves, pending.before, strict=True):
                    channels[i] = x
        return channels

    def forget(self) -> None:
        """Drops what is pending."""
        self._pending.clear()

    def close_window(self, group: int, hand_over: HandOver | None = None) -> None:
        """Starts the update of a group's window, which ends here."""
        assert group not in self._pending, "a window closed before the last update was collected"
        close = Close(group, hand_over)
        self._pending[group] = _Pending(close.done)
        self._worker.post(close)

    def wait(self) -> list[int]:
        """Waits for pending updates; NONE, PENDING or EMPTY says what there is of each group's."""
        found = [NONE] * len(self._offloaded.groups)
        for group, pending in self._pending.items():
            found[group] = PENDING if self._worker.wait(pending.made, None) else EMPTY
        return found

    def collect(
        self,
        weights: Sequence[jax.Array],
        groups: Sequence[int],
        after: Any,
        leaves: Sequence[LeafState],
    ) -> list[jax.Array]:
        """The parameters with the pending updates of some groups, if there are any.

        Args:
            weights: The parameter of each offloaded leaf.
            groups: The groups.
            after: Arrays to wait for: only then the memory is free that uploads take.
            leaves: The states of all leaves, as they are now.
        """
        weights = list(weights)
        for number in groups:
            if number not in self._pending:
                continue
            uploads = self._worker.wait(self._pending[number].made, after)
            before = self._pending.pop(number).before
            group = self._offloaded.groups[number]
            if not group.leaves:
                continue
            if not uploads:
                # All steps of its window were skipped. The next merge could not tell what has
                # changed until now, as `before` is gone, which knew the channels that left.
                now = self._channels(group, leaves)
                seen, counts = compare(
                    group.pick(weights),
                    now if before is None else before,
                    now,
                    group.pick(self._samples),
                    specs=group.specs,
                )
                self.changed.append((list(group.leaves), counts))
            else:
                uploads = self._fetch_rest(group, uploads, after)
                merged = self._merge(number, weights, uploads, before, leaves)
                seen = merged.samples
                for i, weight in zip(group.leaves, merged.weights, strict=True):
                    weights[i] = weight
                self.changed += [
                    ([group.leaves[i] for i in which], counts) for which, counts in merged.changed
                ]
            for i, sample in zip(group.leaves, seen, strict=True):
                self._samples[i] = sample
        return weights

    def note_parameters(self, weights: Sequence[jax.Array]) -> None:
        """Samples the parameters: until the next merge only steps may change them."""
        self._samples = samples(weights, self._specs)

    def peek(
        self, weights: Sequence[jax.Array], after: Any, leaves: Sequence[LeafState]
    ) -> list[jax.Array]:
        """As `collect` of all, but updates stay pending. What they change is in new arrays."""
        weights = list(weights)
        for number, pending in self._pending.items():
            uploads = self._worker.wait(pending.made, after)
            if not uploads:
                continue
            group = self._offloaded.groups[number]
            uploads = self._fetch_rest(group, uploads, after)
            merged = self._merge(number, weights, uploads, pending.before, leaves, keep=True)
            for i, weight in zip(group.leaves, merged.weights, strict=True):
                weights[i] = weight
        return weights

    def _channels(self, group: Group, leaves: Sequence[LeafState]) -> list[jax.Array]:
        """The channels of each leaf of a group that are selected now."""
        return [leaf.channels for leaf in group.pick(self._offloaded.pick(leaves))]

    def _merge(
        self,
        number: int,
        weights: Sequence[jax.Array],
        uploads: Sequence[Sequence[jax.Array]],
        before: Sequence[jax.Array] | None,
        leaves: Sequence[LeafState],
        *,
        keep: bool = False,
    ) -> Merged:
        """The parameters of a group with an update, whose arrays stay if `keep`."""
        group = self._offloaded.groups[number]
        now = self._channels(group, leaves)
        mine = group.pick(weights)
        new = [
            assemble(pieces, weight.shape, part_sharding(weight, spec))
            for weight, spec, pieces in zip(
                mine, group.specs, by_leaf(group.parts, uploads), strict=True
            )
        ]
        before = now if before is None else before
        seen = group.pick(self._samples)

        def call(kind: str, program: Any, *arrays: Any, **static: Any) -> Any:
            # One that keeps is rare, and is compiled where it is called.
            key = (kind, number, "keep") if keep else (kind, number)
            return self._ahead.call(key, program, *arrays, **static)

        merged = merge(mine, new, before, now, seen, group.specs, keep=keep, call=call)
        placed = [as_before(x, weight) for x, weight in zip(merged.weights, mine, strict=True)]
        return merged._replace(weights=placed)

    def _fetch_rest(self, group: Group, uploads: list[Any], after: Any) -> list[Any]:
        """An update with its parts that were not prefetched; waits until those are there."""
        late = [i for i, pieces in enumerate(uploads) if not pieces]
        if not late:
            return uploads
        begin = time.perf_counter()
        # They take memory that the step used.
        jax.block_until_ready(after)
        start = time.perf_counter()
        leaves = self._worker.leaves()
        uploads = list(uploads)
        for i in late:
            array = leaves[group.part_numbers[i]].to_upload
            uploads[i] = [upload(array, device) for device in group.parts[i].devices]
        # The next update writes to the arrays that they come from.
        jax.block_until_ready(uploads)
        self._worker.waited(begin, start)
        self.late_bytes += sum(x.nbytes for i in late for x in uploads[i])
        return uploads

    def reselect(
        self,
        number: int,
        weights: Sequence[jax.Array],
        leaves: Sequence[LeafState],
        after: Any,
    ) -> tuple[list[jax.Array], list[LeafState]]:
        """Closes a group's window and hands channels over; entering ones are up to date at once.

        Args:
            number: The group.
            weights: The parameter of each offloaded leaf.
            leaves: The states of all leaves.
            after: Arrays of the step, to wait for.

        Returns:
            The parameters, and the states of all leaves.
        """
        group = self._offloaded.groups[number]
        weights, leaves = list(weights), list(leaves)
        places = group.pick(self._offloaded.places)
        states = [leaves[i] for i in places]
        before = [s.channels for s in states]
        chosen, current, scores = self._ahead.call(
            ("choose", number),
            choose,
            group.pick(weights),
            [s.scores for s in states],
            before,
            [s.master for s in states],
            specs=group.specs,
        )
        hand_over = HandOver(
            [
                (master, s.mu, s.nu, s.steps) if s.spec.k else None
                for s, master in zip(states, current, strict=True)
            ],
            chosen,
        )
        self.close_window(number, hand_over)
        self._pending[number].before = before
        entered = by_leaf(group.parts, self._worker.wait(hand_over.done, after))
        masters: list[jax.Array | None] = [None] * len(states)
        for j, (i, s) in enumerate(zip(places, states, strict=True)):
            leaves[i], masters[j] = select_anew(s, chosen[j], scores[j], entered[j])
        some = [j for j, master in enumerate(masters) if master is not None]
        if not some:
            return weights, leaves
        merged = self._ahead.call(
            ("enter", number),
            enter,
            [weights[group.leaves[j]] for j in some],
            [masters[j] for j in some],
            [leaves[places[j]].channels for j in some],
            specs=tuple(group.specs[j] for j in some),
        )
        for j, weight in zip(some, merged, strict=True):
            i = group.leaves[j]
            weights[i] = as_before(weight, weights[i])
        return weights, leaves

    def measure(self, number: int, leaves: Sequence[LeafState]) -> jax.Array:
        """Starts to compute the selected channels' share of the best score, of a group."""
        mine = self._offloaded.groups[number]
        states = mine.pick(self._offloaded.pick(leaves))
        scores, channels = [s.scores for s in states], [s.channels for s in states]
        return self._ahead.call(("measure", number), measure, scores, channels, specs=mine.specs)

    def masters(self, state: ZenFlowState) -> Iterator[jax.Array]:
        """The host's masters of each offloaded leaf, on the devices, in parts; one leaf at a time.

        The worker must have nothing to do. The rows of selected channels are not current.
        """
        leaves = self._worker.leaves()
        for i, spec in zip(self._offloaded.places, self._specs, strict=True):
            parts, pieces = [], []
            for part, host in zip(self._parts, leaves, strict=True):
                if self._offloaded.places[part.leaf] == i:
                    master = host.master.reshape(part.spec.shape)
                    parts.append(dataclasses.replace(part, leaf=0))
                    pieces.append([upload(master, device) for device in part.devices])
            # The uploads read live masters, which the next update writes.
            jax.block_until_ready(pieces)
            yield assemble(by_leaf(parts, pieces)[0], spec.shape, state.leaves[i].mu.sharding)

    def resume(
        self, pending: Sequence[int], before: Sequence[np.ndarray], states: Sequence[LeafState]
    ) -> None:
        """Restores another run's pending updates, from masters that are resumed already.

        Args:
            pending: What `wait` returned there.
            before: Each part's channels that were selected while its window was open.
            states: States of the offloaded leaves.
        """
        for number, (group, kind) in enumerate(zip(self._offloaded.groups, pending, strict=True)):
            if kind == NONE:
                continue
            uploads = []
            if kind == PENDING:
                for i, part in zip(group.part_numbers, group.parts, strict=True):
                    cast = self._host.cast(i)
                    devices = part.devices if self._offloaded.prefetched[i] else ()
                    uploads.append([upload(cast, device) for device in devices])
                # The next update writes to the arrays that they come from.
                jax.block_until_ready(uploads)
            made: Future = Future()
            made.set_result(uploads)
            channels = [
                [upload(before[i], device) for device in part.devices]
                for i, part in zip(group.part_numbers, group.parts, strict=True)
            ]
            self._pending[number] = _Pending(
                made,
                [
                    assemble(pieces, leaf.channels.shape, leaf.channels.sharding)
                    for pieces, leaf in zip(
                        by_leaf(group.parts, channels), group.pick(states), strict=True
                    )
                ],
            )
