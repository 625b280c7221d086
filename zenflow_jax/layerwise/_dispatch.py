"""Dispatches a step's programs and copies, in a fixed order, without waiting for results.

A block's update needs its gradient and weights, which are on the device after its backward program,
and its state, which must come. jax's copies to the device wait for the programs that were
dispatched before them, because they may reuse the programs' memory. So state is fetched before the
program that hides the fetch, and updates follow that program.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from zenflow_jax._checkpoint.saving import Snapshot
from zenflow_jax._device.memory import HOST
from zenflow_jax.layerwise._blocks import Block
from zenflow_jax.layerwise._optimizer import Bundle
from zenflow_jax.layerwise._programs import BlockProgram, ModelProgram, Pair, shares_of, trace_model
from zenflow_jax.layerwise._progress import Progress
from zenflow_jax.layerwise._tracing import key_of, types_of
from zenflow_jax.layerwise._transfers import moved

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


class Dispatcher:
    """Runs a model's programs, and updates its blocks.

    Block 0 contains the outer weights, block i + 1 the weights of layer i. During the backward pass
    (`at_once`), a block is updated after the next block's program has been dispatched; after it, in
    the order in which a step needs blocks.

    jax allocates memory when a copy is dispatched, so without `in_flight_bytes` Python would fetch
    the state of all layers at once, and without a limit of programs ahead their weights.
    """

    def __init__(
        self,
        functions: tuple[Callable, Sequence[Callable], Callable],
        blocks: Sequence[Block],
        decisions: tuple[Any, Any],
        progress: Progress,
        in_flight_bytes: int,
        jit: Any,
        *,
        at_once: bool,
        inputs_to_host: bool,
    ):
        self._functions, self._blocks = functions, blocks
        self._note, self._conclude = decisions
        self.progress, self._limit, self._jit = progress, in_flight_bytes, jit
        self._at_once, self._inputs_to_host = at_once, inputs_to_host
        self._sum, self._shares_of = jit(sum), jit(shares_of)
        # For `evaluate`; a loop may pass a new function each time.
        self._jitted = lru_cache(8)(jit)
        self._programs: dict[Any, ModelProgram] = {}
        self._ahead: deque[Any] = deque()  # results of programs
        self._bytes = 0  # of updates in flight
        self._leaving: deque[tuple[int, list[jax.Array]]] = deque()  # with their copies
        self.snapshots: list[Snapshot] = []  # saves that may still be running

    def program(self, batch: PyTree) -> ModelProgram:
        """Returns the programs for batches of this shape, traced once."""
        shapes = types_of(batch)
        if (key := key_of(shapes)) not in self._programs:
            outer, *layers = (x.tree(x.kind.weights) for x in self._blocks)
            arguments = *self._functions, outer, layers, shapes, self._jit
            self._programs[key] = trace_model(*arguments)
        return self._programs[key]

    def evaluate(self, program: ModelProgram, batch: PyTree, last: Callable | None) -> Any:
        outer, _, (carry,) = self._forward(program, [batch])
        self._ahead.clear()
        weights = self._blocks[0].tree(outer)
        if last is None:
            return program.last.run(weights, (carry, batch))
        return self._jitted(last)(weights, carry[0], batch)

    def step(self, program: ModelProgram, batches: Sequence[PyTree]) -> tuple[jax.Array, jax.Array]:
        """Dispatches a step, and returns its loss and verdict."""
        blocks, inputs, places = self._blocks, list[Any](), list[tuple]()
        outer, weights, carries = self._forward(program, batches, inputs, places)
        loss, total, g = self._losses(program, blocks[0].tree(outer), carries, batches, places[-1])
        self._dispatched(loss)
        self._waiting: dict[int, tuple[list[Any], list[Any]]] = {}  # gradients and weights
        self._early: dict[int, list[jax.Array]] = {}  # state, by the number of the bundle
        departing: deque[list[jax.Array]] = deque()  # gradients
        for i in reversed(range(len(blocks))):
            block, made = blocks[i], program.blocks[i]
            kept = [self._moved("device", made, x) for x in inputs.pop()]
            below = self._fetch(i - 1) if i > 1 else outer
            self._fetch_early()
            shardings = places.pop(), places[-1]
            programs = made.backward(*shardings, len(batches) > 1)
            before = None if i else total
            gradient, squares = _pulled(programs, before, block.tree(weights), g, kept)
            del kept, before
            self._dispatched(squares)
            if self._at_once:
                self._update_waiting()
            self.progress = self._note(self.progress, loss, squares, np.int32(i))
            if not self._at_once:
                weights = block.weights()
                if len(departing) >= AHEAD:  # a slow bus would keep them on the device
                    jax.block_until_ready(departing.popleft())
                gradient = moved(HOST, gradient)
                departing.append(gradient)
            self._waiting[i] = gradient, weights
            weights = below
            del gradient, below
        departing.clear()
        self._fetch_early()
        self._update_waiting()
        self.progress, verdict = self._conclude(self.progress)
        return loss, verdict

    def _forward(
        self,
        program: ModelProgram,
        batches: Sequence[PyTree],
        inputs: list[Any] | None = None,
        places: list[tuple] | None = None,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Dispatches the blocks' forward programs.

        Returns the outer weights, the last layer's, and the micro-batches' carries. Adds to
        `inputs`, for each block, the arrays that its backward program needs, and to `places` the
        shardings of the input's leaves that have gradients, and of the last carry's.
        """
        outer = weights = self._fetch(0)
        carries, varying = [*batches], ()
        for i, block in enumerate(program.blocks):
            # Dispatched before the program that hides it, because dispatching allocates memory.
            following = self._fetch(i + 1) if i + 1 < len(program.blocks) else weights
            if inputs is not None and places is not None:
                leaves = [jax.tree.leaves(x) for x in carries]
                places.append(tuple(leaves[0][j].sharding for j in varying))
                kept = [[each[j] for j in block.kept] for each in leaves]
                inputs.append([self._moved(HOST, block, x) for x in kept])
            tree, varying = self._blocks[i].tree(weights), block.varying
            for j, x in enumerate(carries):
                carries[j] = block.run(tree, x)
            self._dispatched(carries[-1])
            weights = following
        if places is not None:
            leaves = jax.tree.leaves(carries[0])
            places.append(tuple(leaves[j].sharding for j in varying))
        return outer, weights, carries

    def _moved(self, kind: str, block: BlockProgram, kept: list[Any]) -> list[Any]:
        """Returns a kept input, which may wait in host memory for the backward program."""
        if self._inputs_to_host:
            kept[: block.moving] = moved(kind, kept[: block.moving])
        return kept

    def _losses(
        self,
        program: ModelProgram,
        outer: PyTree,
        carries: list[Any],
        batches: Sequence[PyTree],
        places: tuple,
    ) -> tuple[jax.Array, Any, list[Any]]:
        """Runs `last`; returns the loss, the outer weights' gradient and those of the `carries`.

        The carries are freed.
        """
        last, several, shares = program.last, len(batches) > 1, [np.float32(1)]
        pairs = [*zip(carries, batches, strict=True)]
        carries.clear()
        if several:
            shares = self._shares_of([program.weight(outer, x[0], batch) for x, batch in pairs])
        run, losses, total, gradients = last.backward((), places, several)[several], [], None, []
        for share in shares:
            leaves = jax.tree.leaves(pairs.pop(0))
            kept = [leaves[j] for j in last.kept]
            del leaves
            (total, loss), g = run(total, outer, [share], kept)
            losses.append(loss)
            gradients.append(g)
        return self._sum(losses) if several else losses[0], total, gradients

    def _dispatched(self, result: PyTree) -> None:
        """Waits until Python is at most a few layers ahead of the device."""
        self._ahead.append(result)
        if len(self._ahead) > AHEAD:
            jax.block_until_ready(self._ahead.popleft())

    def _fetch(self, i: int) -> list[jax.Array]:
        """Starts to copy a block's weights to the device."""
        return moved("device", self._blocks[i].weights())

    def _fetch_early(self) -> None:
        for i in self._waiting if self._at_once else ():
            for number in fetched_early(self._blocks[i].kind.bundles, self._limit):
                self._early[number] = self._fetch_state(self._blocks[i], number)

    def _fetch_state(self, block: Block, number: int) -> list[jax.Array]:
        """Starts to fetch the arrays that only an update reads, after waiting for room."""
        bundle = block.kind.bundles[number]
        while self._bytes + bundle.nbytes > self._limit and self._leaving:
            size, copies = self._leaving.popleft()
            jax.block_until_ready(copies)
            self._bytes -= size
        self._bytes += bundle.nbytes
        return moved("device", block.arrays[number][len(bundle.places) :])

    def _update_waiting(self) -> None:
        """Updates blocks. Fetched arrays are donated; they may still be on their way."""
        for i in sorted(self._waiting):
            (gradient, weights), block = self._waiting.pop(i), self._blocks[i]
            rest = [x for x in range(len(block.arrays)) if x not in self._early]
            for number in (*self._early, *rest):
                bundle = block.kind.bundles[number]
                if number not in self._early:
                    self._early[number] = self._fetch_state(block, number)
                state = self._early.pop(number)
                # Emptying the lists frees the device's memory.
                g, w = _taken(gradient, bundle), _taken(weights, bundle)
                if not self._at_once:
                    g, w = moved("device", g), moved("device", w)
                first = block.number + bundle.places.start  # the first leaf's
                for snapshot in self.snapshots:
                    if not snapshot.done:  # waits only if the save may not keep more old arrays
                        snapshot.before_write(first, lambda: False)
                arguments = self.progress, np.int32(first), *w, *state
                new, report = bundle.update(g, *arguments)
                del state, g, w, arguments
                self.progress = self.progress._replace(report=report)
                block.arrays[number] = new = moved(HOST, new)
                self._leaving.append((bundle.nbytes, new))


def _pulled(
    programs: Pair, gradient: Any, weights: PyTree, g: list[Any], inputs: Sequence[Any]
) -> tuple[Any, Any]:
    """Runs a block's backward programs; returns its gradient and the sum of squares."""
    squares = None
    for j, x in enumerate(inputs):
        program = programs[j + 1 < len(inputs)]
        (gradient, squares), g[j] = program(gradient, weights, g[j], x)
    return gradient, squares


def _taken(arrays: list[Any], bundle: Bundle) -> list[jax.Array]:
    """Takes a bundle's arrays out of a block's list."""
    taken = [arrays[i] for i in bundle.places]
    for i in bundle.places:
        arrays[i] = None
    return taken
