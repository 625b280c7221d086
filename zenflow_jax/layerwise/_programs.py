"""The device programs of a model that is given as three functions, traced once per batch shape.

Weights, carries and gradients pass through these programs as lists of arrays. Integer arrays in a
carry have no gradient; neither do outputs of `first` that do not depend on the outer weights.

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

from zenflow_jax.layerwise._tracing import (
    float_places,
    floats_of,
    is_float,
    key_of,
    live_inputs,
    reads,
    text_of,
    traced,
    types_of,
    varied_by,
)

Options = dict[str, Any] | None

# The numbers of arguments of backward programs.
_TOTAL, _G, _G_SHARED = 0, 3, 4


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


class Backward(NamedTuple):
    """A program for the last of several micro-batches, and for all others, or the only one.

    (total, weighing, weights, g, g_shared, inputs, shared) -> (gradient, squares), (g, g_shared)

    Of several micro-batches, `weighing` is the weight and, for the last, the sum of all weights.
    The last two results are the gradients of the carry and of `shared`. `squares` is the gradient's
    sum of squares, but None while micro-batches remain.
    """

    last: Callable[..., Any]
    other: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class LayerProgram:
    """The programs of one kind of layer, for one shape of its arguments.

    `forward(weights, carry, shared)` returns the new carry's leaves, except leaves that the layer
    passes on unchanged. `backward` needs only the leaves of the input that are in `kept`; it
    returns programs, given the shardings of `g` before and after, and of `g_shared`. Without them,
    a device could hold a whole gradient, and programs would be compiled twice.
    """

    forward: Callable[..., list[jax.Array]]
    backward: Callable[..., Backward]
    carry: Any  # the new carry, as `ShapeDtypeStruct`s
    passed: Mapping[int, int]  # leaves of the new carry that are leaves of the old carry
    kept: tuple[int, ...]

    def run(self, weights: Any, carry: Any, shared: Any) -> Any:
        """Returns the new carry."""
        made = iter(self.forward(weights, carry, shared))
        leaves, treedef = jax.tree.leaves(carry), jax.tree.structure(self.carry)
        count = treedef.num_leaves
        new = [leaves[self.passed[i]] if i in self.passed else next(made) for i in range(count)]
        return jax.tree.unflatten(treedef, new)


@dataclasses.dataclass(frozen=True)
class ModelProgram:
    """The programs of a whole model, for one shape of a batch."""

    first: Callable[..., Any]  # (outer, batch) -> (carry, shared)
    layers: Sequence[LayerProgram]
    loss: Callable[..., Any]  # (outer, carry, batch) -> loss, weight
    # (shardings of g, of g_shared) -> a program for the only micro-batch, and for one of several:
    # (total, outer, carry, moved, batch) -> (loss, weight), total, g, g_shared, where `total` has
    # None for outer weights that the loss does not read, `moved` are the `moving` leaves of
    # `shared`, and `g_shared` is zero
    last: Callable[..., tuple[Callable[..., Any], Callable[..., Any]]]
    first_backward: Callable[..., Backward]  # with `batch` in place of the last two arguments
    moving: tuple[int, ...]  # leaves of `shared` that have a gradient


def trace_model(
    first: Callable,
    layers: Sequence[Callable],
    last: Callable,
    outer: Any,
    weights: Sequence[Any],
    batch: Any,
    trains: Sequence[bool],
    options: Options,
    cache: dict[Any, LayerProgram],
) -> ModelProgram:
    """Traces all programs, and rejects functions that do not fit together.

    All arguments are `ShapeDtypeStruct`s; the structs of weights have shardings. The first entry in
    `trains` belongs to `outer`. `cache` contains layers that were traced before.
    """
    jit = partial(jax.jit, compiler_options=options)
    _, made = traced("`first`", first, types_of(outer), batch)
    if not (isinstance(made, tuple) and len(made) == 2):
        raise TypeError(
            f"`first` must return (carry, shared), but returned {text_of(made)}. Return "
            "`(carry, None)` if the layers share nothing."
        )
    carry, shared = made
    moving = _moving(first, types_of(outer), batch, carry, shared) if trains[0] else ()
    programs: list[LayerProgram] = []
    for i, (function, layer_weights) in enumerate(zip(layers, weights, strict=True)):
        key = function, trains[i + 1], moving, key_of(layer_weights), key_of((carry, shared))
        if key not in cache:
            arguments = layer_weights, carry, shared, moving, trains[i + 1]
            cache[key] = _trace_layer(f"layer {i}", function, *arguments, jit)
        programs.append(cache[key])
        carry = programs[-1].carry
    loss, read = _trace_last(last, types_of(outer), carry, batch)
    leaves = jax.tree.leaves(outer)
    return ModelProgram(
        first=jit(first),
        layers=programs,
        loss=jit(loss),
        last=_last_programs(loss, leaves, read if trains[0] else (), jit),
        first_backward=_backward_programs(_pull_first(first, moving), leaves, False, jit),
        moving=moving,
    )


def _trace_last(last: Callable, *args: Any) -> tuple[Callable, tuple[int, ...]]:
    """Returns a function that returns loss and weight, and the outer weights that it reads."""
    closed, end = traced("`last`", last, *args)
    pair = end if isinstance(end, WeightedLoss) else (end, end)
    if [getattr(x, "shape", None) for x in pair] != [(), ()] or not is_float(pair[0]):
        raise TypeError(
            "`last` must return a float scalar as the loss, or a `layerwise.WeightedLoss`, but "
            f"returned {text_of(end)}."
        )

    def loss(outer: Any, carry: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        result = last(outer, carry, batch)
        value, weight = result if isinstance(result, WeightedLoss) else (result, 1.0)
        return value, jnp.asarray(weight, jnp.float32)

    live = live_inputs(closed.jaxpr, [True] + [False] * (len(closed.out_avals) - 1))
    return loss, tuple(i for i in range(len(jax.tree.leaves(args[0]))) if i in live)


def _last_programs(loss: Callable, outer: Sequence[Any], read: tuple[int, ...], jit: Any) -> Any:
    """Returns `ModelProgram.last`."""

    def only(total: Any, outer: Any, carry: Any, moved: Any, batch: Any) -> Any:
        floats = [count + i for i in float_places(carry)]
        varied, parts = varied_by(loss, (outer, carry, batch), (*read, *floats))
        value, g = jax.value_and_grad(varied, has_aux=True)(parts)
        made = dict(zip(read, g[: len(read)], strict=True))
        total = [made.get(i) for i in range(count)]
        return value, total, g[len(read) :], [*map(jnp.zeros_like, moved)]

    def several(total: Any, *args: Any) -> Any:
        value, made, *more = only(None, *args)
        return value, _add(made, total, value[1]), *more

    @functools.cache
    def programs(*of_gradients: Any) -> tuple[Any, Any]:
        shardings = {"out_shardings": (None, where, *map(list, of_gradients))}
        return jit(only, **shardings), jit(several, donate_argnums=_TOTAL, **shardings)

    count = len(outer)
    where = [_on_device(x) if i in read else None for i, x in enumerate(outer)]
    return programs


def _trace_layer(
    name: str,
    function: Callable,
    weights: Any,
    carry: Any,
    shared: Any,
    moving: tuple[int, ...],
    trains: bool,
    jit: Any,
) -> LayerProgram:
    closed, new = traced(name, function, types_of(weights), carry, shared)
    (shapes, treedef), jaxpr = jax.tree.flatten(carry), closed.jaxpr
    begin, end = len(jax.tree.leaves(weights)), len(jax.tree.leaves((weights, carry)))
    places = {id(x): i for i, x in enumerate(jaxpr.invars[begin:end])}
    passed = {i: places[id(x)] for i, x in enumerate(jaxpr.outvars) if id(x) in places}
    floats = [begin + i for i in float_places(carry)]
    trained = range(begin if trains else 0)
    varying = *trained, *floats, *(end + i for i in moving)

    def forward(weights: Any, carry: Any, shared: Any) -> list[jax.Array]:
        made = jax.tree.leaves(function(weights, carry, shared))
        return [x for i, x in enumerate(made) if i not in passed]

    def pull(
        kept: Sequence[int], weights: Any, g: Any, g_shared: Any, inputs: Any, shared: Any
    ) -> tuple[Any, Any]:
        """Returns the layer's vector-Jacobian product; recomputes the layer."""
        known = dict(zip(kept, inputs, strict=True))
        leaves = [
            known[i] if i in known else jnp.zeros(x.shape, x.dtype, device=x.sharding)
            for i, x in enumerate(shapes)
        ]
        args = weights, treedef.unflatten(leaves), shared
        varied, parts = varied_by(lambda *args: floats_of(function(*args)), args, varying)
        (made,) = jax.vjp(varied, parts)[1](g)
        of_weights, made = made[: len(trained)], made[len(trained) :]
        more = [a + b for a, b in zip(g_shared, made[len(floats) :], strict=True)]
        return of_weights if trains else None, (made[: len(floats)], more)

    g, g_shared = floats_of(new), [jax.tree.leaves(shared)[i] for i in moving]
    whole = partial(pull, range(len(shapes)))
    kept = tuple(reads(whole, 3, types_of(weights), g, g_shared, shapes, shared))
    same = [key_of(x) for x in g] == [key_of(x) for x in floats_of(carry)]
    of_trained = jax.tree.leaves(weights) if trains else None
    backward = _backward_programs(partial(pull, kept), of_trained, same, jit)
    return LayerProgram(jit(forward), backward, new, passed, kept)


def _pull_first(first: Callable, moving: tuple[int, ...]) -> Callable:
    """Returns the vector-Jacobian product of `first`."""

    def begin(outer: Any, batch: Any) -> list[Any]:
        carry, shared = first(outer, batch)
        return floats_of(carry) + [jax.tree.leaves(shared)[i] for i in moving]

    def pull(outer: Any, g: Any, g_shared: Any, batch: Any) -> tuple[Any, Any]:
        varied, parts = varied_by(begin, (outer, batch), range(len(jax.tree.leaves(outer))))
        return jax.vjp(varied, parts)[1]([*g, *g_shared])[0], ()

    return pull


def _backward_programs(
    pull: Callable[..., tuple[Any, Any]], weights: Any, same: bool, jit: Any
) -> Callable[..., Backward]:
    """Returns a function that returns programs for `pull`, as in `LayerProgram.backward`.

    `pull` returns the weights' gradient and other gradients. `weights` are shapes, or None if they
    are frozen. `same` is whether `g` has the same shapes before and after.
    """

    def backward(total: Any, weighing: Any, *args: Any) -> Any:
        g, more = pull(*args)
        if g is None:
            return (None, jnp.float32(0)), more
        if weighing is None:
            g = _add(g, total)
        else:
            weight, weights_sum = weighing
            g = _add(g, total, weight)
            if weights_sum is None:
                return (g, None), more
            # Without any targets, loss and gradient are zero.
            divisor = jnp.where(weights_sum == 0, 1, weights_sum)
            g = [(x / divisor).astype(w.dtype) for x, w in zip(g, weights, strict=True)]
        squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in g]
        return (g, sum(squares, jnp.float32(0))), more

    # The weights' gradient stays on the weights' devices.
    wheres = None if weights is None else [_on_device(x) for x in weights]
    # If dtypes differ, no result of the last program could use the total's memory.
    is_float32 = all(x.dtype == jnp.float32 for x in weights or ())

    @functools.cache
    def programs(before: tuple, after: tuple, shared: tuple) -> Backward:
        results: Any = (wheres, None), ([*after], [*shared]) if after else None
        donated = (_G, _G_SHARED) if same and before == after else (_G_SHARED,) if after else ()
        with_total = jit(backward, out_shardings=results, donate_argnums=(_TOTAL, *donated))
        last = jit(backward, out_shardings=results, donate_argnums=donated)
        return Backward(with_total if is_float32 else last, with_total)

    return programs


def _add(g: Sequence[Any], total: Any, weight: Any = None) -> list[Any]:
    """Returns the total of gradients with another micro-batch's; weighted ones are float32."""
    if weight is not None:
        g = [None if x is None else x.astype(jnp.float32) * weight for x in g]
    pairs = zip(g, [None] * len(g) if total is None else total, strict=True)
    return [x if y is None else x + y for x, y in pairs]


def _moving(first: Callable, outer: Any, batch: Any, carry: Any, shared: Any) -> tuple[int, ...]:
    """Returns the leaves of `shared` whose gradients reach the outer weights."""
    floats = float_places(shared)
    g_shared = [jax.tree.leaves(shared)[i] for i in floats]
    live = reads(_pull_first(first, floats), 2, outer, floats_of(carry), g_shared, batch)
    return tuple(floats[i] for i in live)


def _on_device(x: Any) -> Any:
    return x.sharding.with_memory_kind("device")
