"""The order of a step's updates: during the backward pass, or after it.

A block's updates need its gradient and weights, which are on the device after its backward program,
and its state, which must come. jax's copies to the device wait for the programs that were
dispatched before them, because they may reuse the programs' memory. So state is fetched before the
program that hides the fetch, and updates follow that program.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zenflow_jax._checkpoint.saving import Snapshot
from zenflow_jax._device.memory import HOST
from zenflow_jax.layerwise._blocks import Block
from zenflow_jax.layerwise._optimizer import Bundle
from zenflow_jax.layerwise._progress import Judge, Progress
from zenflow_jax.layerwise._transfers import Bus

#: The maximum number of layers whose programs or gradients are in flight.
AHEAD = 2


def fetched_early(bundles: Sequence[Bundle], in_flight_bytes: int) -> list[int]:
    """Returns the bundles of a block whose state is fetched behind the next backward program.

    The program waits until there is room for them, beside the last block's arrays that are leaving.
    These are more (AdamW: 12 bytes per parameter, not 10), so they get the larger part.
    """
    room, chosen = in_flight_bytes * 2 // 5, []
    for i in sorted(range(len(bundles)), key=lambda i: -bundles[i].others_nbytes):
        if bundles[i].others_nbytes <= room:
            room -= bundles[i].others_nbytes
            chosen.append(i)
    return chosen


class Updates:
    """Updates the blocks of a step.

    A step calls `begin`, then for each block, from the last, `before_program` and `after_program`
    around its backward program, then `end`. During the backward pass, a block is updated after the
    next block's program has been dispatched; after it, in the order in which a step needs blocks.

    Arrays are fetched for an update, updated in place, and copied to host memory. jax allocates
    memory when a copy is dispatched, so without `in_flight_bytes` Python would fetch the state of
    all layers at once.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        judge: Judge,
        bus: Bus,
        in_flight_bytes: int,
        *,
        at_once: bool,
    ):
        self._blocks, self._judge, self._limit = blocks, judge, in_flight_bytes
        self._bus, self._at_once = bus, at_once
        self._bytes = 0  # in flight
        self._leaving: deque[tuple[int, list[jax.Array]]] = deque()  # with their copies
        self.snapshots: list[Snapshot] = []  # saves that may still be running

    def begin(self, loss: jax.Array, progress: Progress) -> None:
        self._progress, self._control = progress, self._judge.begin(loss, progress.shares)
        # The gradients and weights of the blocks without updates.
        self._waiting: dict[int, tuple[list[Any], list[Any]]] = {}
        self._early: dict[int, list[jax.Array]] = {}  # state, by the number of the bundle
        self._departing: deque[list[jax.Array]] = deque()  # gradients

    def before_program(self) -> None:
        for block in (self._blocks[i] for i in self._waiting if self._at_once):
            for number in fetched_early(block.kind.bundles, self._limit):
                self._early[number] = self._fetch(block, number)

    def after_program(self, i: int, gradient: list[Any], squares: Any, weights: list[Any]) -> None:
        if self._at_once:
            self._update_waiting()
        block, shares = self._blocks[i], self._progress.shares
        self._control = self._judge.note(self._control, shares, squares, np.int32(i))
        if not self._at_once:
            weights = block.weights()
            if len(self._departing) >= AHEAD:  # a slow bus would keep them on the device
                jax.block_until_ready(self._departing.popleft())
            gradient = self._bus.to(HOST, gradient, block.kind.large)
            self._departing.append(gradient)
        self._waiting[i] = gradient, weights

    def end(self) -> tuple[Progress, jax.Array]:
        """Returns the new progress, and the step's verdict."""
        self.before_program()
        self._departing.clear()
        self._update_waiting()
        return self._judge.conclude(self._progress, self._control)

    def _update_waiting(self) -> None:
        for i in sorted(self._waiting):
            (gradient, weights), block = self._waiting.pop(i), self._blocks[i]
            rest = [x for x in range(len(block.kind.bundles)) if x not in self._early]
            for number in (*self._early, *rest):
                bundle = block.kind.bundles[number]
                if number not in self._early:
                    self._early[number] = self._fetch(block, number)
                state = self._early.pop(number)
                # Emptying the lists frees the device's memory.
                g, w = _taken(gradient, bundle), _taken(weights, bundle)
                if not self._at_once:
                    large = bundle.large[: len(w)]
                    g = self._bus.to("device", g, large)
                    w = self._bus.to("device", w, large)
                self._update(block, number, g, [*w, *state])
                del state, g, w

    def _fetch(self, block: Block, number: int) -> list[jax.Array]:
        """Starts to fetch the arrays that only an update reads, after waiting for room."""
        bundle = block.kind.bundles[number]
        while self._bytes + bundle.nbytes > self._limit and self._leaving:
            size, copies = self._leaving.popleft()
            jax.block_until_ready(copies)
            self._bytes -= size
        self._bytes += bundle.nbytes
        count = len(bundle.places)
        return self._bus.to("device", block.arrays[number][count:], bundle.large[count:])

    def _update(self, block: Block, number: int, gradient: Any, arrays: Any) -> None:
        """Updates a bundle. Large arrays are donated; their copies may still be on their way."""
        bundle = block.kind.bundles[number]
        first = block.number + bundle.places[0]  # the first leaf's
        for snapshot in self.snapshots:
            if not snapshot.done:  # waits only if the save may not keep more old arrays
                snapshot.before_write(first, lambda: False)
        new, report = bundle.update(gradient, self._control, np.int32(first), *arrays)
        self._control = self._control._replace(report=report)
        block.arrays[number] = new = self._bus.to(HOST, new, bundle.large)
        self._leaving.append((bundle.nbytes, new))


def _taken(arrays: list[Any], bundle: Bundle) -> list[jax.Array]:
    """Takes a bundle's arrays out of a block's list."""
    taken = [arrays[i] for i in bundle.places]
    for i in bundle.places:
        arrays[i] = None
    return taken
