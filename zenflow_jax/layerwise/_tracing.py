"""Traces functions, and finds what their arguments and results are: shapes, floats, uses."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AxisType
from jaxtyping import PyTree


def traced(name: str, function: Callable, *args: PyTree) -> tuple[Any, Any]:
    """Traces a function; rejects captured weights, which would not be trained, and random keys."""
    try:
        closed, result = jax.make_jaxpr(function, return_shape=True)(*args)
    except Exception as error:
        error.add_note(f"This happened in {name}, called with {' and '.join(map(text_of, args))}.")
        raise
    # The arrays that a function, or a jitted function inside it, closes over.
    for x in (x for jaxpr in jaxprs(closed) for x in getattr(jaxpr, "consts", ())):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"{name} uses a random key that is not among its arguments, so all steps would "
                "draw the same numbers. Pass keys in the batch."
            )
        if isinstance(x, jax.Array) and is_float(x):
            raise ValueError(
                f"{name} uses an array {text_of(x)} that is not among its arguments, so it would "
                "not be trained. Pass weights as arguments, and constants as NumPy arrays or "
                "Python numbers, or in the batch."
            )
    return closed, result


def jaxprs(jaxpr: Any) -> Iterator[Any]:
    """Yields a jaxpr and all jaxprs inside it."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(equation.params):
            if hasattr(inner, "eqns"):
                yield from jaxprs(inner)


def text_of(tree: PyTree) -> str:
    return str(jax.tree.map(lambda x: f"{jnp.result_type(x).name}{list(jnp.shape(x))}", tree))


def types_of(tree: PyTree) -> Any:
    """Returns shapes, with weak types of Python numbers, which adopt dtypes.

    Shardings on explicit axes belong to a type.
    """

    def type_of(x: Any) -> jax.ShapeDtypeStruct:
        x = jax.typeof(x)
        sharding = x.sharding if AxisType.Explicit in x.sharding.mesh.axis_types else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)

    return jax.tree.map(type_of, tree)


def key_of(shapes: PyTree) -> Any:
    leaves, treedef = jax.tree.flatten(shapes)
    return treedef, tuple((x.shape, x.dtype, x.weak_type, x.sharding) for x in leaves)


def is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def live_inputs(jaxpr: Any, outputs: Sequence[bool] | bool = True) -> set[int]:
    """Returns the inputs that the chosen outputs depend on."""
    return {i for i, is_live in enumerate(dce_jaxpr(jaxpr, outputs)[1]) if is_live}
