"""`Trainer`: the public object, used from a single thread."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from zenflow_jax._device.gpu_faults import check_gpus
from zenflow_jax._device.memory import HOST
from zenflow_jax._spec.arguments import check_numbers
from zenflow_jax._spec.checks import UnfitRunError, check_int_or_none, check_one_of
from zenflow_jax.layerwise._blocks import Block, checksum_of_names, devices_of, make_blocks
from zenflow_jax.layerwise._dispatch import Dispatcher
from zenflow_jax.layerwise._optimizer import leaves_of, master_of
from zenflow_jax.layerwise._progress import SAVED, decisions, new_progress
from zenflow_jax.layerwise._saving import SavedState, TrainerSnapshot
from zenflow_jax.layerwise._transfers import moved

#: By default, this many of the largest updated arrays may be in flight.
_IN_FLIGHT = 3
#: This many skipped steps in a row end a run, which would otherwise never learn again.
_MAX_SKIPPED = 30


class Trainer:
    """Trains a model with an optax optimizer, layer by layer; weights and state are in host memory.

    The device holds a few layers at a time. In each direction, Python calls one program per layer;
    in the backward pass, which recomputes each layer, the optimizer's update runs on the device,
    one leaf at a time. `ScannedModel` makes the three functions from a loss that scans its layers:

    * `first(outer, batch)` returns (carry, shared): the input of layer 0, and data that all layers
      read, such as rotations or an encoder's output, or None.
    * `layer(weights, carry, shared)` returns the next carry, which is any tree of arrays.
    * `last(outer, carry, batch)` returns the loss, a scalar, or a `WeightedLoss` that gives each
      micro-batch a weight, for instance its number of targets.

    docs/layerwise.md says what each optimizer needs in pinned host memory. Only one thread may call
    a trainer; on a mesh over several processes, all processes must make the same calls.

    Args:
        params: {"outer": tree, "layers": iterable of trees}, in NumPy or jax arrays in any memory,
            in float dtypes. jax arrays keep their sharding; NumPy arrays go to the first device.
            An iterator saves memory, because the trainer copies one layer at a time.
        first, layer, last: The model. `layer` may be a sequence with one function for each layer.
            If layers have the same function object, they share a program.
        optimizer: An optax optimizer whose result for a leaf depends only on this leaf. It gets
            float32 gradients and weights, one leaf at a time: the tree of a layer, or of the outer
            weights, with None in place of all other leaves. So masks and labels are functions of
            such a tree. Skipped steps do not advance its schedules. None makes a trainer that can
            only evaluate, without memory for updates.
        max_grad_norm: The global norm to which gradients are clipped; None for no clipping.
        updates: With "after_backward", layers are updated when all gradients are known, so the
            run equals the optimizer after `optax.clip_by_global_norm`, and skips steps whose
            gradient is not finite. With "during_backward", each layer is updated when its gradient
            is known, with less traffic. Clipping then projects the norm from earlier steps. A
            non-finite loss skips the step, but a non-finite gradient ends the run.
        inputs: Where the layers' inputs wait for the backward pass: on the "device", or in pinned
            "host" memory, for long sequences.
        in_flight_bytes: Device memory for arrays on their way to and from updates. By default,
            three times a layer's largest leaf with its state.
        compiler_options: Options for all programs, as in `jax.jit`.
        state: The result of `state` or `EngineRestore`, to resume that run with bit-identical
            results. Then `params` may be `ShapeDtypeStruct`s with shardings.

    Raises:
        ValueError: If `state` belongs to another model or optimizer, or `optimizer` mixes leaves or
            draws random numbers; in `step`, if a function captures a float array or a random key.
        TypeError: If `params` have a different structure, or are not floats, or `optimizer` needs
            more arguments; in `step`, if the functions do not fit together.

    Examples:
        >>> import jax.numpy as jnp, numpy as np, optax
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
        ...     optimizer=optax.sgd(1e-2),
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
        params: Mapping[str, PyTree],
        *,
        first: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
        layer: Callable[[Any, Any, Any], Any] | Sequence[Callable[[Any, Any, Any], Any]],
        last: Callable[[PyTree, PyTree, PyTree], PyTree],
        optimizer: optax.GradientTransformation | None,
        max_grad_norm: float | None = None,
        updates: str = "after_backward",
        inputs: str = "device",
        in_flight_bytes: int | None = None,
        compiler_options: dict[str, Any] | None = None,
        state: Mapping[str, PyTree] | None = None,
    ):
        check_one_of("updates", updates, ("after_backward", "during_backward"))
        check_one_of("inputs", inputs, ("device", "host"))
        check_int_or_none("in_flight_bytes", in_flight_bytes, 0)
        check_numbers(max_grad_norm=max_grad_norm)
        at_once = updates == "during_backward"
        saved = None if state is None else SavedState(state)
        counts: Mapping[str, Any] = {} if saved is None else saved.counts
        jit = partial(jax.jit, compiler_options=compiler_options)
        self._trains = optimizer is not None
        sends = self._trains and not at_once
        self._blocks = blocks = make_blocks(params, optimizer, jit, saved, gradients=sends)
        layers = [layer] * (len(blocks) - 1) if callable(layer) else list(layer)
        if len(layers) != len(blocks) - 1:
            raise ValueError(f"`layer` has {len(layers)} functions for {len(blocks) - 1} layers.")
        self._names = checksum_of_names(blocks)
        if saved and counts.get("names") != self._names:
            raise UnfitRunError(
                "`state` has different weights, by name, or another optimizer or order of layers. "
                "Resume with the saved run's model and optimizer."
            )
        #: The number of steps taken, including skipped steps.
        self.steps = int(counts.get("step", 0))
        check_gpus(devices_of(blocks))
        self._failure: BaseException | None = None
        self._closed = False
        self._verdicts: deque[tuple[int, jax.Array]] = deque()  # of steps, not read yet
        self._skipped, self._in_a_row = int(counts.get("skipped", 0)), 0  # as far as known
        # A huge outer leaf does not count; it is updated when nothing else is in flight.
        largest = max((x.nbytes for block in blocks[1:] for x in block.kind.bundles), default=0)
        weights = [x for block in blocks for x in block.kind.weights]
        sizes = [sum(x.size for x in block.kind.weights) for block in blocks]
        self._dispatcher = Dispatcher(
            (first, layers, last),
            blocks,
            decisions(max_grad_norm, jit, at_once=at_once),
            new_progress(sizes, counts, weights[0].sharding),
            _IN_FLIGHT * largest if in_flight_bytes is None else in_flight_bytes,
            jit,
            at_once=at_once,
            inputs_to_host=inputs == "host",
        )

    @property
    def skipped(self) -> jax.Array:
        """Returns the number of skipped steps, as an array that is not waited for."""
        return self._dispatcher.progress.skipped

    def step(self, *batches: PyTree) -> jax.Array:
        """Takes one step, and returns its loss without waiting for it.

        `batches` are a batch, which is any tree of arrays, or several micro-batches with equal
        shapes, for which weights are fetched once. The loss is their weighted mean, in float32.

        Raises:
            RuntimeError: If the trainer is closed or was interrupted.
            FloatingPointError: If, before this step, an update was not finite, or too many steps in
                a row were skipped; or, with updates="during_backward", if a gradient was not.
        """
        self._check()
        if not self._trains:
            raise ValueError("The trainer has no optimizer, so it can only evaluate.")
        program, *more = map(self._dispatcher.program, batches)
        if any(other is not program for other in more):
            raise ValueError("Micro-batches must have the same shapes and dtypes. Pad them.")
        try:
            loss, verdict = self._dispatcher.step(program, batches)
        except BaseException as error:
            self._failure = RuntimeError(
                f"A step failed or was interrupted ({error!r}), so possibly only some weights were "
                "updated. Resume from the last checkpoint."
            )
            raise
        self.steps += 1
        self._verdicts.append((self.steps, verdict))
        self._read_verdicts(1)
        return loss

    def evaluate(
        self, batch: PyTree, last: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None
    ) -> Any:
        """Returns the loss of a batch, or the result of another `last`, without training.

        `last(outer, carry, batch)` may return any tree of arrays. Does not wait for the result.
        """
        self._check()
        return self._dispatcher.evaluate(self._dispatcher.program(batch), batch, last)

    def params(self) -> dict[str, Any]:
        """Returns the weights after the last step, like the constructor's `params`.

        The arrays never change. They are in pinned host memory.
        """
        self.wait()
        outer, *layers = (x.tree(x.weights()) for x in self._blocks)
        return {"outer": outer, "layers": layers}

    def master_params(self, name: int | str) -> Any:
        """Makes the float32 weights of a layer, by its number, or "outer" for the outer weights.

        They are in pinned host memory.
        """
        block, masters = self._block(name), list[jax.Array]()
        for bundle, arrays in block.bundles:  # a few leaves on the device at a time
            leaves = leaves_of(bundle.shapes, moved("device", arrays))
            made = [_master(weight, rest) for weight, (rest, _) in leaves]
            masters += jax.block_until_ready(moved(HOST, made))
        return block.tree(masters)

    def optimizer_states(self, name: int | str) -> list[Any]:
        """Returns the optimizer's state of each leaf in a layer, named as in `master_params`.

        Each is for the layer's tree with None in place of all other leaves.
        """
        bundles = (leaves_of(x.shapes, arrays) for x, arrays in self._block(name).bundles)
        return [state for leaves in bundles for _, (_, state) in leaves]

    def _block(self, name: int | str) -> Block:
        self.wait()
        return self._blocks[["outer", *range(len(self._blocks) - 1)].index(name)]

    def state(self) -> dict[str, Any]:
        """Copies the state for a checkpoint into NumPy arrays: weights, masters' rests, optimizer.

        With orbax, `EngineSave(trainer)` saves the same state without a copy, from all processes.
        """
        return self.snapshot(0).tree()

    def snapshot(self, copy_bytes: int | None = None) -> TrainerSnapshot:
        """Returns the state at this moment, which `EngineSave` writes while the run continues.

        Until an array is written, an update that replaces it keeps the old one, up to `copy_bytes`
        in all; then the run waits for the writing. None means one byte for each trained parameter.
        Write or close the snapshot, otherwise the run may wait forever.
        """
        self.wait()
        progress = self._dispatcher.progress
        counts = {name: np.array(getattr(progress, name)) for name in SAVED}
        counts |= {"step": np.array(self.steps, np.int32), "names": self._names}
        if copy_bytes is None:
            copy_bytes = sum(x.size for block in self._blocks for x in block.kind.weights)
        snapshot = TrainerSnapshot(self._blocks, copy_bytes, counts)
        running = [x for x in self._dispatcher.snapshots if not x.done]
        self._dispatcher.snapshots = [*running, snapshot.unsaved]
        return snapshot

    def wait(self) -> None:
        """Waits for the last step, and raises its errors."""
        self._check()
        self._read_verdicts(0)
        jax.block_until_ready([x.weights() for x in self._blocks])

    def close(self) -> None:
        """Frees the weights and the state; the trainer rejects later calls. Safe to call twice."""
        self._closed = True
        for block in self._blocks:
            block.arrays = [[] for _ in block.arrays]

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None and not self._closed:
                self.wait()
        finally:
            self.close()

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("The trainer is closed. Make a new trainer from its saved state.")
        if self._failure is not None:
            raise type(self._failure)(str(self._failure)) from self._failure

    def _read_verdicts(self, unread: int) -> None:
        """Reads all verdicts but the last few, and raises an error if a step ends the run."""
        while len(self._verdicts) > unread:
            step, verdict = self._verdicts[0]
            skipped, report = map(int, np.asarray(verdict))
            self._verdicts.popleft()  # after the wait, which may be interrupted
            self._in_a_row = self._in_a_row + 1 if skipped > self._skipped else 0
            self._skipped = skipped
            if report or self._in_a_row == _MAX_SKIPPED:
                self._failure = FloatingPointError(self._explained(report, step))
                raise self._failure

    def _explained(self, report: int, step: int) -> str:
        if not report:
            return (
                f"The last {_MAX_SKIPPED} steps, up to step {step}, were skipped, because their "
                "losses or gradients were not finite. Look for NaN in the weights and the batches."
            )
        if report < 0:
            return (
                f"The gradient of {self._blocks[-1 - report].name} is not finite in step {step}, "
                "which has already updated other weights. Resume from the last checkpoint, with "
                'updates="after_backward", which skips such steps.'
            )
        paths = [path for block in self._blocks for path in block.paths()]
        return (
            f"The optimizer's update of {paths[report - 1]} is not finite in step {step}, though "
            "its gradient is. Look for NaN in the learning rate's schedule."
        )


_master = jax.jit(lambda *leaf: jnp.copy(master_of(*leaf)))  # never the trainer's own array
