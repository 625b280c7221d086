"""Step tokens: proof that a state comes from exactly one step on the engine's last result.

The engine puts a number into the state, the step sends it back in its mail (`Mail.check`) and marks
the state as used. So mail that was lost, and a state of another run or moment, never go unnoticed.
"""

import weakref
from collections.abc import Sequence

import jax
import numpy as np

from zenflow_jax._device.memory import put_everywhere, read
from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._spec.scalars import USED


class Tokens:
    """The step tokens of one engine's states. Must be used from one thread only.

    `number` identifies the run, and is equal in all processes. Two runs that resume from the same
    checkpoint have different tokens.
    """

    def __init__(self, state: ZenFlowState, weights: Sequence[jax.Array]):
        self.note(weights)
        self.last = state.token  # the token in the last returned state
        self.number = int(read(state.token))  # the token as a Python number
        self.run = 0  # the run's random number, set once the processes have agreed on it

    def advance(self, step: int, like: jax.Array) -> int:
        """Makes the token for the state after `step`; returns the number in the step's mail."""
        number = self.number
        self._make(self.run + step, like)
        return number

    def renew(self, like: jax.Array) -> jax.Array:
        """Makes a new token after a flush, so that the old state is rejected."""
        self._make(self.number + 500_009, like)
        return self.last

    def note(self, weights: Sequence[jax.Array]) -> None:
        """Records the parameters of the last returned state, without keeping them alive."""
        self.noted = [weakref.ref(x) for x in weights]  # a new list for each moment

    @property
    def weights(self) -> list[jax.Array] | None:
        """Returns these parameters, or None if any was freed."""
        weights = [x for ref in self.noted if (x := ref()) is not None and not x.is_deleted()]
        return weights if len(weights) == len(self.noted) else None

    def check_new_step(self, state: ZenFlowState) -> None:
        """Rejects a state without a new step since the last call."""
        if state.token is self.last:
            raise RuntimeError(
                "`exchange` got its last result, not the state of a new step. Call it once after "
                "each step."
            )

    def check_between_steps(self, state: ZenFlowState) -> bool:
        """Rejects any state but the last returned state; returns whether `state` is a copy of it.

        A step without an update (a micro-batch of `optax.MultiSteps`) makes a copy; if so, waits
        for that step.
        """
        if state.token is self.last:
            return False
        number = int(read(state.token))
        if number == self.number:
            return True
        raise RuntimeError(
            "The step's mail has not been exchanged yet. Call `exchange` first, then `flush`."
            if number == USED
            else "The state is from another step or run. Pass the state that the last `exchange` "
            "or `flush` returned."
        )

    def _make(self, number: int, like: jax.Array) -> None:
        self.number = number & 0x7FFFFFFF  # never USED, which is negative
        self.last = put_everywhere(np.int32(self.number), like.shape, like.sharding)
