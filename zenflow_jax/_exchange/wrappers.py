"""What optax wraps around zenflow that withholds updates."""

from typing import Any

import jax
import optax

from zenflow_jax._device.state import ZenFlowState, has_state
from zenflow_jax._plan.sending import SendGradients


def check_wrappers(opt_state: Any, state: ZenFlowState) -> None:
    """Refuses wrappers around the state whose branches jax could not trace."""
    kinds = (optax.MultiStepsState, optax.ApplyIfFiniteState)
    around = [
        type(x).__name__.removesuffix("State")
        for x in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kinds))
        if isinstance(x, kinds)
    ]
    if around and state.send_gradients == SendGradients.AFTER_STEP:
        raise ValueError(
            "expected no `optax` wrapper that withholds updates with send_gradients="
            f'"after_step", got {around[0]}: what a step returns has another shape there than what '
            "it gets, and both ways of a branch must return the same. Sum micro-batches inside the "
            "step (steps that are not finite are skipped anyway), or leave `send_gradients` out."
        )


def accumulations(opt_state: Any) -> list[optax.MultiStepsState]:
    """The states of `optax.MultiSteps` around zenflow's, the outermost first."""
    found, rest = [], opt_state
    while inner := [x for x in _multi_steps(rest) if has_state(x)]:
        found.append(inner[0])
        rest = inner[0].inner_opt_state
    return found


def _multi_steps(tree: Any) -> list[optax.MultiStepsState]:
    def wraps(x: Any) -> bool:
        return isinstance(x, optax.MultiStepsState)

    return [x for x in jax.tree.leaves(tree, is_leaf=wraps) if wraps(x)]
