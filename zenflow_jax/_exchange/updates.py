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

from zenflow_jax._device.boundary import Merged, choose, enter, measure, merge
from zenflow_jax._device.memory import upload
from zenflow_jax._device.samples import samples
from zenflow_jax._device.state import LeafState, ZenFlowState
from zenflow_jax._exchange.messages import EMPTY, NONE, PENDING, Close, HandOver
from zenflow_jax._exchange.parts import (
    OffloadedLeaves,
    as_before,
    assemble,
    by_leaf,
    part_sharding,
    select_anew,
)
from zenflow_jax._exchange.worker import Worker
from zenflow_jax._host.state import HostState


class Updates:
    """One engine's updates, and its channels that change hands. For one calling thread.

    Args:
        worker: Makes the updates.
        host: The worker's arrays; read here only while the worker has nothing to do.
        offloaded: The leaves whose arrays `host` has.
    """

    def __init__(
        self,
        worker: Worker,
        host: HostState,
        offloaded: OffloadedLeaves,
    ):
        self._worker = worker
        self._host = host
        self._offloaded = offloaded
        self._parts = offloaded.parts
        self._specs = offloaded.specs
        #: Bytes of updates that were not prefetched.
        self.late_bytes = 0
        #: An update that has not reached the parameters.
        self.pending: Future | None = None
        #: What merges found since it was last taken from here: leaves, and how much had changed.
        self.changed: list[tuple[list[int], jax.Array]] = []
        self._samples: list[jax.Array] = []
        #: Channels that were selected while its window was open; None if they still are.
        self.before: list[jax.Array] | None = None

    def close_window(self, hand_over: HandOver | None = None) -> None:
        """Starts the update of the window that ends here."""
        close = Close(hand_over)
        self.pending = close.done
        self._worker.post(close)

    def wait(self) -> int:
        """Waits for the pending update; NONE, PENDING or EMPTY says what there is of it."""
        if self.pending is None:
            return NONE
        return PENDING if self._worker.wait(self.pending, None) else EMPTY

    def collect(
        self, weights: list[jax.Array], after: Any, leaves: Sequence[LeafState]
    ) -> list[jax.Array]:
        """The parameters with the pending update, if there is one.

        Args:
            weights: The parameter of each offloaded leaf.
            after: Arrays to wait for: only then the memory is free that uploads take.
            leaves: The states of all leaves, as they are now.
        """
        if self.pending is None:
            return weights
        uploads = self._worker.wait(self.pending, after)
        before, self.pending, self.before = self.before, None, None
        if not uploads:
            # `before` is gone, which knew the channels that left a boundary ago: sample anew.
            self.note_parameters(weights)
            return weights
        merged = self._merge(weights, self._fetch_rest(uploads, after), before, leaves)
        self._samples = merged.samples
        self.changed += merged.changed
        return merged.weights

    def note_parameters(self, weights: Sequence[jax.Array]) -> None:
        """Samples the parameters: until the next merge only steps may change them."""
        self._samples = samples(weights, self._specs)

    def peek(
        self, weights: list[jax.Array], after: Any, leaves: Sequence[LeafState]
    ) -> list[jax.Array]:
        """As `collect`, but the update stays pending. What it changes comes back in new arrays."""
        uploads = None if self.pending is None else self._worker.wait(self.pending, after)
        if not uploads:
            return weights
        uploads = self._fetch_rest(uploads, after)
        return self._merge(weights, uploads, self.before, leaves, keep=True).weights

    def _merge(
        self,
        weights: list[jax.Array],
        uploads: Sequence[Sequence[jax.Array]],
        before: Sequence[jax.Array] | None,
        leaves: Sequence[LeafState],
        *,
        keep: bool = False,
    ) -> Merged:
        """The parameters with an update, whose arrays stay if `keep`."""
        now = [leaf.channels for leaf in self._offloaded.pick(leaves)]
        new = [
            assemble(pieces, weight.shape, part_sharding(weight, spec))
            for weight, spec, pieces in zip(
                weights, self._specs, by_leaf(self._parts, uploads), strict=True
            )
        ]
        before = now if before is None else before
        merged = merge(weights, new, before, now, self._samples, self._specs, keep=keep)
        placed = [as_before(x, weight) for x, weight in zip(merged.weights, weights, strict=True)]
        return merged._replace(weights=placed)

    def _fetch_rest(self, uploads: list[Any], after: Any) -> list[Any]:
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
            uploads[i] = [upload(leaves[i].to_upload, device) for device in self._parts[i].devices]
        # The next update writes to the arrays that they come from.
        jax.block_until_ready(uploads)
        self._worker.waited(begin, start)
        self.late_bytes += sum(x.nbytes for i in late for x in uploads[i])
        return uploads

    def reselect(
        self, weights: list[jax.Array], state: ZenFlowState
    ) -> tuple[list[jax.Array], list[LeafState]]:
        """Closes the window and hands channels over; entering ones are up to date at once.

        Args:
            weights: The parameter of each offloaded leaf.
            state: The current state.

        Returns:
            The parameters, and the states of all leaves.
        """
        weights = list(weights)
        leaves = list(state.leaves)
        states = self._offloaded.pick(leaves)
        self.before = [s.channels for s in states]
        chosen, current, scores = choose(
            weights,
            [s.scores for s in states],
            self.before,
            [s.master for s in states],
            specs=self._specs,
        )
        hand_over = HandOver(
            [
                (master, s.mu, s.nu, s.steps) if s.spec.k else None
                for s, master in zip(states, current, strict=True)
            ],
            chosen,
        )
        self.close_window(hand_over)
        entered = by_leaf(self._parts, self._worker.wait(hand_over.done, state.step))
        masters: list[jax.Array | None] = [None] * len(states)
        for j, (i, s) in enumerate(zip(self._offloaded.places, states, strict=True)):
            leaves[i], masters[j] = select_anew(s, chosen[j], scores[j], entered[j])
        some = [j for j, master in enumerate(masters) if master is not None]
        merged = enter(
            [weights[j] for j in some],
            [masters[j] for j in some],
            [leaves[self._offloaded.places[j]].channels for j in some],
            specs=tuple(self._specs[j] for j in some),
        )
        for j, weight in zip(some, merged, strict=True):
            weights[j] = as_before(weight, weights[j])
        return weights, leaves

    def measure(self, leaves: Sequence[LeafState]) -> jax.Array:
        """Starts to compute the selected channels' share of the best score."""
        states = self._offloaded.pick(leaves)
        scores, channels = [s.scores for s in states], [s.channels for s in states]
        return measure(scores, channels, specs=self._specs)

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
        self, pending: int, before: Sequence[np.ndarray], states: Sequence[LeafState]
    ) -> None:
        """Restores another run's pending update, from masters that are resumed already.

        Args:
            pending: What `wait` returned there.
            before: Each part's channels that were selected while its window was open.
            states: States of the offloaded leaves.
        """
        if pending == NONE:
            return
        uploads = []
        if pending == PENDING:
            for part, cast, early in zip(
                self._parts, self._host.casts(), self._offloaded.prefetched, strict=True
            ):
                devices = part.devices if early else ()
                uploads.append([upload(cast, device) for device in devices])
            # The next update writes to the arrays that they come from.
            jax.block_until_ready(uploads)
        self.pending = Future()
        self.pending.set_result(uploads)
        channels = [
            [upload(x, device) for device in part.devices]
            for part, x in zip(self._parts, before, strict=True)
        ]
        self.before = [
            assemble(pieces, leaf.channels.shape, leaf.channels.sharding)
            for pieces, leaf in zip(by_leaf(self._parts, channels), states, strict=True)
        ]
