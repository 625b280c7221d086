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

from zenflow_jax.layerwise._tracing import (
    is_float,
    key_of,
    live_inputs,
    text_of,
    traced,
    types_of,
    varied_by,
)

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
    """The programs of `first` or of one kind of layer, for one shape of their arguments.

    `forward(weights, input)` returns the carry's leaves, except leaves that are passed on.

    `backward(before, after, several)` returns programs (total, weights, g, input) -> (gradient,
    squares), g, where `g` is the gradient of the varying leaves of the carry, then of the input;
    `squares` is the gradient's sum of squares, after the last of several micro-batches. The input
    is a list of its `kept` leaves. `before` and `after` are the shardings of `g`: without them, a
    device could hold a whole gradient, and programs would be compiled twice.
    """

    forward: Callable[..., list[jax.Array]]
    backward: Callable[[tuple, tuple, bool], Pair]
    carry: Any  # as `ShapeDtypeStruct`s
    passed: Mapping[int, int]  # leaves of the carry that are leaves of the input
    kept: tuple[int, ...]
    moves: tuple[bool, ...]  # whether each kept leaf may wait in host memory
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
    loss: Callable[..., Any]  # (outer, user's carry, batch) -> loss
    weight: Callable[..., Any]  # (the same) -> weight, usually without outer weights
    # (shardings of g, several) -> a program (total, share, outer, carry, batch) -> loss, total, g,
    # which are multiplied by the micro-batch's share. In a total, weights that the loss does not
    # read have None.
    last: Callable[[tuple, bool], Callable[..., Any]]


def trace_model(
    first: Callable,
    layers: Sequence[Callable],
    last: Callable,
    outer: PyTree,
    weights: Sequence[PyTree],
    batch: PyTree,
    options: dict[str, Any] | None,
) -> ModelProgram:
    """Traces all programs, and rejects functions that do not fit together.

    All arguments are `ShapeDtypeStruct`s; the structs of weights have shardings.
    """
    jit = partial(jax.jit, compiler_options=options)
    cache: dict[Any, BlockProgram] = {}
    blocks, x, varying = [], batch, ()
    for i, (function, tree) in enumerate(zip([first, *layers], [outer, *weights], strict=True)):
        key = bool(i), function, varying, key_of(tree), key_of(x)
        if key not in cache:
            name = f"layer {i - 1}" if i else "`first`"
            cache[key] = _trace_block(name, function, tree, x, varying, jit)
        blocks.append(cache[key])
        x, varying = blocks[-1].carry, blocks[-1].varying
    loss, read = _trace_last(last, types_of(outer), x[0], batch)
    run_last = _last_programs(loss, outer, read, varying, jit)
    value, weight = (jit(lambda *args, i=i: loss(*args)[i]) for i in range(2))
    return ModelProgram(blocks, value, weight, run_last)


def _trace_block(
    name: str,
    function: Callable,
    weights: PyTree,
    x: PyTree,
    varying: tuple[int, ...],
    jit: Any,
) -> BlockProgram:
    """Traces `first` or a layer; `varying` are the leaves of the input that have a gradient."""
    is_first = name == "`first`"
    step = function if is_first else lambda weights, x: (function(weights, *x), x[1])
    closed, carry = traced(name, step, types_of(weights), x)
    if not (isinstance(carry, tuple) and len(carry) == 2):
        raise TypeError(
            f"`first` must return (carry, shared), but returned {text_of(carry)}. Return "
            "`(carry, None)` if the layers share nothing."
        )
    (shapes, treedef), jaxpr = jax.tree.flatten(x), closed.jaxpr
    begin = len(jax.tree.leaves(weights))
    places = {id(x): i for i, x in enumerate(jaxpr.invars[begin:])}
    passed = {i: places[id(x)] for i, x in enumerate(jaxpr.outvars) if id(x) in places}
    chosen = *range(begin), *(begin + i for i in varying)
    count = len(jaxpr.outvars)
    reached = [live_inputs(jaxpr, [i == j for j in range(count)]) for i in range(count)]
    made = enumerate(jax.tree.leaves(carry))
    new = tuple(i for i, x in made if is_float(x) and not reached[i].isdisjoint(chosen))

    def forward(weights: PyTree, x: PyTree) -> list[jax.Array]:
        made = jax.tree.leaves(step(weights, x))
        return [x for i, x in enumerate(made) if i not in passed]

    def pull(kept: Sequence[int], weights: PyTree, g: PyTree, inputs: PyTree) -> tuple[Any, Any]:
        """Returns the block's vector-Jacobian product; recomputes the block."""
        known = dict(zip(kept, inputs, strict=True))
        leaves = [
            known[i] if i in known else jnp.zeros(x.shape, x.dtype, device=x.sharding)
            for i, x in enumerate(shapes)
        ]

        def run(*args: PyTree) -> list[Any]:
            made = jax.tree.leaves(step(*args))
            return [made[i] for i in new]

        varied, parts = varied_by(run, (weights, treedef.unflatten(leaves)), chosen)
        (made,) = jax.vjp(varied, parts)[1](g)
        return made[:begin], made[begin:]

    g = [jax.tree.leaves(carry)[i] for i in new]
    pulled = jax.make_jaxpr(partial(pull, range(len(shapes))))(types_of(weights), g, shapes)
    read = {i - begin - len(g) for i in live_inputs(pulled.jaxpr)}
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in shapes]  # has no zeros
    kept = tuple(i for i in range(len(shapes)) if i in read or is_key[i])
    # What the layer passes on is on the device anyway. A batch belongs to the caller.
    stays = range(len(shapes)) if is_first else passed.values()
    moves = tuple(i not in stays and not is_key[i] for i in kept)
    same = [*map(key_of, g)] == [key_of(shapes[i]) for i in varying]
    backward = _backward_programs(partial(pull, kept), jax.tree.leaves(weights), same, jit)
    return BlockProgram(jit(forward), backward, carry, passed, kept, moves, new)


def _backward_programs(
    pull: Callable[..., tuple[PyTree, PyTree]], weights: Sequence[PyTree], same: bool, jit: Any
) -> Callable[[tuple, tuple, bool], Pair]:
    """Returns `BlockProgram.backward`.

    `pull` returns the gradient of the `weights`, which are shapes, and `g`. `same` is whether `g`
    has the same shapes before and after.
    """

    def backward(remain: bool, total: PyTree, *args: PyTree) -> Any:
        g, more = pull(*args)
        g = [
            _added(x, y).astype(jnp.float32 if remain else x.dtype)
            for x, y in zip(g, total or [None] * len(g), strict=True)
        ]
        if remain:
            return (g, None), more
        squares = (jnp.sum(jnp.square(x.astype(jnp.float32))) for x in g)
        return (g, sum(squares, jnp.float32(0))), more

    # The weights' gradient stays on the weights' devices.
    wheres = [_on_device(x) for x in weights]
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


def _trace_last(last: Callable, *args: PyTree) -> tuple[Callable, tuple[int, ...]]:
    """Returns a function that returns loss and weight, and the outer weights that it reads."""
    closed, end = traced("`last`", last, *args)
    pair = end if isinstance(end, WeightedLoss) else (end, end)
    if [getattr(x, "shape", None) for x in pair] != [(), ()] or not is_float(pair[0]):
        raise TypeError(
            "`last` must return a float scalar as the loss, or a `layerwise.WeightedLoss`, but "
            f"returned {text_of(end)}."
        )

    def loss(outer: PyTree, carry: PyTree, batch: PyTree) -> tuple[jax.Array, jax.Array]:
        result = last(outer, carry, batch)
        value, weight = result if isinstance(result, WeightedLoss) else (result, 1.0)
        return value, jnp.asarray(weight, jnp.float32)

    live = live_inputs(closed.jaxpr, [True] + [False] * (len(closed.out_avals) - 1))
    return loss, tuple(i for i in range(len(jax.tree.leaves(args[0]))) if i in live)


def _last_programs(
    loss: Callable, outer: PyTree, read: tuple[int, ...], varying: tuple[int, ...], jit: Any
) -> Any:
    """Returns `ModelProgram.last`."""
    leaves = jax.tree.leaves(outer)
    count = len(leaves)
    chosen = *read, *(count + i for i in varying)
    where = [_on_device(x) if i in read else None for i, x in enumerate(leaves)]

    def run(
        several: bool, total: PyTree, share: Any, outer: PyTree, carry: PyTree, batch: PyTree
    ) -> Any:
        def loss_of(outer: PyTree, carry: PyTree) -> Any:
            return loss(outer, carry[0], batch)[0].astype(jnp.float32) * share

        varied, parts = varied_by(loss_of, (outer, carry), chosen)
        value, g = jax.value_and_grad(varied)(parts)
        made: list[Any] = [None] * count
        for i, x in zip(read, g, strict=False):
            x = x.astype(jnp.float32) if several else x
            made[i] = _added(x, None if total is None else total[i])
        return value, made, g[len(read) :]

    @functools.cache
    def program(of_g: tuple, several: bool) -> Callable[..., Any]:
        options = {"out_shardings": (None, where, [*of_g]), "donate_argnums": _TOTAL}
        return jit(partial(run, several), **options)

    return program


def shares_of(weights: Sequence[Any]) -> list[Any]:
    """Returns micro-batches' shares of a step; without any targets, loss and gradient are zero."""
    total = sum(weights, jnp.float32(0))
    return [w / jnp.where(total == 0, 1, total) for w in weights]


def _added(x: Any, total: Any) -> Any:
    return x if total is None else total + x.astype(total.dtype)


def _on_device(x: Any) -> Any:
    return x.sharding.with_memory_kind("device")
