"""Checks the arguments that users pass to `HostEngine` and to its methods.

Each call compares shardings with the last correct shardings, because a compiled step returns the
same objects every time.
"""

import operator
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from zenflow_jax._device.leaves import CallerTree, match_leaves
from zenflow_jax._device.memory import read
from zenflow_jax._device.placing import (
    check_arrays,
    check_in_place,
    check_placement,
    weights_in_place,
)
from zenflow_jax._device.state import ZenFlowState, find_state
from zenflow_jax._spec.leaf import as_pure


def checked(params: PyTree, opt_state: PyTree, fresh: bool) -> tuple[ZenFlowState, list[Any]]:
    """Returns the state and each leaf's parameter. A `fresh` state must come from `tx.init`."""
    params, opt_state = as_pure(params), as_pure(opt_state)
    state = find_state(opt_state)
    check_arrays(state)
    if fresh and state.offloads and (step := int(read(state.step))):
        raise ValueError(
            f"The state is from step {step}, but a new engine lacks its moments. Pass the "
            "`engine_state` that was saved with it, or start with `tx.init(params)`."
        )
    weights = weights_in_place(params, state)
    if state.offloads:
        check_in_place(state, weights)
    return state, weights


class StateChecker:
    """Rejects states and parameters from outside a run. Must be used from one thread only."""

    def __init__(self, state: ZenFlowState, weights: Sequence[jax.Array]):
        self._schedule = state.schedule
        self._specs = [leaf.spec for leaf in state.leaves]
        self._on_mesh = any(len(weight.sharding.device_set) > 1 for weight in weights)
        # The last correct shardings of state and parameters.
        self._state_shardings: list[Any] = []
        self._param_shardings: list[Any] = []

    def state(self, opt_state: PyTree) -> ZenFlowState:
        """Returns the state in `opt_state`."""
        state = find_state(opt_state)
        if [x.spec for x in state.leaves] != self._specs or state.schedule != self._schedule:
            raise ValueError("The state's leaves or settings differ from this engine's run.")
        check_arrays([state.token])  # checking all arrays would be slow
        return state

    def check_in_place(self, state: ZenFlowState, weights: Sequence[jax.Array]) -> None:
        """Rejects a step's misplaced state; programs themselves reject other devices."""
        watched = state.mail, state.leaves if self._on_mesh else ()
        shardings = [x.sharding for x in jax.tree.leaves(watched)]
        if not _same(shardings, self._state_shardings):
            check_in_place(state, weights)
            self._state_shardings = shardings

    def params(self, params: PyTree) -> CallerTree:
        """Splits parameters into leaves; rejects different shapes, dtypes or placements."""
        taken = match_leaves(params, self._specs)
        shardings = [getattr(weight, "sharding", None) for weight in taken.weights]
        if not _same(shardings, self._param_shardings):
            check_placement(taken.weights, self._specs)
            self._param_shardings = shardings
        return taken


def _same(current: Sequence[object], last: Sequence[object]) -> bool:
    return len(current) == len(last) and all(map(operator.is_, current, last))
