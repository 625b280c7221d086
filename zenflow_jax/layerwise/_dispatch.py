"""Dispatches a step's programs and copies, in a fixed order, without waiting for results."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from zenflow_jax._device.memory import HOST
from zenflow_jax.layerwise._blocks import Block
from zenflow_jax.layerwise._programs import ModelProgram, shares_of, trace_model
from zenflow_jax.layerwise._progress import Progress
from zenflow_jax.layerwise._tracing import key_of, types_of
from zenflow_jax.layerwise._transfers import Bus
from zenflow_jax.layerwise._updates import AHEAD, Updates


@dataclasses.dataclass
class _Pass:
    """A step's micro-batches on the device; lists have an entry for each micro-batch."""

    program: ModelProgram
    batches: Sequence[Any]
    shares_of: Callable[..., Any]  # as a program
    carries: list[Any]
    inputs: list[Any]  # of each block, kept for the backward pass
    places: list[tuple]  # the shardings of these inputs' varying leaves, and the last carry's
    total: Any = None  # the gradient of the outer weights that `last` reads
    g: list[Any] = dataclasses.field(default_factory=list)  # of the carries

    def losses(self, outer: PyTree) -> list[jax.Array]:
        """Runs `last`; returns each micro-batch's share in the loss."""
        program, several, shares = self.program, len(self.batches) > 1, [np.float32(1)]
        pairs = [*zip(self.carries, self.batches, strict=True)]
        if several:
            shares = self.shares_of([program.weight(outer, x[0], batch) for x, batch in pairs])
        losses, run = [], program.last(self.places[-1], several)
        self.carries = []
        for share in shares:
            loss, self.total, g = run(self.total, share, outer, *pairs.pop(0))
            losses.append(loss)
            self.g.append(g)
        return losses

    def backward(self, i: int, weights: PyTree, inputs: PyTree) -> tuple[Any, jax.Array]:
        """Runs the backward programs of block `i`; returns its gradient and sum of squares."""
        places, final = (self.places.pop(), self.places[-1]), len(self.g) - 1
        programs = self.program.blocks[i].backward(*places, final > 0)
        total, squares = None if i else self.total, None
        for j, x in enumerate(inputs):
            (total, squares), self.g[j] = programs[j < final](total, weights, self.g[j], x)
        assert squares is not None
        return total, squares


class Dispatcher:
    """Runs a model's programs.

    Block 0 contains the outer weights, block i + 1 the weights of layer i.
    """

    def __init__(
        self,
        functions: tuple[Callable, Sequence[Callable], Callable],
        blocks: Sequence[Block],
        updates: Updates,
        bus: Bus,
        progress: Progress,
        *,
        inputs_to_host: bool,
        options: dict[str, Any] | None,
    ):
        self._functions, self._blocks, self._updates = functions, blocks, updates
        self.progress, self._bus = progress, bus
        self._inputs_to_host, self._options = inputs_to_host, options
        self._sum, self._shares_of = (
            jax.jit(function, compiler_options=options) for function in (sum, shares_of)
        )
        # For `evaluate`; a loop may pass a new function each time.
        self._jitted = lru_cache(8)(partial(jax.jit, compiler_options=options))
        self._programs: dict[Any, ModelProgram] = {}
        self._throttle: deque[Any] = deque()
        self.wait_s = 0.0

    def step(self, program: ModelProgram, batches: Sequence[PyTree]) -> tuple[jax.Array, jax.Array]:
        """Dispatches a step, and returns its loss and verdict."""
        updates, blocks = self._updates, self._blocks
        outer, weights, run = self._forward(program, batches, keeps=True)
        losses = run.losses(blocks[0].tree(outer))
        loss = self._sum(losses) if len(losses) > 1 else losses[0]
        self._dispatched(loss)
        updates.begin(loss, self.progress)
        for i in reversed(range(len(blocks))):
            inputs = self._moved(i, run, run.inputs.pop(), "device")
            below = self._fetch(i - 1) if i > 1 else outer
            updates.before_program()
            gradient, squares = run.backward(i, blocks[i].tree(weights), inputs)
            del inputs
            self._dispatched(squares)
            updates.after_program(i, gradient, squares, weights)
            weights = below
            del gradient, below
        self.progress, verdict = updates.end()
        return loss, verdict

    def evaluate(self, program: ModelProgram, batch: PyTree, last: Callable | None) -> Any:
        outer, _, run = self._forward(program, [batch], keeps=False)
        self._throttle.clear()
        arguments = self._blocks[0].tree(outer), run.carries[0][0], batch
        return program.loss(*arguments) if last is None else self._jitted(last)(*arguments)

    def _forward(
        self, program: ModelProgram, batches: Sequence[PyTree], *, keeps: bool
    ) -> tuple[list[Any], list[Any], _Pass]:
        """Dispatches the blocks' forward programs; may keep inputs for the backward pass.

        Returns the outer weights and the last layer's, and the micro-batches.
        """
        outer = weights = self._fetch(0)
        run = _Pass(program, batches, self._shares_of, [*batches], [], [])
        varying: tuple[int, ...] = ()
        for i, block in enumerate(program.blocks):
            # Dispatched before the program that hides it, because dispatching allocates memory.
            following = self._fetch(i + 1) if i + 1 < len(program.blocks) else weights
            if keeps:
                leaves = [jax.tree.leaves(x) for x in run.carries]
                run.places.append(tuple(leaves[0][j].sharding for j in varying))
                inputs = [[each[j] for j in block.kept] for each in leaves]
                run.inputs.append(self._moved(i, run, inputs, HOST))
            tree, varying = self._blocks[i].tree(weights), block.varying
            for j, x in enumerate(run.carries):
                run.carries[j] = block.run(tree, x)
            self._dispatched(run.carries[-1])
            weights = following
        leaves = jax.tree.leaves(run.carries[0])
        run.places.append(tuple(leaves[j].sharding for j in varying))
        return outer, weights, run

    def _moved(self, i: int, run: _Pass, inputs: list[Any], kind: str) -> list[Any]:
        """Starts to copy inputs that the backward pass needs, if they wait in host memory."""
        if not self._inputs_to_host:
            return inputs
        return [self._bus.to(kind, x, run.program.blocks[i].moves) for x in inputs]

    def _dispatched(self, result: PyTree) -> None:
        """Waits until Python is at most a few layers ahead of the device."""
        self._throttle.append(result)
        if len(self._throttle) > AHEAD:
            start = time.perf_counter()
            jax.block_until_ready(self._throttle.popleft())
            self.wait_s += time.perf_counter() - start

    def program(self, batch: PyTree) -> ModelProgram:
        """Returns the programs for batches of this shape, traced once."""
        shapes = types_of(batch)
        if (key := key_of(shapes)) not in self._programs:
            outer, *layers = (x.tree(x.kind.weights) for x in self._blocks)
            arguments = *self._functions, outer, layers, shapes, self._options
            self._programs[key] = trace_model(*arguments)
        return self._programs[key]

    def _fetch(self, i: int) -> list[jax.Array]:
        """Starts to copy a block's weights to the device."""
        block = self._blocks[i]
        return self._bus.to("device", block.weights(), block.kind.large)
