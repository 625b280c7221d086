"""Decides what kind of leaf each parameter is.

Only this file calls the user's leaf functions.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from zenflow_jax._spec.checks import round_up
from zenflow_jax._spec.leaf import DTYPES, LeafSpec, as_pure, plain_name
from zenflow_jax._spec.mesh import divide_blocks, placement_of

_logger = logging.getLogger("zenflow_jax")


class LeafRules(NamedTuple):
    """The arguments of `zenflow` that decide what kind of leaf each parameter is."""

    topk_ratio: float
    channel_axis: int | Callable[[KeyPath, Any], int]
    resident: Callable[[KeyPath, Any], bool] | None
    partition_replicated: bool | Callable[[KeyPath, Any], bool]
    transfer_dtype: np.dtype | None
    mask: PyTree  # a tree of bools, or a function that returns one
    lr_scale: PyTree  # a tree of numbers, or a function of a leaf
    param_shardings: PyTree  # a tree of shardings, or a function that returns one


def resolve_specs(params: PyTree, rules: LeafRules) -> tuple[LeafSpec, ...]:
    """Returns a `LeafSpec` for each leaf of `params`, in order."""
    paths = jax.tree_util.tree_leaves_with_path(as_pure(params))
    if not paths:  # `params` may be any placeholder
        return ()
    decayed = _spread("mask", rules.mask, params, "bools")
    shardings = _spread("param_shardings", rules.param_shardings, params, "NamedShardings")
    scales = _scales(params, rules.lr_scale)
    return tuple(
        dataclasses.replace(
            _resolve(*pair, rules, where), decay=decay is None or bool(decay), lr_scale=scale
        )
        for pair, decay, where, scale in zip(paths, decayed, shardings, scales, strict=True)
    )


def _resolve(
    path: KeyPath, leaf: Any, rules: LeafRules, sharding: NamedSharding | None
) -> LeafSpec:
    """Returns a leaf's spec, except for weight decay and learning rate."""
    name = plain_name(path)
    if (kind := getattr(leaf, "dtype", type(leaf))) not in DTYPES:
        raise ValueError(
            f"{name} is {kind}, but zenflow trains arrays of float32 and bfloat16. Cast weights in "
            "float16 to bfloat16. Exclude others with `optax.masked` or `optax.partition`; for an "
            "nnx model, train `nnx.state(model, nnx.Param)`."
        )
    shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
    place = placement_of(leaf, sharding)
    alone = LeafSpec(name, shape, dtype, None, k=0, placement=place)
    resident = rules.resident
    if len(shape) < 2 or 0 in shape or (resident is not None and bool(resident(path, leaf))):
        return alone
    axis = rules.channel_axis
    axis = axis(path, leaf) if callable(axis) else axis
    if not isinstance(axis, Integral) or not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"`channel_axis` is {axis} for {name} of shape {shape}. Pass one of its axes."
        )
    sent = None if rules.transfer_dtype == dtype else rules.transfer_dtype
    spec = dataclasses.replace(alone, axis=int(axis) % len(shape), transfer_dtype=sent)
    # Each equal piece of the channel axis selects the same number of channels.
    k = spec.pieces * round_up(rules.topk_ratio, spec.n // spec.pieces)
    if k >= spec.n:
        return alone  # with every channel selected, nothing is left to offload
    cut = rules.partition_replicated
    if place is not None and (bool(cut(path, leaf)) if callable(cut) else cut):
        # The channel axis stays whole, because a block selects among all its channels. So do stack
        # axes, because a scan fills a stack of layers entry by entry.
        rest = range(len(spec.stack), len(shape))
        place = divide_blocks(place, shape, [i for i in reversed(rest) if i != spec.axis])
    return dataclasses.replace(spec, k=k, placement=place)


def _scales(params: PyTree, lr_scale: PyTree) -> list[float]:
    """Returns each leaf's factor for the learning rate."""
    if callable(lr_scale):
        scales = jax.tree_util.tree_map_with_path(lr_scale, as_pure(params))
    else:
        scales = 1.0 if lr_scale is None else lr_scale
    values = _spread("lr_scale", scales, params, "numbers")
    for x in values:
        if not isinstance(x, Real) or not 0 <= float(x) < np.inf:
            raise ValueError(f"`lr_scale` is {x!r} for a leaf. Use a finite number, at least 0.")
    return list(map(float, values))


def _spread(name: str, tree: PyTree, params: PyTree, kind: str) -> list[PyTree]:
    """Returns the value for each leaf of `params` from a prefix tree, or None without a tree.

    The tree may also be a function of `params`.
    """
    tree, values = tree(params) if callable(tree) else tree, list[PyTree]()
    if tree is None:
        return [None] * len(jax.tree.leaves(as_pure(params)))
    try:
        jax.tree.map(
            lambda x, part: values.extend([x] * len(jax.tree.leaves(part))),
            *map(as_pure, (tree, params)),
        )
    except ValueError as error:
        raise ValueError(
            f"`{name}` has the structure {jax.tree.structure(tree)}. Pass a tree of {kind} like "
            f"the parameters, {jax.tree.structure(params)}, or a prefix of it."
        ) from error
    return values


def warn_of_leaves(
    params: PyTree, specs: Sequence[LeafSpec], *, offloads: bool, clips: bool
) -> None:
    """Warns about leaves that the user probably did not intend; `repr(state)` shows all leaves."""
    if offloads and any(0 not in x.shape for x in specs) and all(x.resident for x in specs):
        _logger.warning(
            f"zenflow saves no memory: all {len(specs)} leaves stay on the device (the first is "
            f"{specs[0].name or 'a bare array'} of shape {specs[0].shape}). Change `resident` or "
            "`topk_ratio`, or leave out `optax.flatten`."
        )
    nodes = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    masked = sum(isinstance(x, optax.MaskedNode) for x in nodes)
    if clips and masked:
        _logger.warning(
            "`max_grad_norm` clips by the norm of this `zenflow`'s leaves "
            f"({len(nodes) - masked}). `optax.partition` or `optax.masked` hides other leaves "
            f"({masked}). If these are trained, use `optax.clip_by_global_norm` before the "
            "partition instead."
        )
