"""What a caller's parameters and state must be, looked at in every call at next to no cost.

A model has hundreds of leaves, and a look at each of their arrays takes longer than all else that a
call does. So it looks at the leaves whose numbers are read now, and compares their shardings with
those that were right last time: a compiled step gives the same objects every time.
"""

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from zenflow_jax._device.checks import check_placement
from zenflow_jax._device.leaves import check_leaves
from zenflow_jax._device.shards import Layout
from zenflow_jax._device.state import LeafState, ZenFlowState, find_state, leaf_layout
from zenflow_jax._exchange.checks import check_not_numpy
from zenflow_jax._plan.leaf import LeafSpec


class Expected:
    """Refuses what is not of one engine's run. For one calling thread.

    Args:
        state: The state before the first step.
        weights: The parameter of each of its leaves, where `check_placement` wants it.

    Raises:
        ValueError: If an array of the state is elsewhere than its parameter.
    """

    def __init__(self, state: ZenFlowState, weights: Sequence[jax.Array]):
        self._specs = [leaf.spec for leaf in state.leaves]
        self._schedule = state.schedule
        self._beside = [weight.sharding for weight in weights]
        self._on_mesh = any(len(sharding.device_set) > 1 for sharding in self._beside)
        # The leaves of each choice of groups, and what was right last time.
        self._known: dict[tuple[int, ...], _Choice] = {}
        self.check_places(state, range(self._schedule.groups))

    def state(self, opt_state: Any, groups: Sequence[int] = ()) -> ZenFlowState:
        """The state in `opt_state`; of its leaves, those of `groups` are looked at, or all.

        Raises:
            ValueError: If it is another run's.
            TypeError: If it is not of jax arrays.
        """
        state = find_state(opt_state)
        which = self._choice(groups or range(self._schedule.groups)).leaves
        if (
            len(state.leaves) != len(self._specs)
            or any(state.leaves[i].spec != self._specs[i] for i in which)
            or state.schedule != self._schedule
        ):
            raise ValueError(
                "expected the state of the run that this engine was made for, got one with other "
                "leaves or settings. Give each run an engine of its own."
            )
        _check_arrays(state)
        return state

    def check_places(self, state: ZenFlowState, groups: Iterable[int]) -> None:
        """Refuses a state whose arrays are not where the step keeps them, beside their parameters.

        On a mesh a misplaced array has other pieces on each device; they would be read as other
        channels. There it looks at all mail, as each step's is read.
        """
        choice = self._choice(groups)
        leaves = [state.leaves[i] for i in choice.leaves]
        if self._on_mesh:
            shardings = [x.sharding for x in jax.tree.leaves((state.mail, leaves))]
        else:
            # Programs refuse what is on another device; this says so before anything is done.
            mail = (state.mail[i] for i in choice.leaves)
            shardings = [x.sharding for x in mail if x is not None]
            shardings += [leaf.mu.sharding for leaf in leaves]
        if _same(shardings, choice.state):
            return
        for i, (beside, leaf, sent) in enumerate(
            zip(self._beside, state.leaves, state.mail, strict=True)
        ):
            if not leaf.offloaded:
                continue  # nobody here reads it
            _check_place("mail", sent, Layout(leaf.spec).mail(sent.ndim), beside, leaf.spec)
            if i in choice.leaves:
                _check_leaf(leaf, beside)
        choice.state = shardings

    def check_params(self, weights: Sequence[Any], groups: Iterable[int]) -> None:
        """Refuses parameters of some groups that have other shapes or dtypes, or are elsewhere.

        Args:
            weights: The parameter of each leaf of the state.
            groups: Those that are read now; resident leaves are looked at with the first one.
        """
        choice = self._choice(groups)
        mine = [weights[i] for i in choice.leaves]
        specs = [self._specs[i] for i in choice.leaves]
        check_leaves(mine, specs)
        shardings = [getattr(weight, "sharding", None) for weight in mine]
        if not _same(shardings, choice.params):
            check_placement(mine, specs)
            choice.params = shardings

    def _choice(self, groups: Iterable[int]) -> "_Choice":
        key = tuple(groups)
        if key not in self._known:
            wanted = frozenset(key)
            which = [i for i, spec in enumerate(self._specs) if not wanted.isdisjoint(spec.groups)]
            self._known[key] = _Choice(which)
        return self._known[key]


@dataclasses.dataclass
class _Choice:
    """The leaves of some groups, resident ones with the first, and their shardings last time."""

    leaves: list[int]
    state: list[Any] = dataclasses.field(default_factory=list)
    params: list[Any] = dataclasses.field(default_factory=list)


def _same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))


def _check_leaf(leaf: LeafState, beside: jax.sharding.Sharding) -> None:
    layout = leaf_layout(leaf.spec, deferred=False)
    for name in ("channels", "steps", "master", "mu", "nu", "scores"):
        x = getattr(leaf, name)
        if x is not None and x.size:
            _check_place(name, x, getattr(layout, name), beside, leaf.spec)


def _check_place(
    name: str,
    x: jax.Array,
    partition: PartitionSpec,
    beside: jax.sharding.Sharding,
    spec: LeafSpec,
) -> None:
    if len(beside.device_set) == 1:
        there = x.sharding.device_set == beside.device_set
        where: Any = beside
    else:
        assert isinstance(beside, NamedSharding)  # `check_placement` guarantees it
        # Either memory is right: a checkpoint may have been read into the other one.
        kind = x.sharding.memory_kind
        where = NamedSharding(beside.mesh, partition, memory_kind=kind)
        there = x.sharding.is_equivalent_to(where, x.ndim)
    if not there:
        raise ValueError(
            f"expected `{name}` of {spec.name} in the state where `tx.init` put it, {where}, got "
            f"it at {x.sharding}. Something has placed the state anew: leave it where it is, or "
            "place it by the shardings that it has after `tx.init(params)`, "
            "`jax.tree.map(lambda x: x.sharding, opt_state)`."
        )


def _check_arrays(state: ZenFlowState) -> None:
    """Refuses a state that is not of jax arrays, by a look at its step scalars alone."""
    ints = state.step_scalars.ints
    check_not_numpy(ints)
    if not isinstance(ints, jax.Array) or isinstance(ints, Tracer):
        raise TypeError(
            f"expected a state of jax arrays, got {type(ints).__name__}. Pass what the step "
            "returned, outside of jit."
        )
