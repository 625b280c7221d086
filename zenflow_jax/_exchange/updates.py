"""The caller's side of a boundary: pending updates, merges, and hand-overs.

Every process dispatches all of these programs in the same order.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zenflow_jax._device.boundary import (
    LastMove,
    channel_rows,
    choose,
    cut_states,
    enter,
    merge,
    put_states,
    split_uploads,
)
from zenflow_jax._device.memory import upload
from zenflow_jax._device.state import LeafState, Leaves, ZenFlowState
from zenflow_jax._device.statistics import kept_share
from zenflow_jax._exchange.messages import Update
from zenflow_jax._exchange.parts import (
    OffloadedLeaves,
    assemble,
    by_leaf,
    host_part,
    keep_sharding,
    part_sharding,
)
from zenflow_jax._exchange.worker import Worker


class Updates:
    """One engine's updates and hand-overs of channels. Must be used from one thread only.

    `weights` always means the offloaded leaves' parameters, `leaves` all leaves' states.
    """

    def __init__(self, worker: Worker, offloaded: OffloadedLeaves, leaves: Leaves):
        self._worker = worker
        self._offloaded = offloaded
        #: Each group's selected channels, in the form of `channel_rows`.
        self._rows: list[jax.Array | None] = [None] * len(offloaded.groups)
        for number, group in enumerate(offloaded.groups):
            if group.leaves:
                states = self._ranges(number, group.pick(offloaded.pick(leaves)))
                self._rows[number] = channel_rows([s.channels for s in states], specs=group.specs)
        #: Donated uploads. The worker frees them, because this takes half as long as dispatching a
        #: merge.
        self._merged_uploads: list[Any] = []
        #: Updates that have not reached the parameters, by group, in the order of their windows.
        self.pending: dict[int, Update] = {}

    def forget(self) -> None:
        self.pending.clear()
        self._merged_uploads.clear()

    def close_window(
        self,
        group: int,
        leaving: Sequence[tuple[jax.Array, ...] | None] = (),
        chosen: Sequence[jax.Array] = (),
        before: jax.Array | None = None,
    ) -> Update:
        """Closes a group's window and starts its update; other arguments are as in `Update`."""
        assert group not in self.pending, "a window closed before the last update was collected"
        update = self.pending[group] = Update(
            group, self._merged_uploads, leaving=leaving, chosen=chosen, before=before
        )
        self._merged_uploads = []
        self._worker.post(update)
        return update

    def wait(self) -> list[int]:
        """Waits for pending updates; returns 1 for each group that has one, otherwise 0."""
        kinds = [0] * len(self._offloaded.groups)
        for group, update in self.pending.items():
            # An update is empty if no step in its window counted.
            kinds[group] = int(bool(self._worker.wait(update.done, None)))
        return kinds

    def collect(
        self,
        weights: Sequence[jax.Array],
        groups: Sequence[int],
        state: ZenFlowState,
        *,
        keep_move: bool = False,
    ) -> list[jax.Array]:
        """Merges the pending updates of `groups`; `state` is the last step's.

        `keep_move` allows the parameters to keep the last step's provisional move. That step must
        have followed the windows' ends.
        """
        weights, after = list(weights), state.step
        for number in groups:
            if number not in self.pending:
                continue
            uploads = self._worker.wait(self.pending[number].done, after)
            before = self.pending.pop(number).before
            group = self._offloaded.groups[number]
            if not uploads:
                continue  # all steps in its window were skipped
            params, arrays = group.pick(weights), by_leaf(group.parts, uploads)
            new = [
                assemble(pieces, spec.on_host.shape, part_sharding(weight, spec))
                for weight, spec, pieces in zip(params, group.specs, arrays, strict=True)
            ]
            donated, kept = split_uploads(new, group.specs)
            rows = self._rows[number]
            during = rows if before is None else before
            moved = LastMove.of(state, group.pick(self._offloaded.places)) if keep_move else None
            static = {"specs": group.specs, "schedule": state.schedule}
            merged = merge(params, donated, kept, during, rows, moved, **static)
            if group.on_one_device:
                self._merged_uploads.append(donated)
            for i, weight, old in zip(group.leaves, merged, params, strict=True):
                weights[i] = keep_sharding(weight, old)
        return weights

    def load(self, weights: Sequence[jax.Array]) -> None:
        """Copies parameters into the host's masters, until the first step has been exchanged.

        The first step moves no deferred channel, so the values before and after it are equal. The
        worker must be idle.
        """
        specs = self._offloaded.specs
        for i, part in enumerate(self._offloaded.parts):
            weight = host_part(weights[part.leaf], part, specs[part.leaf])
            self._worker.host.load(i, weight)

    def masters(self, number: int, weight: jax.Array) -> jax.Array:
        """Returns a leaf's masters beside its parameter, as for a merge; selected ones are stale.

        The worker must be idle.
        """
        leaves, spec = self._worker.leaves(), self._offloaded.specs[number]
        by_position = {}
        for ranges in self._offloaded.pieces:
            part = self._offloaded.parts[ranges[0]]
            if part.leaf == number:
                # A copy, because the next update overwrites live masters.
                each = [leaves[i].master.as_float32().reshape(leaves[i].spec.shape) for i in ranges]
                piece = np.concatenate(each)
                for position, device in zip(part.positions, part.devices, strict=True):
                    by_position[position] = upload(piece, device)
        pieces = [x for _, x in sorted(by_position.items())]
        return assemble(pieces, spec.on_host.shape, part_sharding(weight, spec))

    def reselect(
        self, number: int, weights: list[jax.Array], leaves: Leaves, after: jax.Array
    ) -> list[LeafState]:
        """Closes a group's window and hands channels over; entering channels are up to date.

        Waits for the step that produced `after`. Changes `weights`; returns new `leaves`.
        """
        group, leaves = self._offloaded.groups[number], list(leaves)
        places = group.pick(self._offloaded.places)
        whole = [leaves[i] for i in places]
        states = self._ranges(number, whole)
        chosen, rows, current, scores = choose(
            group.pick(weights),
            [s.scores for s in states],
            [s.channels for s in states],
            [s.master for s in states],
            specs=group.specs,
        )
        leaving = [
            (master, s.mu, s.nu, s.steps) if s.spec.k else None
            for s, master in zip(states, current, strict=True)
        ]
        before, self._rows[number] = self._rows[number], rows
        update = self.close_window(number, leaving=leaving, chosen=chosen, before=before)
        entered = by_leaf(group.parts, self._worker.wait(update.entered, after))
        masters = []
        for j, s in enumerate(states):
            states[j] = s = s.replace(
                channels=keep_sharding(chosen[j], s.channels),
                scores=keep_sharding(scores[j], s.scores),
            )
            if s.spec.k:
                new, like = zip(*entered[j], strict=True), (s.mu, s.mu, s.nu, s.steps)
                master, mu, nu, steps = (
                    assemble(pieces, old.shape, old.sharding)
                    for pieces, old in zip(new, like, strict=True)
                )
                masters.append(master)
                kept = None if s.master is None else master
                states[j] = s.replace(master=kept, mu=mu, nu=nu, steps=steps)
        entering = [j for j, s in enumerate(states) if s.spec.k]
        if entering:
            merged = enter(
                [weights[group.leaves[j]] for j in entering],
                masters,
                [states[j].channels for j in entering],
                specs=tuple(group.specs[j] for j in entering),
            )
            for j, weight in zip(entering, merged, strict=True):
                i = group.leaves[j]
                weights[i] = keep_sharding(weight, weights[i])
        if group.in_ranges:
            states = put_states(whole, states)
            states = [
                jax.tree.map(keep_sharding, *pair) for pair in zip(states, whole, strict=True)
            ]
        for i, new in zip(places, states, strict=True):
            leaves[i] = new
        return leaves

    def _ranges(self, number: int, states: Sequence[LeafState]) -> list[LeafState]:
        group = self._offloaded.groups[number]
        return cut_states(states, specs=group.specs) if group.in_ranges else list(states)

    def measure(self, number: int, leaves: Leaves) -> jax.Array:
        """Starts computing a group's `kept_share` (`_device/statistics.py`)."""
        group = self._offloaded.groups[number]
        states = group.pick(self._offloaded.pick(leaves))
        scores, channels = [s.scores for s in states], [s.channels for s in states]
        return kept_share(scores, channels, specs=group.specs)

    def resume(self, pending: Sequence[int]) -> None:
        """Restores a saved run's pending updates, from host arrays that are already restored.

        `pending` is the saved result of `wait`.
        """
        leaves = self._worker.leaves()
        for number, (group, kind) in enumerate(zip(self._offloaded.groups, pending, strict=True)):
            if kind != 1:
                continue
            numbered = zip(group.part_numbers, group.parts, strict=True)
            pairs = [(leaves[i], part) for i, part in numbered]
            uploads = [[upload(leaf.to_upload, x) for x in part.devices] for leaf, part in pairs]
            # The next update writes to the source arrays.
            jax.block_until_ready(uploads)
            # Each device's rows in the order of leaves, by position.
            rows: dict[tuple[int, Any], list[np.ndarray]] = {}
            for leaf, part in pairs:
                for place in zip(part.positions, part.devices, strict=True):
                    rows.setdefault(place, []).append(leaf.before.reshape(1, -1))
            pieces = [upload(np.concatenate(rows[x], axis=1), x[1]) for x in sorted(rows)]
            like = self._rows[number]
            assert like is not None, "only a run without offloaded leaves has an empty group"
            # Rows without channels (`topk_ratio=0`) are identical, and jit may place them anywhere.
            rows_then = assemble(pieces, like.shape, like.sharding) if like.size else like
            self.pending[number] = update = Update(number, before=rows_then)
            update.done.set_result(uploads)
