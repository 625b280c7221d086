"""A caller's tree of parameters, taken apart and put together again."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from zenflow_jax._exchange.parts import OffloadedLeaves


@dataclasses.dataclass(frozen=True)
class CallerTree:
    """What a caller has passed as `params`. It may have leaves that the state does not know."""

    leaves: Sequence[Any]
    treedef: Any
    places: Sequence[int]  # where each leaf of the state is among `leaves`
    known: OffloadedLeaves

    @functools.cached_property
    def weights(self) -> list[Any]:
        """The parameter of each leaf of the state."""
        return [self.leaves[i] for i in self.places]

    @functools.cached_property
    def offloaded(self) -> list[Any]:
        """The parameter of each offloaded leaf."""
        return self.known.pick(self.weights)

    @property
    def tree(self) -> Any:
        """The tree, put together again."""
        return jax.tree.unflatten(self.treedef, self.leaves)

    def with_offloaded(self, weights: Sequence[jax.Array]) -> "CallerTree":
        """This with `weights` in the places of the offloaded leaves."""
        leaves = list(self.leaves)
        for i, weight in zip(self.known.pick(self.places), weights, strict=True):
            leaves[i] = weight
        return dataclasses.replace(self, leaves=leaves)
