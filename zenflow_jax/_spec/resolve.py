"""Decides what kind of leaf each parameter is.

Only this file and `rates.py` call the user's leaf functions.
"""

import dataclasses
from collections.abc import Callable
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zenflow_jax._spec.leaf import DTYPES, LeafSpec, as_pure, check_memory, plain_name
from zenflow_jax._spec.mesh import Placement, divide_blocks, explicit_axes, placement_of
from zenflow_jax._spec.rules import round_up


class LeafRules(NamedTuple):
    """The arguments of `zenflow` that decide what kind of leaf each parameter is."""

    topk_ratio: float
    channel_axis: int | Callable[[tuple[Any, ...], Any], int]
    resident: Callable[[tuple[Any, ...], Any], bool] | None
    partition_replicated: bool | Callable[[tuple[Any, ...], Any], bool]
    transfer_dtype: np.dtype | None


def resolve(
    path: tuple[Any, ...], leaf: Any, rules: LeafRules, *, sharding: Any, decay: bool
) -> LeafSpec:
    """Returns the spec of one leaf, whose kind depends on the user's options."""
    name = plain_name(path)
    shape, dtype = _check_leaf(leaf, name)
    check_memory(name, leaf)
    place = placement_of(leaf, sharding)
    if place is not None:
        _check_even(name, shape, place)
        place = place.without_types()
    alone = LeafSpec(name, shape, dtype, None, k=0, decay=decay, placement=place)
    resident = rules.resident
    if len(shape) < 2 or 0 in shape or (resident is not None and bool(resident(path, leaf))):
        return alone
    axis = rules.channel_axis
    axis = axis(path, leaf) if callable(axis) else axis
    if not isinstance(axis, Integral) or not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"`channel_axis` is {axis} for {name} of shape {shape}. Pass one of its axes."
        )
    transfer_dtype = None if rules.transfer_dtype == dtype else rules.transfer_dtype
    spec = dataclasses.replace(alone, axis=int(axis) % len(shape), transfer_dtype=transfer_dtype)
    k = selected_channels(rules.topk_ratio, spec.n, spec.pieces)
    if k >= spec.n:
        return alone  # with every channel selected, nothing is left to offload
    cut = rules.partition_replicated
    if place is not None and (bool(cut(path, leaf)) if callable(cut) else cut):
        # The channel axis stays whole, because a block selects among all its channels. So do stack
        # axes, because a scan fills a stack of layers entry by entry.
        rest = range(len(spec.stack), len(shape))
        place = divide_blocks(place, shape, [i for i in reversed(rest) if i != spec.axis])
    return dataclasses.replace(spec, k=k, placement=place)


def selected_channels(topk_ratio: float, n: int, pieces: int) -> int:
    """Returns how many of `n` channels are selected: the same number in each equal piece."""
    return pieces * round_up(topk_ratio, n // pieces)


def _check_leaf(leaf: Any, name: str) -> tuple[tuple[int, ...], np.dtype]:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TypeError(f"{name} is not an array: {leaf!r}. {_KEEP_OUT}")
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or np.dtype(leaf.dtype) not in DTYPES:
        raise ValueError(
            f"{name} is {leaf.dtype}, but zenflow trains float32 and bfloat16. Cast weights in "
            f"float16 to bfloat16. {_KEEP_OUT}"
        )
    return tuple(leaf.shape), np.dtype(leaf.dtype)


_KEEP_OUT = (
    "Exclude it with `optax.masked` or `optax.partition`; for an nnx model, train "
    "`nnx.state(model, nnx.Param)`."
)


def _check_even(name: str, shape: tuple[int, ...], place: Placement) -> None:
    for axis, names in enumerate(place.block):
        if explicit_axes(place.mesh).intersection(names) not in (set(), set(names)):
            types = dict(zip(place.mesh.axis_names, place.mesh.axis_types, strict=True))
            raise ValueError(
                f"Axis {axis} of {name} mixes Auto and Explicit mesh axes: {names} of {types}. "
                "Shard it over axes of one type."
            )
        if shape[axis] % place.count(names):
            raise ValueError(
                f"Axis {axis} of {name} has size {shape[axis]}, which is not divisible by the "
                f"{place.count(names)} devices along the mesh axes {names}. Shard another axis, or "
                "pad it."
            )


def resolve_specs(
    params: Any, rules: LeafRules, param_shardings: Any, mask: Any
) -> tuple[LeafSpec, ...]:
    """Returns a `LeafSpec` for each leaf of `params`, in order."""
    paths = jax.tree_util.tree_leaves_with_path(as_pure(params))
    if not paths:
        return ()
    return tuple(
        resolve(path, leaf, rules, sharding=sharding, decay=decay)
        for (path, leaf), decay, sharding in zip(
            paths, _decayed(params, mask), _shardings(params, param_shardings), strict=True
        )
    )


def _shardings(params: Any, param_shardings: Any) -> list[Any]:
    """Returns the user's sharding for each leaf, or None if there is none."""
    count = len(jax.tree.leaves(params))
    if param_shardings is None:
        return [None] * count
    tree = param_shardings(params) if callable(param_shardings) else param_shardings
    shardings = jax.tree.leaves(tree)
    wrong = [x for x in shardings if not isinstance(x, jax.sharding.NamedSharding)]
    if wrong or len(shardings) != count:
        raise TypeError(
            "`param_shardings` needs one NamedSharding for each leaf, but has "
            f"{f'a {type(wrong[0]).__name__}' if wrong else len(shardings)} for {count} leaves. "
            "Pass `jax.tree.map(lambda p: p.sharding, params)`, for example."
        )
    return shardings


def _decayed(params: Any, mask: Any) -> list[bool]:
    """Returns whether weight decay applies to each leaf; `mask` may be a prefix tree."""
    if mask is None:
        return [True] * len(jax.tree.leaves(params))
    tree = mask(params) if callable(mask) else mask
    return list(map(bool, spread("mask", tree, params, "bools")))


def spread(name: str, tree: Any, params: Any, kind: str) -> list[Any]:
    """Returns the value for each leaf of `params` from an argument that is a prefix tree."""
    values: list[Any] = []
    try:
        jax.tree.map(
            lambda x, part: values.extend([x] * len(jax.tree.leaves(part))),
            *map(as_pure, (tree, params)),
        )
    except ValueError as error:
        raise ValueError(
            f"`{name}` has the structure {jax.tree.structure(tree)}, which is neither the "
            f"parameters' structure nor a prefix of it: {jax.tree.structure(params)}. Pass a tree "
            f"of {kind} with the parameters' structure."
        ) from error
    return values
