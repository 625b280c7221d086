"""The device programs of a model that is given as three functions, traced once per batch shape.

Weights, carries and gradients pass through these programs as lists of arrays. Integer arrays in a
carry have no gradient; neither do outputs of `first` that do not depend on the outer weights.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr

Options = dict[str, Any] | None

# The numbers of arguments of backward programs.
_TOTAL, _WEIGHTS, _G, _G_SHARED, _G_LAST = 0, 2, 3, 4, 5


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
    # (total, weighing, weights, g, g_shared, kept inputs, shared) -> (gradient, squares), (the
    # gradients of the carry and of `shared`), as in `_backward_programs`
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
    # (total, weighing, outer, g, g_shared, g_last, batch) -> (gradient, squares), ()
    first_backward: tuple[Callable[..., Any], Callable[..., Any]]
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
    for i, (function, layer_weights) in enumerate(zip(layers, weights, strict=True)):
        key = function, trains[i + 1], moving, key_of(layer_weights), key_of((carry, shared))
        if key not in cache:
            with _noting(f"layer {i}", carry, shared):
                cache[key] = _trace_layer(
                    function, layer_weights, carry, shared, moving, trains[i + 1], i, options
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

        argnums = (0, 1) if trains[0] else 1
        value, g = jax.value_and_grad(varied, argnums, has_aux=True)(outer, floats)
        return value, g if trains[0] else (None, g)

    def pull(outer: Any, g: Any, g_shared: Any, g_last: Any, batch: Any) -> tuple[Any, Any]:
        g_first = _pull_first(first, moving, outer, g, g_shared, batch)
        return jax.tree.map(jnp.add, g_last, g_first), ()

    return ModelProgram(
        first=jax.jit(first, compiler_options=options),
        layers=programs,
        loss=jax.jit(loss, compiler_options=options),
        last=jax.jit(with_gradient, compiler_options=options),
        first_backward=_backward_programs(pull, _shardings(outer), (), (_G_LAST,), options),
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

    pull, leaves = _pull_of(function, carry, moving, trains), jax.tree.leaves(carry)
    g, g_shared = floats_of(new), [jax.tree.leaves(shared)[i] for i in moving]
    whole = partial(pull, range(count))
    kept = tuple(_reads(whole, 3, shapes_of(weights), g, g_shared, leaves, shared))
    same = [key_of(x) for x in g] == [key_of(x) for x in floats_of(carry)]
    return LayerProgram(
        forward=jax.jit(forward, compiler_options=options),
        backward=_backward_programs(
            partial(pull, kept),
            _shardings(weights) if trains else None,
            # If the carry's gradients have different shapes, no result could use their memory.
            (_G, _G_SHARED) if same else (_G_SHARED,),
            (_WEIGHTS,) if trains else (),
            options,
        ),
        carry=new,
        passed=passed,
        kept=kept,
    )


def _pull_of(function: Callable, like: Any, moving: tuple[int, ...], trains: bool) -> Callable:
    """Returns a layer's vector-Jacobian product, which recomputes the layer."""
    shapes, treedef = jax.tree.flatten(like)

    def pull(
        kept: Sequence[int], weights: Any, g: Any, g_shared: Any, inputs: Any, shared: Any
    ) -> tuple[Any, Any]:
        known = dict(zip(kept, inputs, strict=True))
        leaves = [
            known[i] if i in known else jnp.zeros(x.shape, x.dtype) for i, x in enumerate(shapes)
        ]
        floats, rebuild = _split_floats(jax.tree.unflatten(treedef, leaves))
        parts, join = _split_at(shared, moving)

        def varied(weights: Any, floats: list[Any], parts: list[Any]) -> list[Any]:
            return floats_of(function(weights, rebuild(floats), join(parts)))

        if trains:
            g_weights, g, more = jax.vjp(varied, weights, floats, parts)[1](g)
        else:
            g_weights, (g, more) = None, jax.vjp(partial(varied, weights), floats, parts)[1](g)
        return g_weights, (g, [a + b for a, b in zip(g_shared, more, strict=True)])

    return pull


def _pull_first(
    first: Callable, moving: tuple[int, ...], outer: Any, g: Any, g_shared: Any, batch: Any
) -> Any:
    def varied(outer: Any) -> Any:
        carry, shared = first(outer, batch)
        return floats_of(carry), _split_at(shared, moving)[0]

    return jax.vjp(varied, outer)[1]((g, g_shared))[0]


def _backward_programs(
    pull: Callable[..., tuple[Any, Any]],
    shardings: Any,
    donated: tuple[int, ...],
    consumed: tuple[int, ...],
    options: Options,
) -> tuple[Callable, Callable]:
    """Returns a program for all micro-batches except the last, and a program for the last.

    `pull` returns the weights' gradient and other gradients. The programs also return the
    gradient's sum of squares. Without micro-batches, `total` and `weighing` are None. Otherwise
    `weighing` is the micro-batch's weight and, for the last, the sum of all weights. The gradient,
    times its weight, is added to the float32 `total`. The last program consumes more arguments.
    """

    def backward(total: Any, weighing: Any, *args: Any) -> Any:
        g, others = pull(*args)
        return _added(g, total, weighing), others

    # The weights' gradient stays on the weights' devices and reuses their memory.
    wheres = (shardings, None), None
    jit: Any = partial(jax.jit, backward, out_shardings=wheres, compiler_options=options)
    return jit(donate_argnums=(_TOTAL, *donated)), jit(donate_argnums=(*donated, *consumed))


def _added(g: Any, total: Any, weighing: Any) -> tuple[Any, Any]:
    """Adds a micro-batch's gradient to `total`; only the last one gets a sum of squares."""
    if g is None:
        return None, jnp.float32(0)
    if weighing is not None:
        weight, weights_sum = weighing
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
    floats = _float_places(shared)
    g_shared = [jax.tree.leaves(shared)[i] for i in floats]
    pull = partial(_pull_first, first, floats)
    return tuple(floats[i] for i in _reads(pull, 2, outer, floats_of(carry), g_shared, batch))


def _reads(function: Callable, argument: int, *args: Any) -> list[int]:
    """Returns the leaves of an argument that the results depend on."""
    live = live_inputs(jax.make_jaxpr(function)(*args).jaxpr)
    begin = len(jax.tree.leaves(args[:argument]))
    return [i for i in range(len(jax.tree.leaves(args[argument]))) if begin + i in live]


def live_inputs(jaxpr: Any, outputs: Sequence[bool] | bool = True) -> set[int]:
    """Returns the inputs that the chosen outputs depend on."""
    return {i for i, is_live in enumerate(dce_jaxpr(jaxpr, outputs)[1]) if is_live}


def _split_floats(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Returns the float leaves of a tree, and a function that puts other values in their place."""
    return _split_at(tree, _float_places(tree))


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
        for inner in jax.tree.leaves(equation.params):
            if hasattr(inner, "eqns"):
                yield from _constants(inner)


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


def floats_of(tree: Any) -> list[Any]:
    """Returns the float leaves of a tree."""
    return [x for x in jax.tree.leaves(tree) if _is_float(x)]


def _float_places(tree: Any) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(jax.tree.leaves(tree)) if _is_float(x))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
