"""`Trainer`: the public object, used from a single thread."""

import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zenflow_jax._device.gpu_faults import check_gpus
from zenflow_jax._diagnostics.stats import EngineStats
from zenflow_jax._diagnostics.timeline import Timeline
from zenflow_jax._exchange.checks import is_compact
from zenflow_jax._exchange.pinned import check_pinned
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._spec.arguments import NUMBERS, check_numbers
from zenflow_jax._spec.rules import UnfitRunError, check_int_or_none, check_one_of
from zenflow_jax._spec.scalars import AdamScalars
from zenflow_jax.layerwise._blocks import Block, make_block
from zenflow_jax.layerwise._dispatch import AHEAD, Dispatcher
from zenflow_jax.layerwise._host import Host
from zenflow_jax.layerwise._saving import BlockStream, saved_leaves


class Trainer:
    """Trains a model with AdamW, layer by layer; weights and state are in host memory.

    The device holds two layers at a time: the current layer, and the next in flight. In each
    direction, Python calls one program per layer. The model is three pure functions, which
    `ScannedModel` makes from a loss that scans its layers:

    * `first(outer, batch)` returns (carry, shared): the input of layer 0, and data that all layers
      read, such as rotations or an encoder's output, or None.
    * `layer(weights, carry, shared)` returns the next carry.
    * `last(outer, carry, batch)` returns the loss, a scalar, or a `WeightedLoss` that gives each
      micro-batch a weight, for instance its number of targets.

    Any tree of arrays can be a carry. The backward pass recomputes each layer.

    Host memory: 14 bytes per parameter with bf16 weights (8.2 with compact moments), of which 2 are
    pinned; "after_backward" needs another 2 pinned bytes for gradients. Only one thread may call a
    trainer; on a mesh over several processes, all processes must make the same calls.

    Args:
        params: {"outer": tree, "layers": iterable of trees}, in NumPy or jax arrays in any memory,
            in float dtypes. jax arrays keep their sharding; NumPy arrays go to the first device.
            An iterator saves memory, because the trainer copies one layer at a time.
        first, layer, last: The model. `layer` may be a sequence with one function for each layer.
            If layers have the same function object, they share a program.
        learning_rate: A number, or an optax schedule, which skipped steps do not advance.
        b1, b2, eps, weight_decay: As in `optax.adamw`.
        mask: Function of one layer's weights, or of the outer weights, that returns a tree of
            bools: True where weight decay applies. By default it applies everywhere.
        max_grad_norm: The global norm to which gradients are clipped; None for no clipping.
        updates: With "after_backward", layers are updated when all gradients have arrived, so the
            run equals `optax.adamw` after `optax.clip_by_global_norm`, and skips steps whose
            gradient is not finite. With "during_backward", each layer is updated when its gradient
            arrives. Clipping then projects the norm from earlier steps. A non-finite loss skips the
            step, but a non-finite gradient ends the run.
        inputs: Where the layers' inputs wait for the backward pass: on the "device", or in pinned
            "host" memory, for long sequences.
        frozen: Layers that are not trained, by number, and "outer" for the outer weights.
        host_state, host_kernel, threads: As for `HostEngine`.
        max_skipped: Consecutive skipped steps after which the next call raises an error. None means
            never.
        compiler_options: Options for all programs, as in `jax.jit`.
        state: The result of `state` or `EngineRestore`, to resume that run with bit-identical
            results. Then `params` may be `ShapeDtypeStruct`s with shardings, except for frozen
            weights.

    Raises:
        ValueError: If an argument is out of range, or `state` belongs to another model; in `step`,
            if a function uses a float array or a random key that is not among its arguments.
        TypeError: If `params` have a different structure, or are not floats; in `step`, if the
            functions do not fit together.

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
        compiler_options: dict[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
    ):
        check_one_of("updates", updates, ("after_backward", "during_backward"))
        check_one_of("inputs", inputs, ("device", "host"))
        check_int_or_none("max_skipped", max_skipped, 1)
        numbers = learning_rate, b1, b2, eps, weight_decay, max_grad_norm
        check_numbers(**dict(zip(NUMBERS, numbers, strict=True)))
        at_once, compact = updates == "during_backward", is_compact(host_state)
        blocks, weights = _make_blocks(params, frozen, mask, compact, state, at_once=at_once)
        layers = [layer] * (len(blocks) - 1) if callable(layer) else list(layer)
        if len(layers) != len(blocks) - 1:
            raise ValueError(
                f"`layer` has {len(layers)} functions for {len(blocks) - 1} layers. Pass one "
                "function for all layers, or one for each layer."
            )
        counts = {} if state is None else state["counts"]
        #: The number of steps taken, including skipped steps.
        self.steps = int(counts.get("step", 0))
        self._blocks, self._interrupted = blocks, False
        leaves = [leaf for block in blocks for leaf in block.leaves]
        devices = {device for leaf in leaves for device in leaf.abstract.sharding.device_set}
        check_gpus(devices)
        self._processes = sorted({device.process_index for device in devices})
        # Last: a failed constructor must not leak a thread.
        self._host = Host(
            blocks,
            AdamScalars(0.0, b1, b2, 1 - b1, 1 - b2, eps, weight_decay),
            HostAdam(host_kernel, threads),
            at_once=at_once,
            max_grad_norm=max_grad_norm,
            max_skipped=max_skipped,
            counts=counts,
        )
        self._dispatcher = Dispatcher(
            (first, layers, last),
            blocks,
            weights,
            self._host,
            learning_rate if callable(learning_rate) else lambda _: learning_rate,
            inputs_to_host=inputs == "host",
            options=compiler_options,
        )

    @property
    def stats(self) -> EngineStats:
        """Returns counts, seconds and bytes so far."""
        return EngineStats(
            steps=self.steps,
            skipped_steps=self._host.skipped,
            bytes_to_host=self._dispatcher.bytes_to_host,
            bytes_to_device=self._dispatcher.bytes_to_device,
            host_bytes=sum(block.nbytes for block in self._blocks),
            **self._host.recorder.seconds(),
        )

    @property
    def skipped(self) -> int:
        """Returns the number of skipped steps, after waiting for the decision on the last step."""
        self._dispatcher.wait_for_decision()
        return self._host.skipped

    @property
    def timeline(self) -> Timeline:
        """Returns the timeline of the last few steps, which is always recorded."""
        return self._host.recorder.timeline()

    def step(self, *batches: Any) -> jax.Array:
        """Takes one step, and returns its loss without waiting for it.

        Args:
            batches: A batch, which is any tree of arrays, or several micro-batches with equal
                shapes. In each direction, weights are fetched once for all micro-batches.

        Returns:
            A float32 scalar: the weighted mean loss of the micro-batches.

        Raises:
            RuntimeError: If the trainer is closed, was interrupted, or an update has failed.
            FloatingPointError: If `max_skipped` consecutive steps were skipped; or, with
                updates="during_backward", if a gradient was not finite.
        """
        if not batches:
            raise TypeError("`step` needs a batch. Pass a batch, or several micro-batches.")
        self._check()
        if not any(block.trains for block in self._blocks):
            raise ValueError("`frozen` covers all weights, so nothing is left to train.")
        program, *more = map(self._dispatcher.program, batches)
        if any(other is not program for other in more):
            raise ValueError("Micro-batches must have the same shapes and dtypes. Pad them.")
        start, self._interrupted = time.perf_counter(), True
        try:
            self.steps += 1
            loss = self._dispatcher.step(self.steps, program, batches)
        except BaseException as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                error.add_note(
                    "The device's memory is full. Pass fewer examples at a time, as micro-batches; "
                    'use inputs="host"; or divide large layers into several.'
                )
            raise
        self._interrupted = False
        self._host.recorder.called("calls", self.steps, start)
        return loss

    def evaluate(self, batch: Any, last: Callable[[Any, Any, Any], Any] | None = None) -> Any:
        """Returns the loss of a batch, or the result of another `last`, without training.

        `last(outer, carry, batch)` may return any tree of arrays. Waits for pending updates, layer
        by layer, but not for the result.
        """
        self._check()
        return self._dispatcher.evaluate(self._dispatcher.program(batch), batch, last)

    def params(self) -> dict[str, Any]:
        """Returns the weights after the last step, in the structure of the constructor's `params`.

        The arrays are in pinned host memory, and never change. Waits for pending updates.
        """
        self.wait()
        outer, *layers = map(self._dispatcher.tree, range(len(self._blocks)))
        return {"outer": outer, "layers": layers}

    def master_params(self, name: int | str) -> Any:
        """Copies the float32 weights of a layer, by its number, or "outer" for the outer weights.

        Returns a tree of float32 arrays in pinned host memory, or frozen weights as they are.
        """
        _check_names({name}, len(self._blocks) - 1)
        self.wait()
        i = 0 if name == "outer" else int(name) + 1
        return self._blocks[i].masters() if self._blocks[i].trains else self._dispatcher.tree(i)

    def state(self) -> dict[str, Any]:
        """Copies the state for a checkpoint: 12 bytes per trained parameter, as NumPy arrays.

        Pass it to a new trainer as `state`. It contains all weights except frozen weights. With
        orbax, `EngineSave(trainer)` saves the same state without a copy, from all processes.
        """
        return self.stream(0).tree()

    def stream(self, copy_bytes: int | None = None) -> BlockStream:
        """Returns the state as a stream that `EngineSave` writes while the run continues.

        Write or close the stream, otherwise the run waits forever. `copy_bytes` is as in
        `EngineSave`, but None means no copies.
        """
        self.wait()
        counts = {
            "step": np.array(self.steps, np.int32),
            "token": np.array(self._host.counted, np.int32),
            "counted": np.array(self._host.counted, np.int32),
            "shares": self._host.shares.copy(),
            "names": _checksum_of_names(self._blocks),
        }
        trained = [block for block in self._blocks if block.trains]
        return BlockStream(trained, self._host.snapshot(copy_bytes or 0), counts, self._processes)

    def wait(self) -> None:
        """Waits for the last step's updates, and raises their errors."""
        self._check()
        self._dispatcher.wait()

    def close(self) -> None:
        """Ends the threads; drops updates that have not begun. Safe to call twice."""
        self._host.close()
        self._dispatcher.watch.close()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None and not self._host.closed:
            self.wait()
        self.close()

    def _check(self) -> None:
        self._host.check()
        if self._interrupted:
            raise RuntimeError(
                "The last step was interrupted, so possibly only some weights were updated. Resume "
                "from the last checkpoint."
            )


def _make_blocks(
    params: Any,
    frozen: Collection[int | str],
    mask: Callable[[Any], Any] | None,
    compact: bool,
    state: Mapping[str, Any] | None,
    *,
    at_once: bool,
) -> tuple[Sequence[Block], Sequence[list[jax.Array]]]:
    """Makes all blocks and their weights in host memory, one block at a time."""
    if not isinstance(params, Mapping) or params.keys() != {"outer", "layers"}:
        raise TypeError('`params` must be a mapping with the keys "outer" and "layers".')
    if isinstance(params["layers"], Mapping):
        raise TypeError('`params["layers"]` is a mapping. Pass a list with one tree per layer.')
    saved = None if state is None else saved_leaves(state)
    options: dict[str, Any] = {"mask": mask, "compact": compact, "saved": saved}
    made = [make_block("outer", params["outer"], trains="outer" not in frozen, **options)]
    for i, tree in enumerate(params["layers"]):
        made.append(make_block(f"layers.{i}", tree, trains=i not in frozen, **options))
        # Checked after every layer, so that this error is raised before jax's own error.
        _check_pinned([block for block, _ in made], at_once=at_once)
    if len(made) == 1:
        raise ValueError(
            '`params["layers"]` has no layers. Pass at least one; an iterator works only once.'
        )
    blocks, weights = zip(*made, strict=True)
    _check_names(frozen, len(blocks) - 1)
    if state is not None and state["counts"]["names"] != _checksum_of_names(blocks):
        raise UnfitRunError(
            "`state` has different weights, by name, or different frozen layers. Resume with the "
            "saved run's model and `frozen`."
        )
    return blocks, weights


def _checksum_of_names(blocks: Sequence[Block]) -> np.ndarray:
    """Returns a checksum of the trained weights' names; equal shapes prove too little."""
    leaves = (leaf for block in blocks if block.trains for leaf in block.leaves)
    # flax nnx adds the suffix, or not, to the same parameter.
    names = "\n".join(leaf.path.removesuffix(".value") for leaf in leaves)
    return np.array(zlib.crc32(names.encode()), np.uint32)


def _check_names(names: Collection[int | str], layers: int) -> None:
    if unknown := set(names) - {"outer", *range(layers)}:
        raise ValueError(
            f"There is no layer {sorted(map(str, unknown))}: the layers are 0 to {layers - 1}. Use "
            'these numbers, and "outer" for the outer weights.'
        )


def _check_pinned(blocks: Sequence[Block], *, at_once: bool) -> None:
    """Rejects weights and gradients that exceed a GPU's pinned-memory limit."""
    weights: dict[Any, list[int]] = {}
    for block in blocks:
        for device, size in block.device_bytes().items():
            weights.setdefault(device, []).append(size)
    for device, sizes in weights.items():
        in_flight = sorted(sizes)[-AHEAD - 1 :] if at_once else sizes
        check_pinned({"weights": sum(sizes), "gradients": sum(in_flight)}, device.platform)
