"""Which leaf of a caller's tree belongs to which leaf of the state, by key path."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._plan.leaf import LeafSpec, plain_name


class Places:
    """Where the leaves of a state are in the trees that callers pass, found by key path.

    A tree may hold more: frozen parameters, batch statistics, keys of dropout. What is where is
    found out once for each structure, as one is passed at every step.

    Args:
        specs: The state's leaves.
    """

    def __init__(self, specs: Sequence[LeafSpec]):
        self._specs = tuple(specs)
        # The structures seen last, and a dict would hash what need only be compared.
        self._known: list[tuple[Any, list[int]]] = []

    def __call__(self, params: Any) -> tuple[list[Any], Any, list[int]]:
        """The leaves of `params`, its structure, and of each leaf of the state its place in them.

        Raises:
            ValueError: If `params` lacks a leaf of the state.
        """
        leaves, treedef = jax.tree.flatten(params)
        for structure, places in self._known:
            if structure == treedef:
                return leaves, treedef, places
        places = self._find(params)
        self._known = [(treedef, places), *self._known[: _STRUCTURES - 1]]
        return leaves, treedef, places

    def _find(self, params: Any) -> list[int]:
        paths, _ = jax.tree_util.tree_flatten_with_path(params)
        by_name: dict[str, list[int]] = {}
        for i, (path, _) in enumerate(paths):
            by_name.setdefault(plain_name(path), []).append(i)
        # A container of the user's own may give two leaves one path. They are told apart by their
        # order, which says nothing once some of them are missing or more have come.
        ours = Counter(spec.name for spec in self._specs)
        missing = [name for name in ours if name not in by_name]
        if missing:
            others = sorted(by_name.keys() - ours.keys())
            raise ValueError(
                f"expected `params` with the leaf {some(missing)} that the state was made for, got "
                f"{len(paths)} leaves without it"
                f"{f', and {some(others)} that it does not know' if others else ''}. Pass the "
                "parameters that `tx.init` saw, or a tree with more leaves in which these have "
                "the same paths; of an nnx model `nnx.state(model)`, not the model."
            )
        for name, count in ours.items():
            if len(by_name[name]) != count:
                raise ValueError(
                    f"expected {count} leaves at {name}, as the state has them, got "
                    f"{len(by_name[name])}: leaves of one path cannot be told apart. Pass the "
                    "parameters that `tx.init` saw, or have the container's "
                    "`tree_flatten_with_keys` give each of its leaves a key of its own."
                )
        rest = {name: iter(by_name[name]) for name in ours}
        return [next(rest[spec.name]) for spec in self._specs]


#: Of a run with frozen leaves: the trained ones, all parameters, the model's whole state.
_STRUCTURES = 4


def some(names: Sequence[str]) -> str:
    """The first few of them."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def check_leaves(weights: Sequence[Any], specs: Sequence[LeafSpec]) -> None:
    """Refuses parameters of other shapes or dtypes than their state's."""
    for leaf, spec in zip(weights, specs, strict=True):
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape != spec.shape or dtype != spec.dtype:
            raise ValueError(
                f"expected `params` to hold {spec.dtype.name} {spec.shape} at {spec.name}, as the "
                f"state does, got {type(leaf).__name__ if shape is None else f'{dtype} {shape}'}. "
                "Pass the parameters that `tx.init` saw."
            )


def match_leaves(params: Any, state: ZenFlowState) -> tuple[list[Any], Any, list[int]]:
    """What `Places` gives, of leaves that have the state's shapes and dtypes.

    Raises:
        ValueError: If a leaf of the state has no counterpart.
    """
    specs = [leaf.spec for leaf in state.leaves]
    weights, treedef, places = Places(specs)(params)
    check_leaves([weights[i] for i in places], specs)
    return weights, treedef, places
