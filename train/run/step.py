"""The training step and the validation step for every kind of model.

A loss is stored per example, as a sum and a number of terms, because the mean is over tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from train.distributed import processes
from train.run.optimizers import skipped_steps
from train.tasks import Task
from train.tasks.batches import ROWS, Batch
from train.tasks.classification import score
from zenflow_jax import streaming

# Number of validation batches that are dispatched before the first result is read.
AHEAD = 8
# Otherwise a GPU and cuDNN sum scattered values in any order, but runs must be repeatable.
DETERMINISTIC = {"xla_gpu_exclude_nondeterministic_ops": True}


class PerExample(NamedTuple):
    """The loss and prediction for each of a batch's `b` examples."""

    losses: jax.Array  # (b,) float32, cross-entropy in nats, summed over the example's targets
    targets: jax.Array  # (b,) float32, the number of targets
    predictions: jax.Array | None  # (b,) int32, the most likely label; None for language models


def from_losses(losses: jax.Array, batch: Batch) -> PerExample:
    """Sums a decoder's losses of next tokens `(b, t)`; `tasks` describes a batch's examples."""
    if (weights := batch.get("weights")) is None:
        return PerExample(losses.sum(1), jnp.full(len(losses), losses.shape[1], jnp.float32), None)
    weights = weights.astype(jnp.float32)
    return PerExample((losses * weights).sum(1), weights.sum(1), None)


def from_logits(logits: jax.Array, batch: Batch) -> PerExample:
    """Returns a classifier's loss from logits `(b, labels)`."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    predictions = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return PerExample(losses, jnp.ones_like(losses), predictions)


def of_tokens(model: Any, batch: Batch) -> PerExample:
    """Returns a decoder's loss for each next token."""
    tokens = batch["tokens"].astype(jnp.int32)
    return from_losses(model.losses(tokens[:, :-1], tokens[:, 1:], batch.get("positions")), batch)


def of_labels(model: Any, batch: Batch) -> PerExample:
    """Returns a classifier's loss. `label` is `(b,)`, everything else in a batch `(b, t)`."""
    return from_logits(
        model(batch["tokens"].astype(jnp.int32), batch["types"], batch["mask"]), batch
    )


def mean_loss(result: PerExample) -> tuple[jax.Array, jax.Array]:
    """Returns the mean loss of a batch, and the number of its targets."""
    targets = result.targets.sum()
    # Without targets, which is possible if answers are cut off, the loss is zero.
    return result.losses.sum() / jnp.maximum(targets, 1), targets


PER_EXAMPLE = {"decoder": of_tokens, "encoder": of_labels}


def make_train_step(
    graphdef: nnx.GraphDef,
    tx: optax.GradientTransformation,
    per_example: Callable[[nnx.Module, Batch], PerExample],
    *,
    micro_batches: int = 1,
    stream: bool = False,
    placement: Any = None,
) -> Callable:
    """Returns the jitted step, which works for any optimizer and number of devices.

    It maps parameters, optimizer state and a batch to the new parameters and state, the loss, and
    the number of steps skipped so far (int32). Gradients of `micro_batches` are summed in float32.
    With `stream`, gradients of scanned layers leave layer by layer. `placement` contains the
    shardings of parameters and state, which the compiler could otherwise change.
    """

    def loss_of(params, batch):
        return mean_loss(per_example(nnx.merge(graphdef, params), batch))

    mean = jax.value_and_grad(loss_of, has_aux=True)

    def gradient(params, batch):
        if micro_batches == 1:
            (loss, _), grads = mean(params, batch)
            return loss, grads
        # Each device has adjacent rows of each micro-batch, so no data moves.
        parts = jax.tree.map(lambda x: _split(x, micro_batches), batch)

        def add(total, part):
            (loss, targets), grads = mean(params, part)
            weighted = jax.tree.map(lambda x: x.astype(jnp.float32) * targets, (loss, grads))
            return jax.tree.map(jnp.add, total, (weighted, targets)), None

        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
        nothing = jnp.float32(0)
        ((loss, grads), targets), _ = jax.lax.scan(add, ((nothing, zeros), nothing), parts)
        targets = jnp.maximum(targets, 1)
        return loss / targets, jax.tree.map(
            lambda g, p: (g / targets).astype(p.dtype), grads, params
        )

    def train_step(params, opt_state, batch):
        weights = streaming.stream(params, opt_state) if stream else params
        loss, grads = gradient(weights, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, loss, skipped_steps(opt_state)

    # Donated: new parameters and state reuse the memory of the old ones.
    out_shardings = placement and (*placement, None, None)
    return jax.jit(
        train_step,
        donate_argnums=(0, 1),
        out_shardings=out_shardings,
        compiler_options=DETERMINISTIC,
    )


def _split(x: jax.Array, parts: int) -> jax.Array:
    """Reshapes `(b, ...)` to `(parts, b / parts, ...)`; part `j` has rows `j`, `j + parts`, ..."""
    return jnp.moveaxis(x.reshape(len(x) // parts, parts, *x.shape[1:]), 1, 0)


def make_judge(
    graphdef: nnx.GraphDef, per_example: Callable[[nnx.Module, Batch], PerExample]
) -> Callable[[Any, Batch], Any]:
    """Returns a jitted function from parameters and a batch to a validation's arguments."""

    @jax.jit
    def judge(params: Any, batch: Batch) -> Any:
        return judged(per_example(nnx.merge(graphdef, params), batch), batch)

    return judge


def judged(result: PerExample, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the summed loss and number of targets of a batch's real rows, and all predictions."""
    rows = batch[ROWS]
    return (result.losses * rows).sum(), (result.targets * rows).sum(), result.predictions


def make_validate(
    judge: Callable[[Any, Batch], Any],
    task: Task,
    sample: Iterable[Batch],
) -> Callable[[Any], dict[str, float]]:
    """Returns a function from the first argument of `judge` to the metrics on a sample."""

    def validate(params: Any) -> dict[str, float]:
        loss = targets = 0.0
        predictions, labels = [], []
        for batch, (losses, counts, predicted) in _ahead(partial(judge, params), sample):
            loss += float(losses)
            targets += float(counts)
            if task.labels:
                rows = processes.gather(batch[ROWS]) > 0
                predictions.append(processes.gather(predicted)[rows])
                labels.append(processes.gather(batch["label"])[rows])
        figures = {"loss": loss / max(targets, 1)}
        if task.labels:
            figures |= score(np.concatenate(predictions), np.concatenate(labels))
        return figures

    return validate


def _ahead(
    dispatch: Callable[[Batch], Any], batches: Iterable[Batch]
) -> Iterator[tuple[Batch, Any]]:
    """Yields batches with their results; the device stays a few batches ahead."""
    waiting: deque[tuple[Batch, Any]] = deque()
    for batch in batches:
        waiting.append((batch, dispatch(batch)))
        if len(waiting) > AHEAD:
            yield waiting.popleft()
    yield from waiting
