"""Converts a model to the functions and weights of `zenflow_jax.layerwise`, and back.

A decoder whose embedding and head are in parts has a layer for each part. Then `carry` contains the
stream and the first word of the next part; after the norm, also the sums over the words so far.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from train.distributed import processes
from train.model import cross_entropy, vocabulary
from train.model.blocks import placed
from train.run.step import PerExample, from_logits, from_losses, judged, mean_loss
from train.tasks.batches import Batch
from zenflow_jax import layerwise


class LayeredModel(NamedTuple):
    """Functions for `layerwise.Trainer`, and the order of its layers."""

    first: Callable[[Any, Batch], tuple[Any, Any]]
    layers: Sequence[Callable[[Any, Any, Any], Any]]
    last: Callable[[Any, Any, Batch], Any]  # for the loss
    judge: Callable[[Any, Any, Batch], Any]  # for `make_validate`
    parts: int  # number of parts of the vocabulary
    blocks: int
    model: Any  # the model's parameters, as shapes
    shapes: Any = None  # of the trainer's weights, with shardings

    def divide(self, outer: Mapping[str, Any], blocks: Iterable[Any]) -> dict[str, Any]:
        """Divides a model's parameters (arrays or shapes) into the trainer's parameters."""
        if self.parts == 1:
            return {"outer": outer, "layers": blocks}
        embed, head = _parts(outer["embed"]["embedding"]), _parts(outer["head"]["kernel"])
        return {"outer": {}, "layers": itertools.chain(embed, blocks, [outer["norm"]], head)}

    @property
    def functions(self) -> dict[str, Any]:
        """Returns the trainer's arguments."""
        return {"first": self.first, "layer": self.layers, "last": self.last}

    def leaves(self, read_layer: Callable[[int | str], Any]) -> Iterator[Any]:
        """Yields the leaves of a model's parameters in order, from the trainer's blocks."""
        outer, first = read_layer("outer"), self.parts if self.parts > 1 else 0
        names = [*outer, "blocks"] if self.parts == 1 else ["blocks", "embed", "head", "norm"]
        for name in sorted(names):
            if name == "blocks":
                for i in range(self.blocks):
                    yield from jax.tree.leaves(read_layer(first + i))
            elif name in outer:
                yield from jax.tree.leaves(outer[name])
            elif name == "norm":
                yield from jax.tree.leaves(read_layer(first + self.blocks))
            else:
                begin = 0 if name == "embed" else first + self.blocks + 1
                yield np.stack([processes.gather(read_layer(begin + i)) for i in range(self.parts)])

    def whole(self, params: Any) -> tuple[Any, Iterator[Any]]:
        """Returns a model's parameters as shapes, and their values from the trainer's weights."""
        outer, *layers = params["outer"], *params["layers"]
        return self.model, self.leaves(lambda i: outer if i == "outer" else layers[int(i)])


def layered(graphdef: nnx.GraphDef, params: Any) -> LayeredModel:
    """Returns the functions of a model whose blocks are not stacked."""
    model = nnx.merge(graphdef, params)
    blocks = list(model.blocks)
    block_def = nnx.split(blocks[0])[0]
    model.blocks = nnx.List([])
    outer_def = nnx.split(model)[0]
    is_decoder = hasattr(model, "losses_after")
    sharding, parts = model.stream_sharding, getattr(model, "parts", 1)

    def block(weights: Any, x: jax.Array, shared: Any) -> jax.Array:
        return placed(nnx.merge(block_def, weights)(x, *shared), sharding)

    def first(outer: Any, batch: Batch) -> tuple[jax.Array, Any]:
        model, tokens = nnx.merge(outer_def, outer), batch["tokens"].astype(jnp.int32)
        if not is_decoder:
            x, attends = model.block_inputs(tokens, batch["types"], batch["mask"])
            return placed(x, sharding), (attends,)
        x, tokens = model.embed(tokens[:, :-1]), tokens[:, :-1]
        return placed(x, sharding), model.block_inputs(tokens, batch.get("positions"))

    def result(outer: Any, x: jax.Array, batch: Batch) -> PerExample:
        model = nnx.merge(outer_def, outer)
        if not is_decoder:
            return from_logits(model.logits_after(x), batch)
        targets = batch["tokens"].astype(jnp.int32)[:, 1:]
        return from_losses(model.losses_after(x, targets), batch)

    functions = first, [block] * len(blocks), result
    if parts > 1:
        functions = _in_parts(model, block, len(blocks))
    begin, layers, end = functions
    return LayeredModel(
        begin,
        layers,
        lambda *args: layerwise.WeightedLoss(*mean_loss(end(*args))),
        lambda outer, carry, batch: judged(end(outer, carry, batch), batch),
        parts,
        len(blocks),
        params,
    )


def _in_parts(model: Any, block: Callable, blocks: int) -> tuple[Callable, list, Callable]:
    """Returns `first`, the layers and the result of a model whose vocabulary is in parts."""
    dtype, width, parts = model.embed.dtype, model.config.width, model.parts
    norm_def = nnx.split(model.norm)[0]
    words = model.config.vocabulary // parts
    sharding = model.stream_sharding

    def first(_: Any, batch: Batch) -> tuple[Any, Any]:
        tokens = batch["tokens"].astype(jnp.int32)
        tokens, targets = tokens[:, :-1], tokens[:, 1:]
        shared = model.block_inputs(tokens, batch.get("positions"))
        x = placed(vocabulary.no_rows(tokens, width, dtype), sharding)
        return (x, jnp.int32(0)), (shared, tokens, targets)

    def embed(part: jax.Array, carry: Any, shared: Any) -> Any:
        x, start = carry
        return vocabulary.add_rows(x, part, shared[1] - start), start + words

    def in_carry(weights: Any, carry: Any, shared: Any) -> Any:
        return block(weights, carry[0], shared[0]), carry[1]

    def norm(weights: Any, carry: Any, shared: Any) -> Any:
        x = nnx.merge(norm_def, weights)(carry[0])
        return x, jnp.int32(0), cross_entropy.no_words(shared[2])

    def head(part: jax.Array, carry: Any, shared: Any) -> Any:
        x, start, sums = carry
        sums = vocabulary.add_logits(sums, x, part.astype(dtype), shared[2] - start)
        return x, start + words, sums

    def result(_: Any, carry: Any, batch: Batch) -> PerExample:
        return from_losses(vocabulary.losses_of(carry[2]), batch)

    return first, [*[embed] * parts, *[in_carry] * blocks, norm, *[head] * parts], result


def _parts(stack: Any) -> list[Any]:
    """Returns the parts of a vocabulary, as arrays or shapes."""
    count, sharding = len(stack), stack.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    if isinstance(stack, jax.ShapeDtypeStruct):
        shape = jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, sharding=sharding)
        return [shape] * count
    return jax.jit(lambda x: [x[i] for i in range(count)], out_shardings=[sharding] * count)(stack)


def micro_batches(batch: Mapping[str, Any], parts: int) -> list[dict[str, Any]]:
    """Divides a batch as `make_train_step` does: part `j` has rows `j`, `j + parts`, ..."""
    divided = {
        name: _strided(x, parts, x.sharding if isinstance(x, jax.Array) else None)
        for name, x in batch.items()
    }
    return [{name: x[j] for name, x in divided.items()} for j in range(parts)]


@partial(jax.jit, static_argnums=(1, 2))
def _strided(x: jax.Array, parts: int, sharding: Any) -> list[jax.Array]:
    return [placed(x[j::parts], sharding) for j in range(parts)]
