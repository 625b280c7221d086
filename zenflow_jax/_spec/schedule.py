"""Decides when a window closes and when channels are selected again.

Steps count from 1; step t's boundary lies between t and t + 1. Leaves are in groups (`groups.py`),
and each group has its own windows.

A decision about a step uses only earlier steps; otherwise an engine would have to wait for the
device.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zenflow_jax._spec.adaptive import AutoSelect, AutoWindow, ScheduleState


class Boundary(NamedTuple):
    """A group's events after a step."""

    closes: bool  # the window ends, and its update is made
    selects: bool  # channels are selected again; only where a window closes
    synchronous: bool  # the update reaches the parameters at once
    arrives: bool  # an earlier update reaches the parameters, before everything else


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When windows close and channels are selected after the warm-up. Static and hashable.

    Attributes:
        window: The (maximum) number of steps in a window.
        select: Steps between two selections.
        full_warm_up_rounds: Number of initial steps, each of which is its own window.
        groups: Number of groups that take turns: group j closes its windows j steps before group 0.
        staleness: Steps from the end of a window to the step after which its update reaches the
            parameters. None, for adaptive windows: the next boundary.
        window_scaling: Whether a window's update is as long as the steps in it.
        provisional_share: The length of a provisional step, as a share of the learning rate.
        auto_window: The rule that may close a window earlier.
        auto_select: The rule that starts selections, in place of `select`.
    """

    window: int
    select: int
    full_warm_up_rounds: int
    groups: int
    staleness: int | None
    window_scaling: bool
    provisional_share: float | None = None
    auto_window: AutoWindow | None = None
    auto_select: AutoSelect | None = None

    def provisional_step(
        self, step: jax.Array, learning_rate: jax.typing.ArrayLike, counts: jax.Array
    ) -> jax.Array:
        """Returns the float32 length of the provisional step; zero unless the step `counts`.

        A run's first step moves nothing, because weights may be loaded before it.
        """
        length = jnp.float32(self.provisional_share) * jnp.asarray(learning_rate, jnp.float32)
        moves = counts & (step > max(self.full_warm_up_rounds, 1))
        return jnp.where(moves, length, jnp.float32(0))

    @property
    def keeps_last_move(self) -> bool:
        """Returns whether an arriving update keeps the provisional move of the step before it.

        Short windows need it: a window of two steps would lose every other move. In windows of
        four it gained at most 0.02, and it costs a copy of the group's mail (benchmarks/LOG.md).
        """
        return self.provisional_share is not None and self.staleness == 1 and self.window < 4

    def first_state(self, leaves: int) -> ScheduleState:
        """Returns the state before the first step, for `leaves` offloaded leaves."""
        return ScheduleState(
            sums=np.zeros(1 + 2 * leaves if self.auto_window else 0, np.float32),
            windows=np.zeros(self.groups, np.int32),
            shares=np.full(self.groups, np.nan, np.float32),
        )

    def boundary(
        self, step: int, state: ScheduleState, group: int = 0, open_steps: int = 0
    ) -> Boundary:
        """Returns the boundary of `group` after step `step`.

        `state` covers the steps before; `open_steps` of them are in the open window.
        """
        warm = step <= self.full_warm_up_rounds
        since = step - self.full_warm_up_rounds
        if self.auto_window is None:
            length = self.window
            closes = arrives = warm or (since + group) % length == 0
            if self.staleness not in (None, 0, length):
                arrives = (since + group - self.staleness) % length == 0
        else:
            length = open_steps + 1
            ripe = self.auto_window.is_ripe(state.sums)
            closes = arrives = warm or ripe or length >= self.window
        # The first selection comes at the warm-up's end; without a warm-up it comes at the first
        # boundary, however far off the interval's end is.
        first = since == (length - group if self.full_warm_up_rounds == 0 else 0)
        if self.auto_select is None:
            # It is due if an interval ends within the window. A group's first interval may be
            # shorter.
            end = since + group
            due = end // self.select > max(end - length, group) // self.select
        else:
            due = self.auto_select.is_due(int(state.windows[group]), float(state.shares[group]))
        return Boundary(
            closes=closes,
            selects=closes and (first or (since > 0 and due)),
            synchronous=warm or self.staleness == 0,
            arrives=arrives,
        )
