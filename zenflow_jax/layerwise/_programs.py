"""The device programs of a model that is given as three functions, traced once per batch shape.

A block is `first` or a layer: a function of its weights and its input, which is the batch for
`first` and otherwise the previous block's carry. A carry contains the user's carry and the data
that all layers share, which layers pass on. Weights and gradients pass through these programs as
lists of arrays.

The weights' gradients of several micro-batches are added up in float32: each program takes the
total so far and returns the new one, in the same memory.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from zenflow_jax.layerwise._tracing import is_float, key_of, live_inputs, text_of, traced, types_of

# The numbers of arguments of backward programs.
_TOTAL, _G = 0, 2
# A program for a step's last micro-batch, and for all others.
Pair = tuple[Callable[..., Any], Callable[..., Any]]


class WeightedLoss(NamedTuple):
    """A micro-batch's loss with its weight among the micro-batches; `last` may return it.

    Attributes:
        loss: The mean loss of the micro-batch, a float scalar.
        weight: A scalar, such as the number of targets.

    Examples:
        >>> import jax.numpy as jnp
        >>> WeightedLoss(jnp.float32(0.5), jnp.int32(7)).weight.dtype
        dtype('int32')
    """

    loss: Any
    weight: Any


@dataclasses.dataclass(frozen=True)
class BlockProgram:
    """The programs of `first`, of one kind of layer or of `last`, for one shape of their arguments.

    `forward(weights, input)` returns the result's leaves, except leaves that are passed on.

    `backward(before, after, several)` returns programs (total, weights, g, input) -> (gradient,
    value), g, where `g` is the gradient of the result's varying leaves, then of the input's. The
    value is the gradient's sum of squares, after the last of several micro-batches, or the loss
    times its `g`, the micro-batch's share. Weights that the loss does not read have None as their
    gradient. The input is a list of its `kept` leaves. `before` and `after` are the shardings of
    `g`: without them, a device could hold a whole gradient, and programs would be compiled twice.
    """

    forward: Callable[..., list[jax.Array]]
    backward: Callable[[tuple, tuple, bool], Pair]
    carry: Any  # the result, as `ShapeDtypeStruct`s
    passed: Mapping[int, int]  # leaves of the carry that are leaves of the input
    kept: tuple[int, ...]
    moving: int  # so many of the kept leaves, the first, may wait in host memory
    varying: tuple[int, ...]  # leaves of the carry that depend on trained weights

    def run(self, weights: PyTree, x: PyTree) -> Any:
        """Returns the carry."""
        made = iter(self.forward(weights, x))
        leaves, treedef = jax.tree.leaves(x), jax.tree.structure(self.carry)
        count = treedef.num_leaves
        new = [leaves[self.passed[i]] if i in self.passed else next(made) for i in range(count)]
        return jax.tree.unflatten(treedef, new)


@dataclasses.dataclass(frozen=True)
class ModelProgram:
    """The programs of a whole model, for one shape of a batch."""

    blocks: Sequence[BlockProgram]
    last: BlockProgram  # whose input is (carry, batch)
    weight: Callable[..., Any]  # (outer, user's carry, batch) -> weight, usually without weights


def trace_model(
    first: Callable,
    layers: Sequence[Callable],
    last: Callable,
    outer: PyTree,
    weights: Sequence[PyTree],
    batch: PyTree,
    jit: Any,
) -> ModelProgram:
    """Traces all programs, and rejects functions that do not fit together.

    All arguments are `ShapeDtypeStruct`s; the structs of weights have shardings.
    """
    cache: dict[Any, BlockProgram] = {}
    blocks, x, varying = [], batch, ()
    for i, (function, tree) in enumerate(zip([first, *layers], [outer, *weights], strict=True)):
        key = bool(i), function, varying, key_of(tree), key_of(x)
        if key not in cache:
            name = f"layer {i - 1}" if i else "`first`"
            cache[key] = _trace_block(name, function, tree, x, varying, jit)
        blocks.append(cache[key])
        x, varying = blocks[-1].carry, blocks[-1].varying

    def pair(*args: PyTree) -> WeightedLoss:
        result = last(*args)
        return result if isinstance(result, WeightedLoss) else WeightedLoss(result, 1.0)

    end = _trace_block("`last`", lambda *args: pair(*args).loss, outer, (x, batch), varying, jit)
    weight = jit(lambda *args: jnp.asarray(pair(*args).weight, jnp.float32))
    return ModelProgram(blocks, end, weight)


def _trace_step(
    name: str, function: Callable, weights: PyTree, x: PyTree
) -> tuple[Callable, Any, Any]:
    """Returns a function of weights and input, its jaxpr and the shapes of its results."""
    step: Callable = {
        "`first`": function,
        "`last`": lambda weights, x: function(weights, x[0][0], x[1]),
    }.get(name, lambda weights, x: (function(weights, *x), x[1]))
    closed, carry = traced(name, step, types_of(weights), x)
    if name == "`last`":
        if getattr(carry, "shape", None) != () or not is_float(carry):
            raise TypeError(
                "`last` must return a float scalar as the loss, or a `layerwise.WeightedLoss`, but "
                f"its loss is {text_of(carry)}."
            )
    elif not (isinstance(carry, tuple) and len(carry) == 2):
        raise TypeError(
            f"`first` must return (carry, shared), but returned {text_of(carry)}. Return "
            "`(carry, None)` if the layers share nothing."
        )
    return step, closed.jaxpr, carry


def _trace_block(
    name: str,
    function: Callable,
    weights: PyTree,
    x: PyTree,
    varying: tuple[int, ...],
    jit: Any,
) -> BlockProgram:
    """Traces a function; `varying` are the leaves of the input that have a gradient."""
    is_first, is_last = name == "`first`", name == "`last`"
    step, jaxpr, carry = _trace_step(name, function, weights, x)
    shapes, treedef = jax.tree.leaves(x), jax.tree.structure((weights, x))
    begin, count = len(jax.tree.leaves(weights)), len(jaxpr.outvars)
    places = {id(x): i for i, x in enumerate(jaxpr.invars[begin:])}
    passed = {i: places[id(x)] for i, x in enumerate(jaxpr.outvars) if id(x) in places}
    reached = [live_inputs(jaxpr, [i == j for j in range(count)]) for i in range(count)]
    trained = [i for i in range(begin) if not is_last or i in reached[0]]
    chosen = *trained, *(begin + i for i in varying)
    depends = [is_last or not live.isdisjoint(chosen) for live in reached]
    made = enumerate(jax.tree.leaves(carry))
    new = tuple(i for i, x in made if is_float(x) and depends[i])

    def forward(weights: PyTree, x: PyTree) -> list[jax.Array]:
        made = jax.tree.leaves(step(weights, x))
        return [x for i, x in enumerate(made) if i not in passed]

    def pull(kept: Sequence[int], weights: PyTree, g: PyTree, inputs: PyTree) -> Any:
        """Returns the loss, and the vector-Jacobian product; recomputes the block."""
        known = dict(zip(kept, inputs, strict=True))
        leaves = jax.tree.leaves(weights)
        leaves += [
            known[i] if i in known else jnp.zeros(x.shape, x.dtype, device=x.sharding)
            for i, x in enumerate(shapes)
        ]

        def run(parts: list[Any]) -> list[Any]:
            arguments = dict(enumerate(leaves)) | dict(zip(chosen, parts, strict=True))
            made = jax.tree.leaves(step(*treedef.unflatten(arguments.values())))
            return [made[i] for i in new]

        result, product = jax.vjp(run, [leaves[i] for i in chosen])
        (made,) = product([x.astype(y.dtype) for x, y in zip(g, result, strict=True)])
        loss = result[0].astype(jnp.float32) * g[0] if is_last else None
        gradient = dict(zip(trained, made, strict=False))
        return loss, [gradient.get(i) for i in range(begin)], made[len(trained) :]

    g = [jax.tree.leaves(carry)[i] for i in new]
    pulled = jax.make_jaxpr(partial(pull, range(len(shapes))))(types_of(weights), g, shapes)
    read = {i - begin - len(g) for i in live_inputs(pulled.jaxpr)}
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in shapes]  # has no zeros
    # What the layer passes on is on the device anyway. A batch belongs to the caller.
    stays = range(len(shapes)) if is_first else passed.values()
    kept = [i for i in range(len(shapes)) if i in read or is_key[i]]
    moving = [i for i in kept if i not in stays]
    kept = (*moving, *(i for i in kept if i in stays))
    same = [*map(key_of, g)] == [key_of(shapes[i]) for i in varying]
    backward = _backward_programs(partial(pull, kept), jax.tree.leaves(weights), same, jit)
    return BlockProgram(jit(forward), backward, carry, passed, kept, len(moving), new)


def _backward_programs(
    pull: Callable[..., Any], weights: Sequence[PyTree], same: bool, jit: Any
) -> Callable[[tuple, tuple, bool], Pair]:
    """Returns `BlockProgram.backward`.

    `weights` are shapes. `same` is whether `g` has the same shapes before and after.
    """

    def backward(remain: bool, total: PyTree, *args: PyTree) -> Any:
        value, g, more = pull(*args)
        g: list[Any] = [
            x if x is None else _added(x, y).astype(jnp.float32 if remain else x.dtype)
            for x, y in zip(g, total or [None] * len(g), strict=True)
        ]
        if value is None and not remain:
            squares = (jnp.sum(jnp.square(x.astype(jnp.float32))) for x in g)
            value = sum(squares, jnp.float32(0))
        return (g, value), more

    # The weights' gradient stays on the weights' devices.
    wheres = [x.sharding.with_memory_kind("device") for x in weights]
    is_float32 = all(x.dtype == jnp.float32 for x in weights)

    @functools.cache
    def programs(before: tuple, after: tuple, several: bool) -> Pair:
        donated = [_G] if same and before == after and after else []
        options = {"out_shardings": ((wheres, None), [*after])}
        both = {"donate_argnums": (_TOTAL, *donated)}
        # If dtypes differ, no result of the last program could use the total's memory.
        last = {"donate_argnums": donated} if several and not is_float32 else both
        return (
            jit(partial(backward, False), **options, **last),
            jit(partial(backward, True), **options, **both),
        )

    return programs


def shares_of(weights: Sequence[Any]) -> list[Any]:
    """Returns micro-batches' shares of a step; without any targets, loss and gradient are zero."""
    total = sum(weights, jnp.float32(0))
    return [w / jnp.where(total == 0, 1, total) for w in weights]


def _added(x: Any, total: Any) -> Any:
    return x if total is None else total + x.astype(total.dtype)
