"""The caller's half of a layerwise run: dispatches all programs and copies, in a fixed order."""

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zenflow_jax._device.memory import HOST, nbytes
from zenflow_jax._diagnostics.timeline import Recorder, Row
from zenflow_jax.layerwise._blocks import Block, moved
from zenflow_jax.layerwise._host import Host, TaskThread
from zenflow_jax.layerwise._programs import ModelProgram, key_of, shapes_of, trace_model

#: The maximum number of layers whose programs or gradients are in flight.
AHEAD = 2


class Dispatcher:
    """Runs a model's programs, and owns its weights in host memory.

    Block 0 contains the outer weights, block i + 1 the weights of layer i. A block's weights are a
    future while the host updates them.
    """

    def __init__(
        self,
        functions: tuple[Callable, Sequence[Callable], Callable],
        blocks: Sequence[Block],
        weights: Sequence[list[jax.Array]],
        host: Host,
        rate: Callable[[Any], Any],
        *,
        inputs_to_host: bool,
        options: dict[str, Any] | None,
    ):
        self._functions, self._blocks = functions, blocks
        self._trains = [block.trains for block in blocks]
        self._weights: list[list[jax.Array] | Future[list[jax.Array]]] = [*weights]
        self._host, self.watch = host, Watch(host.recorder)
        self._inputs_to_host, self._options = inputs_to_host, options
        self._rate = jax.jit(lambda count: jnp.asarray(rate(count), jnp.float32))
        self._mean = jax.jit(_mean)
        self._zeros = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree))
        # For `evaluate`; a loop may pass a new function each time.
        self._jitted = lru_cache(8)(partial(jax.jit, compiler_options=options))
        self._programs: dict[Any, ModelProgram] = {}
        self._layer_programs: dict[Any, Any] = {}
        self._decision: Future[None] | None = None
        self._updating: deque[Future[Any]] = deque()
        # Gradients, if updates begin after the backward pass.
        self._leaving: deque[list[jax.Array]] = deque()
        self._throttle: deque[Any] = deque()
        # Copies of the previous layer's input, keyed by `id`.
        self._copied: dict[int, jax.Array] = {}
        self._number = 0  # the current step
        self.bytes_to_host = self.bytes_to_device = 0

    def wait(self) -> None:
        """Waits for the last step's updates."""
        self.wait_for_decision()
        for i in range(len(self._weights)):
            self.weights(i)

    def wait_for_decision(self) -> None:
        """Waits until it is known whether the last step counts."""
        if self._decision is not None:
            self._host.result(self._decision)  # the decision has the sums of squares

    def tree(self, i: int) -> Any:
        """Returns a block's weights in host memory, as the user's tree."""
        return jax.tree.unflatten(self._blocks[i].treedef, self.weights(i))

    def step(self, number: int, program: ModelProgram, batches: Sequence[Any]) -> jax.Array:
        """Dispatches a step, and returns its loss."""
        self.wait_for_decision()  # the rate depends on the decision
        self._number = number
        rate = self._rate(np.int32(self._host.counted))
        layers, inputs = program.layers, []
        outer, weights, carries, shared = self._forward(program, batches, inputs)
        ends = [
            program.last(outer, carry, batch) for carry, batch in zip(carries, batches, strict=True)
        ]
        losses, weighing = zip(*(pair for pair, _ in ends), strict=True)
        g_outer, g = map(list, zip(*(pair for _, pair in ends), strict=True))
        del ends, carries
        loss, weights_sum = self._mean(losses, weighing)
        # A single micro-batch has no weight; the last of several also gets the sum of weights.
        is_last = [*[False] * (len(batches) - 1), True]
        sums = [weights_sum if x else None for x in is_last]
        weigh = [*zip(weighing, sums, strict=True)] if len(batches) > 1 else [None]
        self._dispatched("loss", loss)
        if self._host.at_once:
            self._decision = self._host.decide(self._number, rate, [loss])
        g_shared = self._zeros([[jax.tree.leaves(x)[j] for j in program.moving] for x in shared])
        mails: list[tuple[int, Any, jax.Array]] = []
        lowest = self._trains.index(True)  # lower layers need no gradient
        for i in reversed(range(max(lowest - 1, 0), len(layers))):
            # Inputs come first: this layer needs them, but only the next layer needs the weights.
            taken = moved(inputs.pop(), "device") if self._inputs_to_host else inputs.pop()
            below = self._fetch(i) if i > max(lowest - 1, 0) else None
            total = squares = None
            for j in range(len(batches)):
                (total, squares), (g[j], g_shared[j]) = layers[i].backward[is_last[j]](
                    total, weigh[j], weights, g[j], g_shared[j], taken[j], shared[j]
                )
            del taken
            self._dispatched("backward", squares)
            if self._trains[i + 1]:
                mails.append(self._send(i + 1, total, squares))
            weights, total = below, None
        if self._trains[0]:
            total = squares = None
            for j, batch in enumerate(batches):
                (total, squares), _ = program.first_backward[is_last[j]](
                    total, weigh[j], outer, g[j], g_shared[j], g_outer[j], batch
                )
                g_outer[j] = None
            mails.append(self._send(0, total, squares))
        if not self._host.at_once:
            squares = [x for _, _, x in mails]
            self._decision = self._host.decide(self._number, rate, squares)
            for i, mail, x in sorted(mails, key=lambda entry: entry[0]):
                self._update(i, mail, x)
        return loss

    def _forward(
        self, program: ModelProgram, batches: Sequence[Any], inputs: list[Any] | None = None
    ) -> tuple[Any, Any, list[Any], list[Any]]:
        """Dispatches the layers' forward programs, and adds their kept inputs to `inputs`.

        Returns the outer weights, the last layer's weights, and each batch's carry and shared data.
        """
        outer, layers = self._fetch(0), program.layers
        carries, shared = map(list, zip(*(program.first(outer, x) for x in batches), strict=True))
        weights = self._fetch(1)
        for i, layer in enumerate(layers):
            # Dispatched before the program that hides it, because dispatching allocates memory.
            following = self._fetch(i + 2) if i + 1 < len(layers) else weights
            if inputs is not None:
                inputs.append(self._keep([jax.tree.leaves(x) for x in carries], layer.kept))
            carries = [layer.run(weights, *pair) for pair in zip(carries, shared, strict=True)]
            self._dispatched("forward", carries)
            weights = following
        self._copied = {}
        return outer, weights, carries, shared

    def _keep(self, carries: list[list[jax.Array]], kept: Sequence[int]) -> list[list[jax.Array]]:
        """Returns the layer inputs that the backward pass needs, in the memory where they wait."""
        if not self._inputs_to_host:
            return [[leaves[j] for j in kept] for leaves in carries]
        known = self._copied  # a layer may pass on its input
        self._copied = {
            id(x): known[id(x)] if id(x) in known else moved(x, HOST)
            for leaves in carries
            for x in (leaves[j] for j in kept)
        }
        return [[self._copied[id(leaves[j])] for j in kept] for leaves in carries]

    def _send(self, i: int, gradient: Any, squares: Any) -> tuple[int, list[jax.Array], jax.Array]:
        """Copies a block's gradient to the host, which may immediately update the block."""
        while len(self._updating) >= AHEAD:
            self._host.result(self._updating.popleft())
        while len(self._leaving) >= AHEAD:  # a slow bus would keep gradients on the device
            jax.block_until_ready(self._leaving.popleft())
        mail = self._blocks[i].to_host(gradient)
        self.bytes_to_host += nbytes(mail)
        self.watch.add("mail", "copy", self._number, mail)
        if not self._host.at_once:
            self._leaving.append(mail)
        else:
            self._updating.append(self._update(i, mail, squares))
        return i, mail, squares

    def _update(self, i: int, mail: list[jax.Array], squares: jax.Array) -> "Future[Any]":
        future = self._host.update(i, self._number, list(self.weights(i)), mail, squares)
        self._weights[i] = future
        return future

    def _dispatched(self, kind: str, result: Any) -> None:
        """Records a layer's programs, and waits until Python is at most a few layers ahead."""
        self.watch.add("device", kind, self._number, result)
        self._throttle.append(result)
        if len(self._throttle) > AHEAD:
            start = time.perf_counter()
            jax.block_until_ready(self._throttle.popleft())
            self._host.recorder.add("caller", "wait for device", start, self._number)

    def evaluate(self, program: ModelProgram, batch: Any, last: Callable | None) -> Any:
        outer, _, (carry,), _ = self._forward(program, [batch])
        if last is None:
            return program.loss(outer, carry, batch)[0]
        return self._jitted(last)(outer, carry, batch)

    def program(self, batch: Any) -> ModelProgram:
        """Returns the programs for batches of this shape, traced once."""
        shapes = shapes_of(batch)
        if (key := key_of(shapes)) not in self._programs:
            outer, *layers = (block.abstract for block in self._blocks)
            known = self._trains, self._options, self._layer_programs
            self._programs[key] = trace_model(*self._functions, outer, layers, shapes, *known)
        return self._programs[key]

    def weights(self, i: int) -> list[jax.Array]:
        """Returns a block's weights in host memory; waits for its update."""
        weights = self._weights[i]
        if isinstance(weights, Future):
            weights = self._weights[i] = self._host.result(weights)
        return weights

    def _fetch(self, i: int) -> Any:
        """Starts to copy a block's weights to the device."""
        weights = self.weights(i)
        self.bytes_to_device += nbytes(weights)
        fetched = self._blocks[i].to_device(weights)
        self.watch.add("upload", "fetch", self._number, fetched)
        return fetched


class Watch:
    """Records when programs and copies end, on a thread for each row of the timeline.

    Does not keep arrays alive; misses arrays that are freed early.
    """

    def __init__(self, recorder: Recorder):
        rows: tuple[Row, ...] = ("device", "mail", "upload")
        self._recorder = recorder
        self._ends: dict[Row, float] = dict.fromkeys(rows, 0.0)
        self._threads: dict[Row, TaskThread] = {row: TaskThread("zenflow-watch") for row in rows}

    def add(self, row: Row, kind: str, step: int, result: Any) -> None:
        """Watches a program or copy that was just dispatched, which ends with its last array."""
        if arrays := jax.tree.leaves(result):
            event = row, kind, step, weakref.ref(arrays[-1]), time.perf_counter()
            self._threads[row].submit(self._record, *event)

    def close(self) -> None:
        for thread in self._threads.values():
            thread.end()

    def _record(self, row: Row, kind: str, step: int, known: Any, dispatched: float) -> None:
        if (array := known()) is not None:
            array.block_until_ready()  # if it was donated or failed, the caller's error says so
            del array
            start = max(dispatched, self._ends[row])
            self._ends[row] = self._recorder.add(row, kind, start, step)


def _mean(losses: Sequence[jax.Array], weights: Sequence[jax.Array]) -> tuple[Any, Any]:
    """Returns the micro-batches' weighted mean loss in float32, and the sum of the weights."""
    total = sum(weights, jnp.float32(0))
    if len(losses) == 1:
        return losses[0].astype(jnp.float32), total
    weighed = (x.astype(jnp.float32) * w for x, w in zip(losses, weights, strict=True))
    return sum(weighed, jnp.float32(0)) / jnp.where(total == 0, 1, total), total
