"""Dispatches a step's programs and copies, in a fixed order, without waiting for results."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from zenflow_jax._device.memory import HOST
from zenflow_jax.layerwise._blocks import Block
from zenflow_jax.layerwise._programs import ModelProgram, trace_model
from zenflow_jax.layerwise._progress import Progress
from zenflow_jax.layerwise._tracing import floats_of, key_of, types_of
from zenflow_jax.layerwise._transfers import bytes_here, large_moved, moved
from zenflow_jax.layerwise._updates import AHEAD, Updates


@dataclasses.dataclass
class _Pass:
    """A step's micro-batches on the device; lists have an entry for each micro-batch."""

    program: ModelProgram
    batches: Sequence[Any]
    carries: list[Any]
    shared: list[Any]
    inputs: list[Any]  # of each layer that the backward pass reaches, kept for it
    places: list[tuple]  # the shardings of these layers' float inputs
    weighing: list[Any] = dataclasses.field(default_factory=list)
    total: Any = None  # the gradient of the outer weights that `last` reads
    g: list[Any] = dataclasses.field(default_factory=list)  # the carries' gradients
    g_shared: list[Any] = dataclasses.field(default_factory=list)

    def losses(self, outer: Any) -> list[tuple[jax.Array, jax.Array]]:
        """Runs `last`; returns each micro-batch's loss and weight."""
        shared = [[jax.tree.leaves(x)[j] for j in self.program.moving] for x in self.shared]
        self.places.append(_places(floats_of(self.carries[0])))
        self.of_shared = _places(shared[0])
        run = self.program.last(self.places[-1], self.of_shared)[len(self.batches) > 1]
        pairs = []
        for j, batch in enumerate(self.batches):
            made = run(self.total, outer, self.carries[j], shared[j], batch)
            pair, self.total, g, g_shared = made
            pairs.append(pair)
            self.g.append(g)
            self.g_shared.append(g_shared)
            self.carries[j] = None
        return pairs

    def backward(self, i: int, weights: Any, inputs: Any) -> tuple[Any, jax.Array]:
        """Runs the backward programs of block `i`; returns its gradient and sum of squares."""
        program, squares = self.program.first_backward((), (), ()), None
        if i:
            before, after = self.places.pop(), self.places[-1]
            program = self.program.layers[i - 1].backward(before, after, self.of_shared)
        total = None if i else self.total
        final = len(self.batches) - 1
        for j in range(final + 1):
            run = program.last if j == final > 0 else program.other
            arguments = (inputs[j], self.shared[j]) if i else (self.batches[j],)
            (total, squares), more = run(
                total, self.weighing[j], weights, self.g[j], self.g_shared[j], *arguments
            )
            self.g[j], self.g_shared[j] = more or (None, None)
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
        progress: Progress,
        *,
        inputs_to_host: bool,
        options: dict[str, Any] | None,
    ):
        self._functions, self._blocks, self._updates = functions, blocks, updates
        self._trains = [block.trains for block in blocks]
        # Lower blocks need no gradient.
        self._lowest = self._trains.index(True) if any(self._trains) else len(blocks)
        self.progress = progress
        self._inputs_to_host, self._options = inputs_to_host, options
        self._mean = jax.jit(_mean, compiler_options=options)
        # For `evaluate`; a loop may pass a new function each time.
        self._jitted = lru_cache(8)(partial(jax.jit, compiler_options=options))
        self._programs: dict[Any, ModelProgram] = {}
        self._layer_programs: dict[Any, Any] = {}
        self._throttle: deque[Any] = deque()
        # Copies of the previous layer's input, keyed by `id`.
        self._copied: dict[int, jax.Array] = {}
        self.bytes_to_host = self.bytes_to_device = 0  # on one device
        self.wait_s = 0.0

    def step(self, program: ModelProgram, batches: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
        """Dispatches a step, and returns its loss and verdict."""
        updates, blocks = self._updates, self._blocks
        outer, weights, run = self._forward(program, batches, self._lowest)
        losses, weighing = zip(*run.losses(blocks[0].treedef.unflatten(outer)), strict=True)
        loss, weights_sum = self._mean(losses, weighing)
        # A single micro-batch has no weight; the last of several also gets the sum of weights.
        run.weighing = [(x, None) for x in weighing[:-1]]
        run.weighing.append((weighing[-1], weights_sum) if run.weighing else None)
        self._dispatched(loss)
        updates.begin(loss, self.progress)
        for i in reversed(range(self._lowest, len(blocks))):
            inputs = self._taken(run.inputs.pop()) if i else None
            below = self._fetch(i - 1) if i > max(self._lowest, 1) else outer
            updates.before_program()
            gradient, squares = run.backward(i, blocks[i].treedef.unflatten(weights), inputs)
            del inputs
            self._dispatched(squares)
            updates.after_program(i, gradient, squares, weights)
            weights = below
            del gradient, below
        self.progress, verdict = updates.end()
        return loss, verdict

    def evaluate(self, program: ModelProgram, batch: Any, last: Callable | None) -> Any:
        outer, _, run = self._forward(program, [batch], len(self._blocks))
        outer = self._blocks[0].treedef.unflatten(outer)
        self._throttle.clear()
        if last is None:
            return program.loss(outer, run.carries[0], batch)[0]
        return self._jitted(last)(outer, run.carries[0], batch)

    def _forward(
        self, program: ModelProgram, batches: Sequence[Any], lowest: int
    ) -> tuple[list[Any], list[Any], _Pass]:
        """Dispatches the layers' forward programs; keeps the inputs of blocks from `lowest` on.

        Returns the outer weights and the last layer's, and the micro-batches.
        """
        outer, layers = self._fetch(0), program.layers
        tree = self._blocks[0].treedef.unflatten(outer)
        carries, shared = map(list, zip(*(program.first(tree, x) for x in batches), strict=True))
        run = _Pass(program, batches, carries, shared, [], [])
        weights = self._fetch(1)
        for i, layer in enumerate(layers):
            # Dispatched before the program that hides it, because dispatching allocates memory.
            following = self._fetch(i + 2) if i + 1 < len(layers) else weights
            if i + 1 >= lowest:
                run.places.append(_places(floats_of(carries[0])))
                run.inputs.append(self._kept([jax.tree.leaves(x) for x in carries], layer.kept))
            tree = self._blocks[i + 1].treedef.unflatten(weights)
            # All are made before an old one is freed, so that `_kept` can go by `id`.
            carries = [layer.run(tree, *pair) for pair in zip(carries, shared, strict=True)]
            self._dispatched(carries[-1])
            weights = following
        run.carries, self._copied = carries, {}
        return outer, weights, run

    def _kept(self, carries: list[list[jax.Array]], kept: Sequence[int]) -> list[list[jax.Array]]:
        """Returns the layer inputs that the backward pass needs, in the memory where they wait."""
        if not self._inputs_to_host:
            return [[leaves[j] for j in kept] for leaves in carries]
        known, self._copied = self._copied, {}  # a layer may pass on its input
        for x in (leaves[j] for leaves in carries for j in kept):
            if id(x) not in known:
                known[id(x)] = moved(x, HOST)
                self.bytes_to_host += bytes_here(x)
            self._copied[id(x)] = known[id(x)]
        return [[self._copied[id(leaves[j])] for j in kept] for leaves in carries]

    def _taken(self, inputs: list[list[jax.Array]]) -> list[list[jax.Array]]:
        if not self._inputs_to_host:
            return inputs
        self.bytes_to_device += sum(map(bytes_here, jax.tree.leaves(inputs)))
        return moved(inputs, "device")

    def _dispatched(self, result: Any) -> None:
        """Waits until Python is at most a few layers ahead of the device."""
        self._throttle.append(result)
        if len(self._throttle) > AHEAD:
            start = time.perf_counter()
            jax.block_until_ready(self._throttle.popleft())
            self.wait_s += time.perf_counter() - start

    def program(self, batch: Any) -> ModelProgram:
        """Returns the programs for batches of this shape, traced once."""
        shapes = types_of(batch)
        if (key := key_of(shapes)) not in self._programs:
            outer, *layers = (
                x.treedef.unflatten([leaf.weight for leaf in x.shapes]) for x in self._blocks
            )
            known = self._trains, self._options, self._layer_programs
            self._programs[key] = trace_model(*self._functions, outer, layers, shapes, *known)
        return self._programs[key]

    def _fetch(self, i: int) -> list[jax.Array]:
        """Starts to copy a block's weights to the device."""
        block = self._blocks[i]
        self.bytes_to_device += block.weights_nbytes
        return large_moved(block.weights(), "device")


def _places(arrays: Sequence[jax.Array]) -> tuple:
    return tuple(x.sharding for x in arrays)


def _mean(losses: Sequence[jax.Array], weights: Sequence[jax.Array]) -> tuple[Any, Any]:
    """Returns the micro-batches' weighted mean loss in float32, and the sum of the weights."""
    total = sum(weights, jnp.float32(0))
    if len(losses) == 1:
        return losses[0].astype(jnp.float32), total
    weighed = (x.astype(jnp.float32) * w for x, w in zip(losses, weights, strict=True))
    return sum(weighed, jnp.float32(0)) / jnp.where(total == 0, 1, total), total
