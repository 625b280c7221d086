"""Matches the leaves of a caller's tree with the state's leaves, and checks them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._device.streamed import is_streamed
from zenflow_jax._spec.leaf import LeafSpec, plain_name


@dataclasses.dataclass(frozen=True)
class CallerTree:
    """A caller's parameters, which may contain leaves that are not in the state."""

    leaves: Sequence[Any]
    treedef: Any
    places: Sequence[int]  # the index in `leaves` of each leaf in the state

    @functools.cached_property
    def weights(self) -> list[Any]:
        """Returns the leaves in the state, in its order."""
        return [self.leaves[i] for i in self.places]

    @property
    def tree(self) -> Any:
        return jax.tree.unflatten(self.treedef, self.leaves)

    def put(self, numbers: Sequence[int], weights: Sequence[jax.Array]) -> "CallerTree":
        """Returns this tree with `weights` as the state's leaves with these numbers."""
        leaves = list(self.leaves)
        for i, weight in zip(numbers, weights, strict=True):
            leaves[self.places[i]] = weight
        return dataclasses.replace(self, leaves=leaves)


def match_leaves(params: PyTree, specs: Sequence[LeafSpec]) -> CallerTree:
    """Finds a state's leaves by key path in a caller's tree; rejects other shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(params)
    tree = CallerTree(leaves, treedef, _places(treedef, tuple(spec.name for spec in specs)))
    for leaf, spec in zip(tree.weights, specs, strict=True):
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape != spec.shape or dtype != spec.dtype:
            kind = type(leaf).__name__ if shape is None else f"{dtype} {shape}"
            raise ValueError(
                f"{spec.name} is {kind} in `params`, but {spec.dtype.name} {spec.shape} in the "
                "state. Pass the tree that `tx.init` saw."
            )
    return tree


# Cached, because callers pass a tree at every step: of trained leaves, all parameters, or the
# model's state.
@functools.lru_cache(maxsize=8)
def _places(treedef: Any, names: tuple[str, ...]) -> list[int]:
    """Returns the index of each name among a tree's key paths."""
    tree = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    by_name = {plain_name(path): i for path, i in jax.tree_util.tree_leaves_with_path(tree)}
    if len(by_name) < treedef.num_leaves:
        raise ValueError(
            "`params` has several leaves with the same path. Give each its own path, in "
            "the container's `tree_flatten_with_keys`."
        )
    if missing := [name for name in names if name not in by_name]:
        raise ValueError(
            f"`params` lacks {first_names(missing)}, which the state was made for, among its "
            f"{len(by_name)} leaves. Pass the tree that `tx.init` got: `nnx.state(model)` for "
            "nnx, and without `optax.flatten`."
        )
    return [by_name[name] for name in names]


def first_names(names: Sequence[str]) -> str:
    """Lists the first few names, and the number of further names."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(name or "a bare array" for name in names[:4]) + more


def check_update(updates: PyTree, params: PyTree, state: object) -> list[Any]:
    """Returns the parameters' leaves; rejects trees that do not match the state."""
    if params is None or not isinstance(state, ZenFlowState):
        raise ValueError(
            f"The state is a {type(state).__name__}, `params` a {type(params).__name__}. Call "
            "`tx.update(gradients, opt_state, params)` with the ZenFlowState of `tx.init(params)`."
        )
    specs = [leaf.spec for leaf in state.leaves]
    for argument, tree in (("gradients", updates), ("params", params)):
        leaves = jax.tree.leaves_with_path(tree, is_leaf=is_streamed)
        names = [plain_name(path) for path, _ in leaves]
        if names != [spec.name for spec in specs]:
            raise ValueError(
                f"`{argument}` has {len(leaves)} leaves: {first_names(names)}. Pass the "
                f"{len(specs)} leaves that `init` got: {first_names([x.name for x in specs])}."
            )
        for (_, x), spec in zip(leaves, specs, strict=True):
            if argument == "params":
                fits = x.dtype == spec.dtype and not is_streamed(x)
            else:
                fits = jnp.issubdtype(x.dtype, jnp.floating)
            if x.shape != spec.shape or not fits:
                raise ValueError(
                    f"`{argument}` has a {type(x).__name__} of {x.dtype} {x.shape} at {spec.name}. "
                    f"`init` got {spec.dtype.name} {spec.shape}."
                )
    return jax.tree.leaves(params)


def check_outside_of_shard_map(name: str) -> None:
    """Rejects calls inside `shard_map` and `pmap`, where each device would decide separately."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes:
        raise ValueError(
            f"`{name}` is called inside `jax.shard_map` or `jax.pmap` over "
            f"{', '.join(map(repr, axes))}. Call it outside: let `jit` divide the batch "
            '(docs/usage.md, "Loops that need a change").'
        )
