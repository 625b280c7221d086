"""Checks a caller's parameters and state in every call, at next to no cost.

Shardings are compared with those that were right last time: a compiled step gives the same objects
every time.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

from zenflow_jax._device.leaves import Places, check_leaves, first_names
from zenflow_jax._device.placing import check_placement, put_back
from zenflow_jax._device.state import LeafState, ZenFlowState, find_state
from zenflow_jax._exchange.checks import check_not_numpy
from zenflow_jax._exchange.parts import OffloadedLeaves


class Expected:
    """Refuses what is not of one engine's run. For one calling thread.

    Attributes:
        put_back: Arrays of states that something had placed anew, and that were put back.
    """

    def __init__(
        self,
        state: ZenFlowState,
        weights: Sequence[jax.Array],
        offloaded: OffloadedLeaves,
        moved: int,
    ):
        self.put_back = moved
        self._has_put_back = False
        self._offloaded = offloaded
        self._schedule = state.schedule
        self._specs = [leaf.spec for leaf in state.leaves]
        self._places = Places(self._specs)
        self._on_mesh = any(len(weight.sharding.device_set) > 1 for weight in weights)
        # The shardings of state and parameters that were right last time.
        self._of_state: list[Any] = []
        self._of_params: list[Any] = []

    def state(self, opt_state: Any) -> ZenFlowState:
        """The state in `opt_state`."""
        state = find_state(opt_state)
        if [x.spec for x in state.leaves] != self._specs or state.schedule != self._schedule:
            raise ValueError(
                "expected the state of the run that this engine was made for, got one with other "
                "leaves or settings. Give each run an engine of its own."
            )
        _check_arrays(state)
        return state

    def in_place(self, state: ZenFlowState, weights: Sequence[jax.Array]) -> ZenFlowState:
        """A step's state with all arrays where they belong; they are put back once in a run.

        On a mesh a misplaced array has other pieces on each device, which would be read as other
        channels.
        """
        if not self._on_mesh:
            return state  # programs refuse what is on another device
        shardings = [x.sharding for x in jax.tree.leaves((state.mail, state.leaves))]
        if _same(shardings, self._of_state):
            return state
        placed, moved = put_back(state, weights)
        pairs = zip(state.leaves, placed.leaves, state.mail, placed.mail, strict=True)
        misplaced = [
            leaf.spec.name
            for leaf, new, mail, new_mail in pairs
            if leaf.offloaded and (mail is not new_mail or _has_moved(leaf, new))
        ]
        if not misplaced:
            self._of_state = shardings
            return state
        if self._has_put_back:
            raise ValueError(
                f"expected the state of {first_names(misplaced)} where `tx.init` put it, got it "
                "elsewhere. Something places the state anew, again after it was put back: "
                "leave it where it is, or place it by the shardings that it has after "
                "`tx.init(params)`, `jax.tree.map(lambda x: x.sharding, opt_state)`."
            )
        self._has_put_back = True
        self.put_back += moved
        return placed

    def take(self, params: Any) -> "CallerTree":
        """Takes parameters apart; refuses other shapes, dtypes or places."""
        taken = CallerTree(*self._places(params), self._offloaded)
        check_leaves(taken.weights, self._specs)
        shardings = [getattr(weight, "sharding", None) for weight in taken.weights]
        if not _same(shardings, self._of_params):
            check_placement(taken.weights, self._specs)
            self._of_params = shardings
        return taken


def _same(current: Sequence[Any], last: Sequence[Any]) -> bool:
    return len(current) == len(last) and all(map(operator.is_, current, last))


def _has_moved(old: LeafState, new: LeafState) -> bool:
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    return any(x is not y and x.size for x, y in pairs)


def _check_arrays(state: ZenFlowState) -> None:
    """Refuses a state that is not of jax arrays, by a look at its step scalars alone."""
    ints = state.step_scalars.ints
    check_not_numpy(ints)
    if not isinstance(ints, jax.Array) or isinstance(ints, Tracer):
        raise TypeError(
            f"expected a state of jax arrays, got {type(ints).__name__}. Pass what the step "
            "returned, outside of jit; of flax nnx pass model and optimizer themselves, to "
            "`exchange_nnx` or `flush_nnx`."
        )


@dataclasses.dataclass(frozen=True)
class CallerTree:
    """What a caller has passed as `params`, with leaves that the state may not know."""

    leaves: Sequence[Any]
    treedef: Any
    places: Sequence[int]  # where each leaf of the state is among `leaves`
    known: OffloadedLeaves

    @functools.cached_property
    def weights(self) -> list[Any]:
        return [self.leaves[i] for i in self.places]

    @functools.cached_property
    def offloaded(self) -> list[Any]:
        return self.known.pick(self.weights)

    @property
    def tree(self) -> Any:
        return jax.tree.unflatten(self.treedef, self.leaves)

    def with_offloaded(self, weights: Sequence[jax.Array]) -> "CallerTree":
        """This with `weights` in the places of the offloaded leaves."""
        leaves = list(self.leaves)
        for i, weight in zip(self.known.pick(self.places), weights, strict=True):
            leaves[i] = weight
        return dataclasses.replace(self, leaves=leaves)
