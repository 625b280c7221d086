"""Decides what kind of leaf each parameter is; only this file calls the user's leaf functions."""

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zenflow_jax._plan.leaf import DTYPES, LeafSpec, plain_name
from zenflow_jax._plan.mesh import Placement, divide_blocks, placement_of


def resolve(
    path: tuple[Any, ...],
    leaf: Any,
    *,
    topk_ratio: float,
    channel_axis: int | Callable[[tuple[Any, ...], Any], int],
    resident: Callable[[tuple[Any, ...], Any], bool] | None,
    partition_replicated: bool | Callable[[tuple[Any, ...], Any], bool],
    sharding: Any,
    decay: bool,
    transfer_dtype: np.dtype | None,
) -> LeafSpec:
    """The spec of one leaf: its kind, as the user's options decide."""
    name = plain_name(path)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TypeError(
            f"expected parameters that are arrays, got {leaf!r} at {name}. Make it one with "
            "`jnp.asarray`, or keep it out with `optax.masked`."
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"expected parameters that can be trained, got a random key ({leaf.dtype}) at {name}. "
            "Keep it out: of an nnx model train `nnx.state(model, nnx.Param)`; elsewhere use "
            "`optax.masked` or `optax.partition`."
        )
    shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
    if dtype not in DTYPES:
        raise ValueError(
            f"zenflow trains float32, bfloat16 and float16 leaves, but {name} is {dtype.name}: "
            "its arithmetic is float32. Cast the leaf, or keep it out with `optax.masked` or "
            "`optax.partition` (of an nnx model, train `nnx.state(model, nnx.Param)`)."
        )
    place = placement_of(leaf, sharding)
    if place is not None:
        _check_even(name, shape, place)
    alone = LeafSpec(name, shape, dtype, axis=None, k=0, decay=decay, placement=place)
    if len(shape) < 2 or 0 in shape or (resident is not None and bool(resident(path, leaf))):
        return alone
    axis = channel_axis(path, leaf) if callable(channel_axis) else channel_axis
    if not isinstance(axis, Integral) or not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"`channel_axis` must be an axis of the leaf, got {axis} for {name} of shape {shape}. "
            "Pass a function of (key path, leaf) where leaves differ, or keep the leaf on the "
            "device with `resident`."
        )
    if transfer_dtype is None and dtype == np.float16:
        # Unscaled gradients do not fit float16: most are too small, some too large.
        transfer_dtype = np.dtype(np.float32)
    elif transfer_dtype == dtype:
        transfer_dtype = None
    spec = dataclasses.replace(alone, axis=int(axis) % len(shape), transfer_dtype=transfer_dtype)
    pieces = 1 if place is None else place.count(place.block[int(axis)])
    # Rounded first: 0.07 * 100 is 7.000000000000001, and the user meant 7.
    k = pieces * math.ceil(round(topk_ratio * (spec.n // pieces), 6))
    if k >= spec.n:
        return alone  # with every channel selected, nothing is left to offload
    cut = partition_replicated
    if place is not None and (bool(cut(path, leaf)) if callable(cut) else cut):
        # The channel axis stays whole, because a block selects among all of its channels. So do
        # stack axes, because a scan fills a stack (of layers) one entry after the other.
        rest = range(len(spec.stack), len(shape))
        place = divide_blocks(place, shape, [i for i in reversed(rest) if i != spec.axis])
    return dataclasses.replace(spec, k=k, placement=place)


def _check_even(name: str, shape: tuple[int, ...], place: Placement) -> None:
    for axis, names in enumerate(place.block):
        if place.explicit.intersection(names) not in (set(), set(names)):
            raise ValueError(
                f"expected mesh axes of one kind along axis {axis} of {name}, got {names} of "
                f"{dict(zip(place.mesh.axis_names, place.mesh.axis_types, strict=True))}. Make all "
                "of them Auto or all Explicit, or divide another axis of it by one of them."
            )
        if shape[axis] % place.count(names):
            raise ValueError(
                f"expected axis {axis} of {name} to divide evenly over the mesh axes {names}, got "
                f"a size of {shape[axis]} for {place.count(names)} devices. Pad the leaf, or shard "
                "another axis of it."
            )


_logger = logging.getLogger("zenflow_jax")


def resolve_specs(
    params: Any,
    *,
    topk_ratio: float,
    channel_axis: int | Callable[[tuple[Any, ...], Any], int],
    resident: Callable[[tuple[Any, ...], Any], bool] | None,
    partition_replicated: bool | Callable[[tuple[Any, ...], Any], bool],
    param_shardings: Any,
    mask: Any,
    transfer_dtype: np.dtype | None,
) -> tuple[LeafSpec, ...]:
    """One `LeafSpec` for each leaf of `params`, in order."""
    paths = jax.tree_util.tree_leaves_with_path(params)
    if not paths:
        return ()
    return tuple(
        resolve(
            path,
            leaf,
            topk_ratio=topk_ratio,
            channel_axis=channel_axis,
            resident=resident,
            partition_replicated=partition_replicated,
            sharding=sharding,
            decay=decay,
            transfer_dtype=transfer_dtype,
        )
        for (path, leaf), decay, sharding in zip(
            paths, _decayed(params, mask), _shardings(params, param_shardings), strict=True
        )
    )


def warn_if_all_resident(specs: Sequence[LeafSpec]) -> None:
    """Warns that nothing saves memory. No error, because the result is right."""
    if not any(math.prod(spec.shape) for spec in specs) or not all(s.resident for s in specs):
        return
    first = specs[0]
    _logger.warning(
        "zenflow saves no memory: expected some leaf with two axes, with channels left over by "
        "`topk_ratio` and not kept by `resident`, got %d that stay on the device, the first %s of "
        "shape %s. `optax.flatten` around zenflow makes one vector of all leaves: leave it out. "
        "If these leaves are all there is, `optax.adamw` is simpler.",
        len(specs),
        first.name or "a bare array",
        first.shape,
    )


def _shardings(params: Any, given: Any) -> list[Any]:
    """The sharding that the user gave for each leaf; None without one."""
    count = len(jax.tree.leaves(params))
    if given is None:
        return [None] * count
    tree = given(params) if callable(given) else given
    shardings = jax.tree.leaves(tree)
    wrong = [x for x in shardings if not isinstance(x, jax.sharding.NamedSharding)]
    if wrong or len(shardings) != count:
        raise TypeError(
            "`param_shardings` must be a tree of one NamedSharding for each leaf of the "
            f"parameters, got {f'a {type(wrong[0]).__name__}' if wrong else len(shardings)} for "
            f"{count} leaves. Pass `jax.tree.map(lambda p: p.sharding, params)` (under "
            "`optax.masked` a function of the parameters that are left), or leave it out and call "
            "`init` outside of jit."
        )
    return shardings


def _decayed(params: Any, mask: Any) -> list[bool]:
    """Whether weight decay applies to each leaf; `mask` may be a prefix of the tree."""
    if mask is None:
        return [True] * len(jax.tree.leaves(params))
    tree = mask(params) if callable(mask) else mask
    try:
        spread = jax.tree.map(
            lambda flag, part: [bool(flag)] * len(jax.tree.leaves(part)), tree, params
        )
    except ValueError as error:
        raise ValueError(
            "`mask` must be a tree of bools like the parameters or a prefix of it, got "
            f"{jax.tree.structure(tree)} for {jax.tree.structure(params)}. Return it from a "
            "function of the parameters to keep the two in step."
        ) from error
    return jax.tree.leaves(spread)
