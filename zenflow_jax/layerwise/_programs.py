"""The device programs of a model that is given as three functions, traced once per batch shape.

Weights, carries and gradients pass through these programs as lists of arrays. Integer arrays in a
carry have no gradient; neither do outputs of `first` that do not depend on the outer weights.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Options = dict[str, Any] | None


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
class LayerProgram:
    """The programs of one kind of layer, for one shape of its arguments.

    `forward(weights, carry, shared)` returns the new carry's leaves, except leaves that the layer
    passes on unchanged. `backward` needs only the leaves of the input that are in `kept`.
    """

    forward: Callable[..., list[jax.Array]]
    # The arguments and results are as in `_backward_of`. The first function is for all
    # micro-batches except the last, the second for the last one, which consumes the weights.
    backward: tuple[Callable[..., Any], Callable[..., Any]]
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
    last: Callable[..., Any]  # the same -> (loss, weight), (gradient of outer, of the carry)
    first_backward: tuple[Callable[..., Any], Callable[..., Any]]  # as for a layer
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
    with _noting("`first`", outer, batch):
        made = jax.make_jaxpr(first, return_shape=True)(shapes_of(outer), batch)
    _check_closure(made[0], "`first`")
    if not (isinstance(made[1], tuple) and len(made[1]) == 2):
        raise TypeError(
            f"`first` must return (carry, shared), but returned {_text(made[1])}. Return "
            "`(carry, None)` if the layers share nothing."
        )
    carry, shared = made[1]
    moving = _moving(first, shapes_of(outer), batch, carry, shared) if trains[0] else ()
    programs: list[LayerProgram] = []
    for i, (function, of_layer) in enumerate(zip(layers, weights, strict=True)):
        key = function, trains[i + 1], moving, key_of(of_layer), key_of((carry, shared))
        if key not in cache:
            with _noting(f"layer {i}", carry, shared):
                cache[key] = _trace_layer(
                    function, of_layer, carry, shared, moving, trains[i + 1], i, options
                )
        programs.append(cache[key])
        carry = programs[-1].carry
    with _noting("`last`", carry, batch):
        closed, end = jax.make_jaxpr(last, return_shape=True)(shapes_of(outer), carry, batch)
    _check_closure(closed, "`last`")
    pair = end if isinstance(end, WeightedLoss) else (end, end)
    if [getattr(x, "shape", None) for x in pair] != [(), ()] or not _is_float(pair[0]):
        raise TypeError(
            "`last` must return a float scalar as the loss, or a `layerwise.WeightedLoss`, but "
            f"returned {_text(end)}."
        )

    def loss(outer: Any, carry: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        result = last(outer, carry, batch)
        value, weight = result if isinstance(result, WeightedLoss) else (result, 1.0)
        return value, jnp.asarray(weight, jnp.float32)

    def with_gradient(outer: Any, carry: Any, batch: Any) -> Any:
        floats, rebuild = _split_floats(carry)

        def varied(outer: Any, floats: Any) -> tuple[jax.Array, jax.Array]:
            return loss(outer, rebuild(floats), batch)

        if not trains[0]:
            value, g = jax.value_and_grad(partial(varied, outer), has_aux=True)(floats)
            return value, (None, g)
        return jax.value_and_grad(varied, argnums=(0, 1), has_aux=True)(outer, floats)

    return ModelProgram(
        first=jax.jit(first, compiler_options=options),
        layers=programs,
        loss=jax.jit(loss, compiler_options=options),
        last=jax.jit(with_gradient, compiler_options=options),
        first_backward=_first_backward_of(first, outer, moving, options),
        moving=moving,
    )


def _trace_layer(
    function: Callable,
    weights: Any,
    carry: Any,
    shared: Any,
    moving: tuple[int, ...],
    trains: bool,
    number: int,
    options: Options,
) -> LayerProgram:
    closed, new = jax.make_jaxpr(function, return_shape=True)(shapes_of(weights), carry, shared)
    _check_closure(closed, f"layer {number}")
    count, jaxpr = len(jax.tree.leaves(carry)), closed.jaxpr
    begin = len(jax.tree.leaves(weights))
    places = {id(x): i for i, x in enumerate(jaxpr.invars[begin : begin + count])}
    passed = {i: places[id(x)] for i, x in enumerate(jaxpr.outvars) if id(x) in places}

    def forward(weights: Any, carry: Any, shared: Any) -> list[jax.Array]:
        made = jax.tree.leaves(function(weights, carry, shared))
        return [x for i, x in enumerate(made) if i not in passed]

    pull = _pull_of(function, carry, moving, trains)
    g = [x for x in jax.tree.leaves(new) if _is_float(x)]
    reads = _reads(pull, 1, shapes_of(weights), jax.tree.leaves(carry), shared, g)
    kept = tuple(sorted(reads))
    backward = _backward_of(pull, carry, kept)
    same = [key_of(x) for x in g] == [key_of(x) for x in jax.tree.leaves(carry) if _is_float(x)]
    # If the carry's gradients have different shapes, they could not be donated to any result.
    donated = ("g", "g_shared") if same else ("g_shared",)
    # The weights' gradient stays on the weights' devices and reuses their memory.
    wheres = (_shardings(weights) if trains else None, None, None, None)
    jit: Any = partial(jax.jit, backward, out_shardings=wheres, compiler_options=options)
    return LayerProgram(
        forward=jax.jit(forward, compiler_options=options),
        backward=(
            jit(donate_argnames=(*donated, "total")),
            jit(donate_argnames=(*donated, "weights") if trains else donated),
        ),
        carry=new,
        passed=passed,
        kept=kept,
    )


def _pull_of(function: Callable, like: Any, moving: tuple[int, ...], trains: bool) -> Callable:
    """Returns a layer's vector-Jacobian product, which recomputes the layer."""
    treedef = jax.tree.structure(like)

    def pull(weights: Any, leaves: list[Any], shared: Any, g: list[Any]) -> Any:
        floats, rebuild = _split_floats(jax.tree.unflatten(treedef, leaves))
        parts, join = _split_at(shared, moving)

        def varied(weights: Any, floats: list[Any], parts: list[Any]) -> list[Any]:
            new = function(weights, rebuild(floats), join(parts))
            return [x for x in jax.tree.leaves(new) if _is_float(x)]

        if trains:
            return jax.vjp(varied, weights, floats, parts)[1](g)
        return None, *jax.vjp(partial(varied, weights), floats, parts)[1](g)

    return pull


def _backward_of(pull: Callable, carry: Any, kept: tuple[int, ...]) -> Callable:
    shapes = jax.tree.leaves(carry)

    def backward(
        weights: Any,
        inputs: list[Any],
        shared: Any,
        g: list[Any],
        g_shared: list[Any],
        total: Any,
        weight: Any,
        weights_sum: Any,
    ) -> tuple[Any, Any, list[Any], list[Any]]:
        """Returns the weights' gradient, its sum of squares, and gradients of carry and `shared`.

        Without micro-batches, `total` and both weights are None. Otherwise the gradient, times its
        `weight`, is added to the float32 `total`; the last micro-batch also gets the `weights_sum`.
        """
        known = dict(zip(kept, inputs, strict=True))
        leaves = [
            known[i] if i in known else jnp.zeros(x.shape, x.dtype) for i, x in enumerate(shapes)
        ]
        g_weights, g, more = pull(weights, leaves, shared, g)
        g_weights, squares = _added(g_weights, total, weight, weights_sum)
        return g_weights, squares, g, [a + b for a, b in zip(g_shared, more, strict=True)]

    return backward


def _first_backward_of(
    first: Callable, outer: Any, moving: tuple[int, ...], options: Options
) -> tuple[Callable, Callable]:
    def first_backward(
        outer: Any,
        batch: Any,
        g: list[Any],
        g_shared: list[Any],
        g_last: Any,
        total: Any,
        weight: Any,
        weights_sum: Any,
    ) -> tuple[Any, Any]:
        """Returns the outer weights' gradient, including `g_last`, and its sum of squares."""
        g_first = _pull_first(first, outer, batch, g, g_shared, moving)
        g_outer = jax.tree.map(jnp.add, g_last, g_first)
        return _added(g_outer, total, weight, weights_sum)

    wheres = _shardings(outer), None
    jit: Any = partial(jax.jit, first_backward, out_shardings=wheres, compiler_options=options)
    return jit(donate_argnames="total"), jit(donate_argnames="g_last")


def _pull_first(
    first: Callable, outer: Any, batch: Any, g: Any, g_shared: Any, moving: tuple[int, ...]
) -> Any:
    def varied(outer: Any) -> Any:
        carry, shared = first(outer, batch)
        return _split_floats(carry)[0], _split_at(shared, moving)[0]

    return jax.vjp(varied, outer)[1]((g, g_shared))[0]


def _added(g: Any, total: Any, weight: Any, weights_sum: Any) -> tuple[Any, Any]:
    """Adds a micro-batch's gradient to `total`; only the last one gets a sum of squares."""
    if g is None:
        return None, jnp.float32(0)
    if weight is not None:
        new = jax.tree.map(lambda x: x.astype(jnp.float32) * weight, g)
        new = new if total is None else jax.tree.map(jnp.add, total, new)
        if weights_sum is None:
            return new, None
        # Without any targets, loss and gradient are zero.
        divisor = jnp.where(weights_sum == 0, 1, weights_sum)
        g = jax.tree.map(lambda x, like: (x / divisor).astype(like.dtype), new, g)
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(g)]
    return g, sum(squares, jnp.float32(0))


def _moving(first: Callable, outer: Any, batch: Any, carry: Any, shared: Any) -> tuple[int, ...]:
    """Returns the leaves of `shared` whose gradients reach the outer weights."""
    leaves = jax.tree.leaves(shared)
    floats = tuple(i for i, x in enumerate(leaves) if _is_float(x))

    def pull(g_shared: list[Any], outer: Any, batch: Any, g: Any) -> Any:
        return _pull_first(first, outer, batch, g, g_shared, floats)

    g = [x for x in jax.tree.leaves(carry) if _is_float(x)]
    reads = _reads(pull, 0, [leaves[i] for i in floats], outer, batch, g)
    return tuple(floats[i] for i in sorted(reads))


def _reads(function: Callable, argument: int, *args: Any) -> set[int]:
    """Returns the leaves of an argument that the results depend on."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    live = live_inputs(jaxpr, range(len(jaxpr.outvars)))
    begin = len(jax.tree.leaves(args[:argument]))
    return {i for i in range(len(jax.tree.leaves(args[argument]))) if begin + i in live}


def live_inputs(jaxpr: Any, outputs: Iterable[int]) -> set[int]:
    """Returns the inputs that the given outputs depend on; a loop counts as a whole."""
    live = {id(jaxpr.outvars[i]) for i in outputs}  # by identity: literals are not hashable
    for equation in reversed(jaxpr.eqns):
        used = [i for i, x in enumerate(equation.outvars) if id(x) in live]
        if not used and not equation.effects:
            continue
        inputs: Iterable[int] = range(len(equation.invars))
        if equation.primitive.name in ("jit", "remat2"):
            inner = equation.params["jaxpr"]
            inputs = live_inputs(getattr(inner, "jaxpr", inner), used)
        live |= {id(equation.invars[i]) for i in inputs}
    return {i for i, x in enumerate(jaxpr.invars) if id(x) in live}


def _split_floats(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Returns the float leaves of a tree, and a function that puts other values in their place."""
    leaves = jax.tree.leaves(tree)
    return _split_at(tree, tuple(i for i, x in enumerate(leaves) if _is_float(x)))


def _split_at(tree: Any, places: tuple[int, ...]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    leaves, treedef = jax.tree.flatten(tree)

    def join(parts: list[Any]) -> Any:
        new = leaves.copy()
        for i, x in zip(places, parts, strict=True):
            new[i] = x
        return jax.tree.unflatten(treedef, new)

    return [leaves[i] for i in places], join


def _check_closure(closed: Any, name: str) -> None:
    """Rejects weights that a function closes over, which would not be trained, and random keys."""
    for x in _constants(closed):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"{name} uses a random key that is not among its arguments, so all steps would "
                "draw the same numbers. Pass keys in the batch."
            )
        if isinstance(x, jax.Array) and _is_float(x) and x.ndim > 0:
            raise ValueError(
                f"{name} uses an array {_text(x)} that is not among its arguments, so it would not "
                "be trained. Pass weights as arguments; pass constants in the batch, return them "
                "from `first` in `shared`, or make them NumPy arrays."
            )


def _constants(jaxpr: Any) -> Iterator[Any]:
    """Yields the arrays that a function, or a jitted function inside it, closes over."""
    yield from getattr(jaxpr, "consts", ())
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(equation.params, is_leaf=_has_equations):
            if _has_equations(inner):
                yield from _constants(inner)


def _has_equations(x: Any) -> bool:
    return hasattr(x, "eqns")


@contextlib.contextmanager
def _noting(name: str, *args: Any) -> Iterator[None]:
    """Adds a function's arguments to its error."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This happened in {name}, called with {' and '.join(map(_text, args))}.")
        raise


def _text(tree: Any) -> str:
    return str(jax.tree.map(lambda x: f"{jnp.result_type(x).name}{list(jnp.shape(x))}", tree))


def shapes_of(tree: Any) -> Any:
    """Returns shapes without shardings; Python numbers keep weak types, so they adopt dtypes."""

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        dtype, weak = jax.dtypes.result_type(x, return_weak_type_flag=True)
        return jax.ShapeDtypeStruct(jnp.shape(x), dtype, weak_type=weak)

    return jax.tree.map(shape_of, tree)


def _shardings(weights: Any) -> Any:
    """Returns the shardings of the weights' gradients, which are in device memory."""
    return jax.tree.map(lambda x: x.sharding.with_memory_kind("device"), weights)


def key_of(shapes: Any) -> Any:
    leaves, treedef = jax.tree.flatten(shapes)
    return treedef, tuple((x.shape, x.dtype, x.weak_type, x.sharding) for x in leaves)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
