"""The host's arrays of a run: made from the parameters, and read as masters."""

from collections.abc import Sequence

import jax
import numpy as np

from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._exchange.hosted import with_selected
from zenflow_jax._exchange.parts import OffloadedLeaves, host_channels, host_part, put_leaf
from zenflow_jax._exchange.worker import Worker
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.state import HostState


def make_host(
    weights: Sequence[jax.Array],
    state: ZenFlowState,
    offloaded: OffloadedLeaves,
    adam: HostAdam,
    compact: bool,
) -> HostState:
    parts, states = offloaded.parts, offloaded.pick(state.leaves)
    return HostState(
        [part.spec for part in parts],
        # One at a time: besides the masters there is room for the copy of one part.
        (host_part(weights[part.leaf], part) for part in parts),
        (host_channels(part.of(states[part.leaf].channels), part) for part in parts),
        adam,
        state.schedule,
        offloaded.pieces,
        compact=compact,
    )


class HostMasters:
    """The masters of deferred channels. The worker must have nothing to do at each call."""

    def __init__(self, worker: Worker, offloaded: OffloadedLeaves):
        self.loads = 0  # how often the masters have followed parameters
        self._worker, self._offloaded = worker, offloaded

    def follow(self, weights: Sequence[jax.Array]) -> None:
        """Takes over parameters, as they may be loaded until the first step has been exchanged.

        The first step moves no deferred channel, so they are still as they were before it.
        """
        for i, part in enumerate(self._offloaded.parts):
            if part.spec.hosted:
                continue  # their selected channels could not follow
            self._worker.host.take_master(i, host_part(weights[part.leaf], part))
        self.loads += 1

    def of_leaf(self, number: int, state: ZenFlowState) -> jax.Array:
        """An offloaded leaf's masters on the devices, in parts; not those of selected channels.

        Of a parameter in host memory all masters, there.
        """
        leaves, parts = self._worker.leaves(), self._offloaded.parts
        leaf = state.leaves[self._offloaded.places[number]]

        def masters(i: int) -> np.ndarray:
            part, wide = parts[i], leaves[i].master.as_float32().reshape(parts[i].spec.shape)
            return with_selected(wide, leaf, part) if leaf.spec.hosted else wide

        # The uploads may read live masters, which the next update writes.
        return jax.block_until_ready(put_leaf(self._offloaded, number, masters))
