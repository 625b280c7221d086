"""Checks a caller's parameters and state in every call, at next to no cost.

A look at each of hundreds of leaves takes longer than all else that a call does. So it looks at the
leaves whose numbers are read now, and compares their shardings with those that were right last
time: a compiled step gives the same objects every time.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
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
        self._groups = range(state.schedule.groups)
        self._on_mesh = any(len(weight.sharding.device_set) > 1 for weight in weights)
        # The leaves of each choice of groups, and what was right last time.
        self._known: dict[tuple[int, ...], _Choice] = {}

    def state(self, opt_state: Any, groups: Sequence[int] = ()) -> ZenFlowState:
        """The state in `opt_state`; of its leaves, those of `groups` are looked at, or all."""
        state = find_state(opt_state)
        leaves = self._choice(groups or self._groups).leaves
        if (
            len(state.leaves) != len(self._specs)
            or any(state.leaves[i].spec != self._specs[i] for i in leaves)
            or state.schedule != self._schedule
        ):
            raise ValueError(
                "expected the state of the run that this engine was made for, got one with other "
                "leaves or settings. Give each run an engine of its own."
            )
        _check_arrays(state)
        return state

    def in_place(
        self, state: ZenFlowState, weights: Sequence[jax.Array], groups: Sequence[int]
    ) -> ZenFlowState:
        """A step's state with all arrays where they belong; they are put back once in a run.

        On a mesh a misplaced array has other pieces on each device, which would be read as other
        channels. All mail is looked at, as each step's is read.
        """
        if not self._on_mesh:
            return state  # programs refuse what is on another device
        choice = self._choice(groups)
        leaves = [state.leaves[i] for i in choice.leaves]
        shardings = [x.sharding for x in jax.tree.leaves((state.mail, leaves))]
        if _same(shardings, choice.state):
            return state
        placed, moved = put_back(state, weights)
        pairs = zip(state.leaves, placed.leaves, state.mail, placed.mail, strict=True)
        misplaced = [
            leaf.spec.name
            for leaf, new, mail, new_mail in pairs
            if leaf.offloaded and (mail is not new_mail or _has_moved(leaf, new))
        ]
        if not misplaced:
            choice.state = shardings
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

    def take(self, params: Any, groups: Iterable[int]) -> "CallerTree":
        """Takes parameters apart; refuses other shapes, dtypes or places in some groups."""
        taken, choice = CallerTree(*self._places(params), self._offloaded), self._choice(groups)
        weights = [taken.weights[i] for i in choice.leaves]
        specs = [self._specs[i] for i in choice.leaves]
        check_leaves(weights, specs)
        shardings = [getattr(weight, "sharding", None) for weight in weights]
        if not _same(shardings, choice.params):
            check_placement(weights, specs)
            choice.params = shardings
        return taken

    def _choice(self, groups: Iterable[int]) -> "_Choice":
        key = tuple(groups)
        if key not in self._known:
            wanted = frozenset(key)
            leaves = [i for i, spec in enumerate(self._specs) if not wanted.isdisjoint(spec.groups)]
            self._known[key] = _Choice(leaves)
        return self._known[key]


@dataclasses.dataclass
class _Choice:
    """The leaves of some groups, resident ones with the first, and their shardings last time."""

    leaves: list[int]
    state: list[Any] = dataclasses.field(default_factory=list)
    params: list[Any] = dataclasses.field(default_factory=list)


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
