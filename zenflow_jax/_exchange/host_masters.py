"""The host's masters on the caller's side: they follow loaded parameters, and are shown."""

import dataclasses
from collections.abc import Sequence

import jax

from zenflow_jax._device.memory import upload
from zenflow_jax._device.samples import checksums, differing
from zenflow_jax._device.state import LeafState, ZenFlowState
from zenflow_jax._exchange.parts import OffloadedLeaves, assemble, by_leaf, host_part, joined
from zenflow_jax._exchange.worker import Worker


class HostMasters:
    """The masters of deferred channels. The worker must have nothing to do at each call.

    `taken_from` are checksums of the deferred channels that the masters were taken from; None if
    they are a checkpoint's, which may be older than the parameters beside it.
    """

    def __init__(
        self, worker: Worker, offloaded: OffloadedLeaves, taken_from: list[jax.Array] | None
    ):
        self.loads = 0  # how often the masters have followed parameters
        self._worker, self._offloaded, self._taken_from = worker, offloaded, taken_from

    def follow(self, weights: Sequence[jax.Array], leaves: Sequence[LeafState]) -> None:
        """Takes over parameters that were loaded; only until the first step has been exchanged.

        No step moves a deferred channel before its first window closes, so what the first one left
        of the parameters is what they were before it.
        """
        sums = checksums(weights, self._offloaded.pick(leaves))
        before = self._taken_from
        loaded = range(len(weights)) if before is None else differing(sums, before)
        for i, part in enumerate(self._offloaded.parts):
            if part.leaf in loaded:
                self._worker.take_master(i, host_part(weights[part.leaf], part))
        self._taken_from = sums
        self.loads += bool(loaded)

    def of_leaf(self, number: int, state: ZenFlowState) -> jax.Array:
        """The host's masters of an offloaded leaf, on the devices, in parts.

        The rows of selected channels are not current.
        """
        leaves = self._worker.leaves()
        parts, pieces = [], []
        for numbers in self._offloaded.pieces_of(number):
            part = self._offloaded.parts[numbers[0]]
            masters = (leaves[j].master.as_float32() for j in numbers)
            shapes = (self._offloaded.parts[j].spec.shape for j in numbers)
            master = joined([x.reshape(s) for x, s in zip(masters, shapes, strict=True)])
            parts.append(dataclasses.replace(part, leaf=0))
            pieces.append([upload(master, device) for device in part.devices])
        # The uploads may read live masters, which the next update writes.
        jax.block_until_ready(pieces)
        like = state.leaves[self._offloaded.places[number]].mu
        return assemble(
            by_leaf(parts, pieces)[0], self._offloaded.specs[number].shape, like.sharding
        )
