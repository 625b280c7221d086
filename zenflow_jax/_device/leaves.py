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


class Matcher:
    """Finds a state's leaves by key path in a caller's tree; rejects other shapes and dtypes.

    Searches only once for each structure, because callers pass a tree at every step.
    """

    def __init__(self, specs: Sequence[LeafSpec]):
        self._specs = tuple(specs)
        # The last structures, in a list because a dict would hash them.
        self._known: list[tuple[Any, list[int]]] = []

    def __call__(self, params: PyTree) -> CallerTree:
        leaves, treedef = jax.tree.flatten(params)
        places = next((x for structure, x in self._known if structure == treedef), None)
        if places is None:
            places = self._find(params)
            self._known = [(treedef, places), *self._known[: _STRUCTURES - 1]]
        found = CallerTree(leaves, treedef, places)
        for leaf, spec in zip(found.weights, self._specs, strict=True):
            shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
            if shape != spec.shape or dtype != spec.dtype:
                kind = type(leaf).__name__ if shape is None else f"{dtype} {shape}"
                raise ValueError(
                    f"{spec.name} is {kind} in `params`, but {spec.dtype.name} {spec.shape} in the "
                    "state. Pass the tree that `tx.init` saw."
                )
        return found

    def _find(self, params: PyTree) -> list[int]:
        paths, _ = jax.tree_util.tree_flatten_with_path(params)
        by_name = {plain_name(path): i for i, (path, _) in enumerate(paths)}
        if len(by_name) < len(paths):
            raise ValueError(
                "`params` has several leaves with the same path. Give each its own path, in "
                "the container's `tree_flatten_with_keys`."
            )
        names = [spec.name for spec in self._specs]
        missing = [name for name in names if name not in by_name]
        if missing:
            raise ValueError(
                f"`params` lacks {first_names(missing)}, which the state was made for, among its "
                f"{len(paths)} leaves. Pass the tree that `tx.init` got: `nnx.state(model)` for "
                "nnx, and without `optax.flatten`."
            )
        return [by_name[name] for name in names]


#: A run with frozen leaves passes trees of trained leaves, all parameters, and the model's state.
_STRUCTURES = 4


def first_names(names: Sequence[str]) -> str:
    """Lists the first few names, and the number of further names."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(name or "a bare array" for name in names[:4]) + more


def match_leaves(params: PyTree, state: ZenFlowState) -> CallerTree:
    return Matcher([leaf.spec for leaf in state.leaves])(params)


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


def check_outside_of_shard_map(
    name: str, remedy: str = "call it outside, on the resulting gradients"
) -> None:
    """Rejects calls inside `shard_map` and `pmap`, where each device would decide separately."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes:
        raise ValueError(
            f"`{name}` is called inside `jax.shard_map` or `jax.pmap` over "
            f"{', '.join(map(repr, axes))}: {remedy}. Replace `pmap` with `jit` (docs/usage.md, "
            '"Loops that need a change").'
        )
