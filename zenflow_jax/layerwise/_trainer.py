"""`Trainer`: the order of one step, on the caller's thread.

The caller dispatches all programs and copies, in the same order in every process.
"""

import itertools
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zenflow_jax._device.memory import HOST, nbytes, upload
from zenflow_jax._diagnostics.stats import EngineStats
from zenflow_jax._diagnostics.timeline import Timeline
from zenflow_jax._exchange.checks import is_compact
from zenflow_jax._exchange.peers import PeerMonitor
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._spec.rules import check_int_or_none, check_one_of
from zenflow_jax._spec.scalars import AdamScalars
from zenflow_jax.layerwise._blocks import BlockState, Leaf, make_leaf, map_leaves, moved
from zenflow_jax.layerwise._host import Host
from zenflow_jax.layerwise._programs import ModelProgram, trace_model
from zenflow_jax.layerwise._saving import BlockStream, check_saved, saved_leaves
from zenflow_jax.layerwise._watch import Watch

#: Layers that may be in flight: their programs, or their gradients.
AHEAD = 2
_NUMBERS = itertools.count()


class Trainer:
    """Trains a model with AdamW, layer by layer; weights and state are in host memory.

    The device has two layers at a time: the current one, and the next in flight. Python calls one
    program for each layer, forward and backward. The model is three pure functions:

    * `first(outer, batch)` returns (carry, shared): the input of layer 0, and whatever all layers
      read, such as rotations or an encoder's output (None for nothing).
    * `layer(weights, carry, shared)` returns the next carry.
    * `last(outer, carry, batch)` returns the loss, a scalar; or (loss, weight), to weigh
      micro-batches by their targets, for instance.

    Any tree of arrays can be a carry. The backward pass computes each layer again.

    With `updates="after_backward"` the run is `optax.adamw`, behind `optax.clip_by_global_norm` if
    `max_grad_norm` is given: the host begins when all gradients are there, with the weights that
    the next step needs first. A step whose gradient is not finite is skipped. With
    "during_backward" the host updates each layer when its gradient arrives, while the device
    continues. Clipping then uses a projected norm: the sum of squares so far in the step, divided
    by these layers' share in earlier steps. A step whose loss is not finite is skipped; if only a
    gradient is not finite, the run ends with an error.

    Host memory: 14 bytes per parameter with bf16 weights (8.2 with compact moments), 2 of them
    pinned; "after_backward" needs 2 more for gradients, pinned as well. Only one thread may call a
    trainer; on a mesh over several processes, all must make the same calls.

    Args:
        params: {"outer": tree, "layers": iterable of trees}, in NumPy or jax arrays in any memory,
            in float dtypes. jax arrays keep their sharding; NumPy arrays go to the first device.
            An iterator saves memory: the trainer takes one layer at a time.
        first, layer, last: The model. `layer` may be a sequence with one function for each layer.
            Functions that are the same object share a program.
        learning_rate: A number, or an optax schedule. It counts no skipped steps.
        b1, b2, eps, weight_decay: As in `optax.adamw`.
        mask: Function from the weights of one layer, or the outer weights, to a tree of bools:
            where weight decay applies. By default everywhere.
        max_grad_norm: The global norm to which gradients are clipped; None for no clipping.
        updates: "after_backward" or "during_backward", as above.
        inputs: Where the layers' inputs wait for the backward pass: on the "device", or in pinned
            "host" memory, for long sequences.
        frozen: Numbers of layers that are not trained, and "outer" for the outer weights.
        host_state, host_kernel, threads: As for `HostEngine`.
        max_skipped: The next call raises after this many consecutive skipped steps. None: never.
        compiler_options: For all programs, as in `jax.jit`.
        state: What `state` returned, or `EngineRestore` restored: resumes that run with the same
            bits. `params` then give structure, shardings and frozen weights.
        exit_if_stuck: As for `HostEngine`.

    Raises:
        ValueError: If an argument is out of range, or `state` belongs to another model; in `step`,
            if a function uses an array that is not among its arguments.
        TypeError: If `params` have another structure, or are not floats; in `step`, if the
            functions do not fit each other.

    Examples:
        >>> import jax.numpy as jnp, numpy as np
        >>> from zenflow_jax import layerwise
        >>> rng = np.random.default_rng(0)
        >>> params = {
        ...     "outer": {"head": rng.normal(size=(8, 3)).astype(np.float32)},
        ...     "layers": [rng.normal(size=(8, 8)).astype(np.float32) / 8 for _ in range(4)],
        ... }
        >>> trainer = layerwise.Trainer(
        ...     params,
        ...     first=lambda outer, batch: (batch["x"], None),
        ...     layer=lambda w, x, _: x + jnp.tanh(x @ w),
        ...     last=lambda outer, x, batch: jnp.mean((x @ outer["head"] - batch["y"]) ** 2),
        ...     learning_rate=1e-2,
        ... )
        >>> batch = {"x": jnp.ones((2, 8)), "y": jnp.zeros((2, 3))}
        >>> with trainer:
        ...     losses = [float(trainer.step(batch)) for _ in range(20)]
        ...     params = trainer.params()
        >>> losses[-1] < losses[0]
        True
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        *,
        first: Callable[[Any, Any], tuple[Any, Any]],
        layer: Callable[[Any, Any, Any], Any] | Sequence[Callable[[Any, Any, Any], Any]],
        last: Callable[[Any, Any, Any], Any],
        learning_rate: float | Callable[[Any], Any],
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 1e-4,
        mask: Callable[[Any], Any] | None = None,
        max_grad_norm: float | None = None,
        updates: str = "after_backward",
        inputs: str = "device",
        frozen: Collection[int | str] = (),
        host_state: str = "float32",
        host_kernel: str = "numba",
        threads: int | None = None,
        max_skipped: int | None = None,
        compiler_options: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        exit_if_stuck: bool = True,
    ):
        check_one_of("updates", updates, ("after_backward", "during_backward"))
        check_one_of("inputs", inputs, ("device", "host"))
        check_int_or_none("max_skipped", max_skipped, 1)
        for name, value, most in (("b1", b1, 1), ("b2", b2, 1), ("eps", eps, math.inf)):
            if not 0 <= value < most:
                raise ValueError(f"`{name}` must be at least 0 and below {most}, got {value}.")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"`max_grad_norm` must be above 0, or None, got {max_grad_norm}.")
        if not isinstance(params, Mapping) or params.keys() != {"outer", "layers"}:
            raise TypeError('`params` must be a mapping with the keys "outer" and "layers".')
        rate = learning_rate if callable(learning_rate) else (lambda _: learning_rate)
        self._rate = jax.jit(lambda count: jnp.asarray(rate(count), jnp.float32))
        self._first, self._last, self._options = first, last, compiler_options
        self._at_once, self._inputs_to_host = updates == "during_backward", inputs == "host"
        self._make_blocks(params, frozen, mask, is_compact(host_state), state)
        layers = len(self._blocks) - 1
        self._functions = [layer] * layers if callable(layer) else list(layer)
        if len(self._functions) != layers:
            raise ValueError(
                f"`layer` has {len(self._functions)} functions for {layers} layers. Pass one for "
                "all layers, or one for each."
            )
        self._programs: dict[Any, ModelProgram] = {}
        self._layer_programs: dict[Any, Any] = {}
        self._ends: dict[Any, Any] = {}  # compiled `last` functions of `evaluate`
        self._mean = jax.jit(_mean)
        counts = {} if state is None else state["counts"]
        #: The number of steps taken, skipped steps included.
        self.steps = int(counts.get("step", 0))
        self._decision: Future[None] | None = None
        self._updating: deque[Future[Any]] = deque()
        self._interrupted = False
        self._bytes_to_host = self._bytes_to_device = 0
        devices = {device for leaf in self._leaves for device in leaf.sharding.device_set}
        self._processes = sorted({device.process_index for device in devices})
        self._peers = PeerMonitor(
            f"layerwise {next(_NUMBERS)}", self._processes, exit_if_stuck=exit_if_stuck
        )
        sizes = [x.nbytes if y else 0 for x, y in zip(self._blocks, self._trains, strict=True)]
        # Last: a failed constructor must not leak a thread.
        self._host = Host(
            [x if y else None for x, y in zip(self._blocks, self._trains, strict=True)],
            AdamScalars(0.0, b1, b2, 1 - b1, 1 - b2, eps, weight_decay),
            HostAdam(host_kernel, threads),
            self._peers,
            at_once=self._at_once,
            max_grad_norm=max_grad_norm,
            max_skipped=max_skipped,
            step=self.steps,
            counted=int(counts.get("counted", 0)),
            shares=np.asarray(counts.get("shares", np.array(sizes) / sum(sizes)), np.float32),
        )
        self._watch = Watch(self._host.recorder)
        weakref.finalize(self, self._watch.close)

    def _make_blocks(
        self,
        params: Mapping[str, Any],
        frozen: Collection[int | str],
        mask: Callable[[Any], Any] | None,
        compact: bool,
        state: Mapping[str, Any] | None,
    ) -> None:
        """Makes the blocks: number 0 has the outer weights, number i + 1 those of layer i."""
        saved = None if state is None else saved_leaves(state)
        self._blocks: list[BlockState] = []
        self._treedefs: list[Any] = []
        self._weights: list[list[jax.Array] | Future[list[jax.Array]]] = []
        self._trains: list[bool] = []
        names: list[int | str] = []
        for name, tree in itertools.chain(
            [("outer", params["outer"])], enumerate(params["layers"])
        ):
            names.append(name)
            trains = name not in frozen
            paths = jax.tree.leaves(map_leaves(lambda path, _: path, tree))
            decays = [True] * len(paths) if mask is None else jax.tree.leaves(mask(tree))
            arrays, leaves = [], []
            prefix = "outer" if name == "outer" else f"layers.{name}"
            for path, x, decay in zip(paths, jax.tree.leaves(tree), decays, strict=True):
                full = f"{prefix}.{path}" if path else prefix
                arrays.append(x := _placed(full, x))
                of_leaf = next(saved, None) if saved is not None and trains else None
                if saved is not None and trains:
                    check_saved(full, x, of_leaf)
                leaves.append(
                    make_leaf(
                        full, x, decays=bool(decay), trains=trains, compact=compact, saved=of_leaf
                    )
                )
            block = BlockState(tuple(leaves))
            resumes = trains and state is not None
            self._weights.append(block.weights() if resumes else moved(arrays, HOST))
            self._blocks.append(block)
            self._treedefs.append(jax.tree.structure(tree))
            self._trains.append(trains)
        if unknown := set(frozen) - set(names):
            raise ValueError(
                f"`frozen` has {sorted(map(str, unknown))}, but the layers are 0 to "
                f'{len(names) - 2}. Use these numbers, and "outer" for the outer weights.'
            )
        if not any(self._trains):
            raise ValueError("`frozen` has all weights. Leave some to train.")
        if saved is not None and next(saved, None) is not None:
            raise ValueError("`state` has more weights than `params`. Pass the model that it is of.")

    @property
    def stats(self) -> EngineStats:
        """Returns counts, seconds and bytes so far."""
        return EngineStats(
            steps=self.steps,
            skipped_steps=self._host.skipped,
            bytes_to_host=self._bytes_to_host,
            bytes_to_device=self._bytes_to_device,
            host_bytes=sum(block.nbytes for block in self._blocks),
            **self._host.recorder.seconds(),
        )

    @property
    def timeline(self) -> Timeline:
        """Returns the timeline of the last few steps, always recorded."""
        return self._host.recorder.timeline()

    def step(self, *batches: Any) -> jax.Array:
        """Takes one step, and returns its loss without waiting for it.

        Args:
            batches: A batch, which is any tree of arrays, or several micro-batches with the same
                shapes. Weights are fetched once for all of them, forward and backward.

        Returns:
            A float32 scalar: the mean loss of the micro-batches, by their weights.

        Raises:
            RuntimeError: If the trainer is closed, was interrupted, or an update has failed.
            FloatingPointError: If `max_skipped` consecutive steps were skipped; or, with
                updates="during_backward", if a gradient was not finite.
        """
        if not batches:
            raise TypeError("`step` needs a batch. Pass one, or several micro-batches.")
        self._check()
        program = self._program(batches[0])
        if any(self._program(batch) is not program for batch in batches[1:]):
            raise ValueError("Micro-batches must have the same shapes and dtypes. Pad them.")
        if self._decision is not None:
            self._host.result(self._decision)  # the rate depends on whether the last step counted
        start, self._interrupted = time.perf_counter(), True
        try:
            loss = self._take_step(program, batches)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                error.add_note(
                    "The device's memory is full. Pass fewer examples at a time, as micro-batches; "
                    'use inputs="host"; or divide large layers into several.'
                )
            raise
        self._interrupted = False
        self._peers.passed()
        self._host.recorder.called("step", self.steps, start)
        return loss

    def _take_step(self, program: ModelProgram, batches: Sequence[Any]) -> jax.Array:
        self.steps += 1
        rate = self._rate(np.int32(self._host.counted))
        several, layers = len(batches) > 1, program.layers
        outer = self._fetch(0)
        carries, shared = map(list, zip(*(program.first(outer, x) for x in batches), strict=True))
        inputs, throttle, weights = [], deque[Any](), self._fetch(1) if layers else None
        for i, layer in enumerate(layers):
            # Before the program that hides the copy: its memory is allocated now.
            following = self._fetch(i + 2) if i + 1 < len(layers) else weights
            kept = [[jax.tree.leaves(carry)[j] for j in layer.kept] for carry in carries]
            carries = [
                layer.run(weights, *pair) for pair in zip(carries, shared, strict=True)
            ]
            inputs.append(moved(kept, HOST) if self._inputs_to_host else kept)
            self._dispatched("forward", throttle, carries)
            weights = following
        ends = [
            program.last(outer, carry, batch) for carry, batch in zip(carries, batches, strict=True)
        ]
        losses, weighing = zip(*(pair for pair, _ in ends), strict=True)
        g_outer, g = map(list, zip(*(pair for _, pair in ends), strict=True))
        del ends, carries
        loss, weights_sum = self._mean(losses, weighing)
        self._dispatched("last", throttle, loss)
        if self._at_once:
            self._decision = self._host.decide(self.steps, rate, [loss])
        g_shared = [[jnp.zeros_like(jax.tree.leaves(x)[j]) for j in program.moving] for x in shared]
        mails: list[tuple[int, Any, jax.Array]] = []
        lowest = self._trains.index(True)  # nothing below needs a gradient
        for i in reversed(range(max(lowest - 1, 0), len(layers))):
            below = self._fetch(i) if i > max(lowest - 1, 0) else None
            taken = moved(inputs.pop(), "device") if self._inputs_to_host else inputs.pop()
            total = squares = None
            for j, x in enumerate(taken):
                is_last = j == len(taken) - 1
                run = layers[i].backward[is_last]
                weigh = (weighing[j], weights_sum if is_last else None) if several else (None, None)
                total, squares, g[j], g_shared[j] = run(
                    weights, x, shared[j], g[j], g_shared[j], total, *weigh
                )
            del taken, x
            self._dispatched("backward", throttle, g)
            if self._trains[i + 1]:
                mails.append(self._send(i + 1, total, squares))
            weights, total = below, None
        if self._trains[0]:
            total = squares = None
            for j, batch in enumerate(batches):
                is_last = j == len(batches) - 1
                weigh = (weighing[j], weights_sum if is_last else None) if several else (None, None)
                total, squares = program.first_backward[is_last](
                    outer, batch, g[j], g_shared[j], g_outer[j], total, *weigh
                )
                g_outer[j] = None
            mails.append(self._send(0, total, squares))
        if not self._at_once:
            squares = [x for _, _, x in mails]
            self._decision = self._host.decide(self.steps, rate, squares)
            for i, mail, x in sorted(mails, key=lambda of_block: of_block[0]):
                self._update(i, mail, x)
        return loss

    def _send(self, i: int, gradient: Any, squares: Any) -> tuple[int, list[jax.Array], jax.Array]:
        """Copies a block's gradient to the host, which may update the block at once."""
        while len(self._updating) >= AHEAD:
            self._host.result(self._updating.popleft())
        mail = moved(jax.tree.leaves(gradient), HOST)
        self._bytes_to_host += nbytes(mail)
        self._watch.add("mail", "copy", self.steps, mail)
        if self._at_once:
            self._updating.append(self._update(i, mail, squares))
        return i, mail, squares

    def _update(self, i: int, mail: list[jax.Array], squares: jax.Array) -> "Future[Any]":
        future = self._host.update(i, self.steps, list(self._weights_of(i)), mail, squares)
        self._weights[i] = future
        return future

    def _dispatched(self, kind: str, throttle: deque[Any], result: Any) -> None:
        """Records a layer's programs, and waits until Python is few layers ahead of the device."""
        self._watch.add("device", kind, self.steps, result)
        throttle.append(result)
        if len(throttle) > AHEAD:
            start = time.perf_counter()
            jax.block_until_ready(throttle.popleft())
            now = time.perf_counter()
            self._host.recorder.waited(start, now, now)

    def evaluate(self, batch: Any, last: Callable[[Any, Any, Any], Any] | None = None) -> Any:
        """Returns the loss of a batch, or the result of another `last`; trains nothing.

        `last(outer, carry, batch)` may return any tree of arrays. Waits for pending updates, layer
        by layer, but not for the result.
        """
        self._check()
        program = self._program(batch)
        outer = self._fetch(0)
        carry, shared = program.first(outer, batch)
        throttle, weights = deque[Any](), self._fetch(1) if program.layers else None
        for i, layer in enumerate(program.layers):
            following = self._fetch(i + 2) if i + 1 < len(program.layers) else None
            carry = layer.run(weights, carry, shared)
            self._dispatched("forward", throttle, carry)
            weights = following
        if last is None:
            return program.loss(outer, carry, batch)[0]
        if last not in self._ends:
            self._ends[last] = jax.jit(last, compiler_options=self._options)
        return self._ends[last](outer, carry, batch)

    def params(self) -> dict[str, Any]:
        """Returns the weights after the last step, in the structure of the constructor's `params`.

        The arrays are in pinned host memory, and never change. Waits for pending updates.
        """
        self.wait()
        pairs = enumerate(self._treedefs)
        outer, *layers = (jax.tree.unflatten(x, self._weights_of(i)) for i, x in pairs)
        return {"outer": outer, "layers": layers}

    def master_params(self) -> dict[str, Any]:
        """Returns the weights in float32, as NumPy arrays; frozen weights in their own dtype.

        Every piece of each leaf must be in this process.
        """
        params = self.params()
        outer, *layers = (
            jax.tree.unflatten(treedef, [block.masters(i) for i in range(len(block.leaves))])
            if trains
            else jax.tree.map(np.asarray, weights)
            for treedef, block, trains, weights in zip(
                self._treedefs,
                self._blocks,
                self._trains,
                [params["outer"], *params["layers"]],
                strict=True,
            )
        )
        return {"outer": outer, "layers": layers}

    def state(self) -> dict[str, Any]:
        """Copies the state for a checkpoint: 12 bytes per trained parameter, as NumPy arrays.

        Pass it to a new trainer as `state`. It has the weights, except frozen ones. With orbax,
        `EngineSave(trainer)` saves the same without a copy, from all processes.
        """
        return self.stream(0).tree()

    def stream(self, copy_bytes: int | None = None) -> BlockStream:
        """Returns the state as a stream that `EngineSave` writes while the run continues.

        Write or close the stream, or the run waits for ever. `copy_bytes` is `EngineSave`'s; None
        means no copies.
        """
        self.wait()
        counts = {
            "step": np.array(self.steps, np.int32),
            "token": np.array(self._host.counted, np.int32),
            "counted": np.array(self._host.counted, np.int32),
            "shares": self._host.shares.copy(),
        }
        blocks = {i: x for i, x in enumerate(self._host.blocks) if x is not None}
        return BlockStream(blocks, self._host.snapshot(copy_bytes or 0), counts, self._processes)

    def wait(self) -> None:
        """Waits for the last step's updates, and raises their errors."""
        self._check()
        if self._decision is not None:
            self._host.result(self._decision)
        for i in range(len(self._weights)):
            self._weights_of(i)

    def close(self) -> None:
        """Ends the threads; drops updates that have not begun. Safe twice."""
        self._host.close()
        self._watch.close()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None and not self._host.closed:
            self.wait()
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("A trainer cannot be copied or pickled. Save `trainer.state()`.")

    @property
    def _leaves(self) -> list[Leaf]:
        return [leaf for block in self._blocks for leaf in block.leaves]

    def _check(self) -> None:
        self._host.check()
        if self._interrupted:
            raise RuntimeError(
                "The last step was interrupted, so some weights may have its update and others "
                "not. Resume from the last checkpoint."
            )

    def _program(self, batch: Any) -> ModelProgram:
        leaves, treedef = jax.tree.flatten(batch)
        key = treedef, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)
        if key not in self._programs:
            outer, *layers = (
                jax.tree.unflatten(treedef, [leaf.abstract for leaf in block.leaves])
                for treedef, block in zip(self._treedefs, self._blocks, strict=True)
            )
            self._programs[key] = trace_model(
                self._first,
                self._functions,
                self._last,
                outer,
                layers,
                batch,
                self._trains,
                self._options,
                self._layer_programs,
            )
        return self._programs[key]

    def _weights_of(self, i: int) -> list[jax.Array]:
        """Returns a block's weights in host memory; waits for its update."""
        weights = self._weights[i]
        if isinstance(weights, Future):
            weights = self._weights[i] = self._host.result(weights)
        return weights

    def _fetch(self, i: int) -> Any:
        """Starts to copy a block's weights to the device."""
        weights = self._weights_of(i)
        self._bytes_to_device += nbytes(weights)
        fetched = moved(weights, "device")
        self._watch.add("upload", "fetch", self.steps, fetched)
        return jax.tree.unflatten(self._treedefs[i], fetched)


def _placed(path: str, x: Any) -> jax.Array:
    """Returns a leaf as a jax array."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise TypeError(
            f"{path} is {jnp.result_type(x).name}, but weights must be floats. Return other arrays "
            "from `first` in `shared`."
        )
    if isinstance(x, jax.Array):
        return x
    return upload(np.asarray(x), jax.local_devices()[0], HOST)


def _mean(losses: Sequence[jax.Array], weights: Sequence[jax.Array]) -> tuple[Any, Any]:
    """Returns the mean loss of micro-batches by their weights, float32, and the weights' sum."""
    total = sum(weights, jnp.float32(0))
    if len(losses) == 1:
        return losses[0].astype(jnp.float32), total
    weighed = (x.astype(jnp.float32) * w for x, w in zip(losses, weights, strict=True))
    return sum(weighed, jnp.float32(0)) / jnp.where(total == 0, 1, total), total
