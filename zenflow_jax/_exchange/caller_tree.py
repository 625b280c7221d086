"""A caller's tree of parameters, taken to pieces and put together again."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from zenflow_jax._exchange.parts import OffloadedLeaves


@dataclasses.dataclass(frozen=True)
class CallerTree:
    """What a caller has passed as `params`. It may have leaves that the state does not know."""

    leaves: Sequence[Any]
    treedef: Any
    places: Sequence[int]  # of each leaf of the state among `leaves`
    known: OffloadedLeaves

    @property
    def weights(self) -> list[Any]:
        """The parameter of each leaf of the state."""
        return [self.leaves[i] for i in self.places]

    @property
    def offloaded(self) -> list[Any]:
        """The parameter of each offloaded leaf."""
        return self.known.pick(self.weights)

    @property
    def tree(self) -> Any:
        """The tree again."""
        return jax.tree.unflatten(self.treedef, self.leaves)

    def with_offloaded(self, weights: Sequence[jax.Array]) -> "CallerTree":
        """With others in the places of those that are offloaded."""
        leaves = list(self.leaves)
        for i, weight in zip(self.known.pick(self.places), weights, strict=True):
            leaves[i] = weight
        return dataclasses.replace(self, leaves=leaves)
