"""Checks the arguments that users pass to `HostEngine` and to its methods.

Each call compares shardings with the last correct shardings, because a compiled step returns the
same objects every time. Step tokens prove that no mail was lost.
"""

import dataclasses
import functools
import logging
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from zenflow_jax._device.leaves import LOOPS, Places, check_leaves
from zenflow_jax._device.memory import put_everywhere, read
from zenflow_jax._device.placing import (
    check_arrays,
    check_in_place,
    check_placement,
    weights_in_place,
)
from zenflow_jax._device.state import ZenFlowState, find_state, has_state
from zenflow_jax._exchange.parts import OffloadedLeaves
from zenflow_jax._spec.leaf import as_pure
from zenflow_jax._spec.rules import SendGradients, check_one_of
from zenflow_jax._spec.scalars import USED

_logger = logging.getLogger("zenflow_jax")


def is_compact(host_state: Any) -> bool:
    """Returns whether the host keeps moments in 8 bits; rejects an invalid `host_state`."""
    check_one_of("host_state", host_state, ("float32", "compact"))
    return host_state == "compact"


def checked(params: Any, opt_state: Any, fresh: bool) -> tuple[ZenFlowState, list[Any]]:
    """Returns the state and each leaf's parameter. A `fresh` state must come from `tx.init`."""
    params, opt_state = as_pure(params), as_pure(opt_state)
    state = find_state(opt_state)
    wrapped = state.offloads and _is_wrapped(opt_state, state)
    if state.offloads:
        _warn_about_later_transformations(opt_state)
    check_arrays(state)
    _check_one_run(state)
    if fresh and state.offloads:
        _check_fresh(state)
    weights = weights_in_place(params, state)
    if state.offloads:
        check_in_place(state, weights, typed=wrapped)
    return state, weights


def _check_one_run(state: ZenFlowState) -> None:
    """Rejects the stacked states that `jax.vmap(tx.init)` and `jax.pmap` make."""
    shape = np.shape(state.step)
    if shape:
        raise ValueError(
            f"The state has {math.prod(shape)} copies of each array, from `jax.pmap`, "
            "`flax.jax_utils.replicate` or `jax.vmap(tx.init)`. To train on several devices, use "
            f"`jit` instead of `pmap` {LOOPS}. For several runs, give each its own state, step and "
            "engine; stacked layers need no `vmap`."
        )


def _check_fresh(state: ZenFlowState) -> None:
    step = int(read(state.step))
    if step:
        raise ValueError(
            f"The state is from step {step}, but a new engine lacks the moments of the deferred "
            "channels. Make the engine before the first step, or pass the `engine_state` that was "
            "saved with this state, or start from the parameters alone, with `tx.init(params)`."
        )


def _is_wrapped(opt_state: Any, state: ZenFlowState) -> bool:
    """Returns whether a branch may withhold an update; rejects branches jax could not trace."""
    around = _states(opt_state, (optax.MultiStepsState, optax.ApplyIfFiniteState))
    if around and state.send_gradients == SendGradients.AFTER_STEP:
        wrapper = type(around[0]).__name__.removesuffix("State")
        raise ValueError(
            f'`optax.{wrapper}` does not work with send_gradients="after_step": both branches of '
            "its condition must return the same shapes, but a step's mail differs in shape "
            "from its input. Sum micro-batches inside the step, or omit `send_gradients`; steps "
            "whose gradients are not finite are skipped anyway."
        )
    return bool(around)


def _warn_about_later_transformations(opt_state: Any) -> None:
    """Warns about transformations after zenflow, whose effect rounding may hide.

    A mask after zenflow's own mask may contain all other leaves.
    """
    chains = jax.tree.leaves(opt_state, is_leaf=lambda x: type(x) is tuple)
    for chain in (x for x in chains if has_state(x) and type(x) is tuple):
        place = [has_state(x) for x in chain].index(True)
        mask_types = optax.MaskedState if isinstance(chain[place], optax.MaskedState) else ()
        later = [x for x in chain[place + 1 :] if not isinstance(x, mask_types)]
        if later:
            _logger.warning(
                "Other transformations follow zenflow in its chain. They do not act on the host's "
                "updates, and the engine can reject them only where they visibly change a weight. "
                "Put zenflow last: pass a variable `learning_rate`, and freeze leaves "
                "with `optax.partition`."
            )
        _warn_about_later_transformations(chain[place])


def accumulations(opt_state: Any) -> list[optax.MultiStepsState]:
    """Returns the `optax.MultiSteps` states around zenflow's state, the outermost first."""
    states, rest = [], opt_state
    while inner := [x for x in _states(rest, (optax.MultiStepsState,)) if has_state(x)]:
        states.append(inner[0])
        rest = inner[0].inner_opt_state
    return states


def _states(tree: Any, kinds: tuple[type, ...]) -> list[Any]:
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [x for x in nodes if isinstance(x, kinds)]


class StateChecker:
    """Rejects states and parameters from outside a run. Must be used from one thread only."""

    def __init__(
        self,
        state: ZenFlowState,
        weights: Sequence[jax.Array],
        offloaded: OffloadedLeaves,
    ):
        self._offloaded = offloaded
        self._schedule = state.schedule
        self._specs = [leaf.spec for leaf in state.leaves]
        self._places = Places(self._specs)
        self._on_mesh = any(len(weight.sharding.device_set) > 1 for weight in weights)
        # The last correct shardings of state and parameters.
        self._state_shardings: list[Any] = []
        self._param_shardings: list[Any] = []

    def state(self, opt_state: Any) -> ZenFlowState:
        """Returns the state in `opt_state`."""
        state = find_state(opt_state)
        if [x.spec for x in state.leaves] != self._specs or state.schedule != self._schedule:
            raise ValueError(
                "The state's leaves or settings differ from this engine's run. Make an engine for "
                "each run."
            )
        check_arrays([state.token])  # checking all arrays would be slow
        return state

    def check_in_place(self, state: ZenFlowState, weights: Sequence[jax.Array]) -> None:
        """Rejects a step's misplaced state; programs themselves reject other devices."""
        watched = state.mail, state.leaves if self._on_mesh else ()
        shardings = [x.sharding for x in jax.tree.leaves(watched)]
        if not _same(shardings, self._state_shardings):
            check_in_place(state, weights)
            self._state_shardings = shardings

    def take(self, params: Any) -> "CallerTree":
        """Splits parameters into leaves; rejects different shapes, dtypes or placements."""
        taken = CallerTree(*self._places(params), self._offloaded)
        check_leaves(taken.weights, self._specs)
        shardings = [getattr(weight, "sharding", None) for weight in taken.weights]
        if not _same(shardings, self._param_shardings):
            check_placement(taken.weights, self._specs)
            self._param_shardings = shardings
        return taken


def _same(current: Sequence[Any], last: Sequence[Any]) -> bool:
    return len(current) == len(last) and all(map(operator.is_, current, last))


class Tokens:
    """The step tokens of one engine's states. Must be used from one thread only.

    `number` identifies the run, and is equal in all processes. Two runs that resume from the same
    checkpoint have different tokens.
    """

    def __init__(self, state: ZenFlowState):
        self.last = state.token  # the token in the last returned state
        self.number = int(read(state.token))  # the token as a Python number
        self.run = 0  # the run's random number, set once the processes have agreed on it
        # The token and number that a flush has replaced since the last step.
        self._replaced: tuple[jax.Array, int] | None = None
        self._stepped = False  # whether the engine has seen a step
        self._repeated = False  # whether the last returned state was passed again

    def advance(self, step: int, like: jax.Array) -> int:
        """Makes the token for the state after `step`; returns the number in the step's mail."""
        number, self._replaced = self.number, None
        self._stepped, self._repeated = True, False
        self._make(self.run + step, like)
        return number

    def renew(self, like: jax.Array) -> jax.Array:
        """Makes a new token after a flush, so that the old state is rejected."""
        self._replaced = (self.last, self.number)
        self._make(self.number + 500_009, like)
        return self.last

    def is_repeated(self, state: ZenFlowState) -> bool:
        """Returns whether this is the last returned state, passed again for the first time.

        Trainers that run their hooks again at the end pass this state. So does a loop that drops
        its step's results; `check_new_step` then rejects its next step.
        """
        if self._repeated or not self._stepped or state.token is not self.last:
            return False
        self._repeated = True
        return True

    def check_new_step(self, state: ZenFlowState) -> None:
        """Rejects a state without a new step since the last call, and a dropped step."""
        self._check_flushed(state)
        if state.token is self.last:
            raise RuntimeError(
                "`exchange` got the state that it returned last, not the state of a new step. Call "
                "it once after each step, with the step's results."
            )
        if self._repeated:
            raise RuntimeError(
                "A step was dropped: the last two calls to `exchange` got the same state, and now "
                "another step follows. Call `exchange` after each step, with the step's results. "
                "To continue training after a trainer has run its last hooks, call `flush` first."
            )

    def check_between_steps(self, state: ZenFlowState, name: str) -> bool:
        """Rejects any state but the last returned state; returns whether `state` is a copy of it.

        A step without an update (a micro-batch of `optax.MultiSteps`) makes a copy; if so, waits
        for that step.
        """
        self._check_flushed(state)
        self._repeated = False  # training may continue after a flush
        if state.token is self.last:
            return False
        number = int(read(state.token))
        if number == self.number:
            return True
        raise RuntimeError(
            f"The step's mail has not been exchanged yet. Call `exchange` first, then `{name}`."
            if number == USED
            else "The state is from another step or run. Pass the state that the last `exchange` "
            f"returned to `{name}`."
        )

    def _check_flushed(self, state: ZenFlowState) -> None:
        """Rejects the state that the last flush replaced, a copy of it, or a step taken from it."""
        if self._replaced is None or state.token is self.last:
            return
        replaced, number = self._replaced
        if state.token is not replaced:
            sent = jax.tree.map(read, state.step_scalars)
            if number not in (int(read(state.token)), int(sent.unpack().token)):
                return
        raise RuntimeError(
            "Parameters and state are older than the last `flush`, and lack its updates. Continue "
            "with the flush's results: `params, opt_state = engine.flush(params, opt_state)`."
        )

    def _make(self, number: int, like: jax.Array) -> None:
        self.number = number & 0x7FFFFFFF  # never USED, which is negative
        self.last = put_everywhere(np.int32(self.number), like.shape, like.sharding)


@dataclasses.dataclass(frozen=True)
class CallerTree:
    """A caller's `params`, which may contain leaves that are not in the state."""

    leaves: Sequence[Any]
    treedef: Any
    places: Sequence[int]  # the index in `leaves` of each leaf in the state
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
        """Returns this tree with `weights` instead of the offloaded leaves."""
        leaves = list(self.leaves)
        for i, weight in zip(self.known.pick(self.places), weights, strict=True):
            leaves[i] = weight
        return dataclasses.replace(self, leaves=leaves)
