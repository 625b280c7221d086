"""Parameters in host memory: an update is a new array in the place of the old one.

No array ever changes: a step may still read the one that it was given, as long as it likes. The
host's arrays lack the selected channels, whose masters are in the optimizer state and move at every
step. In a parameter these rows are NaN, so that whoever reads it without them sees it at once;
`flush` returns parameters that have them.
"""

import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zenflow_jax._device.memory import HOST, read, upload
from zenflow_jax._device.samples import places
from zenflow_jax._device.state import LeafState, ZenFlowState
from zenflow_jax._exchange.parts import OffloadedLeaves, joined
from zenflow_jax._host.arrays import copied
from zenflow_jax._host.leaf import HostLeaf

_logger = logging.getLogger("zenflow_jax")


def new_parameter(leaves: Sequence[HostLeaf], offloaded: OffloadedLeaves, number: int) -> jax.Array:
    """A leaf's parameter as the host has it now; it may still be on its way."""
    (numbers,) = offloaded.pieces_of(number)
    (device,) = offloaded.parts[numbers[0]].devices
    return upload(joined([leaves[i].to_upload for i in numbers]), device, HOST)


def with_selected(deferred: np.ndarray, leaf: LeafState) -> jax.Array:
    """A leaf's parameter or masters in host memory: a copy of `deferred`, with the state's rows."""
    spec, whole = leaf.spec, copied(deferred)
    rows = read(leaf.master).reshape(spec.view4(spec.k)).astype(whole.dtype)
    channels = read(leaf.channels).reshape(spec.view4(spec.k)[::2])
    for entry, of_entry, new in zip(whole.reshape(spec.view4(spec.n)), channels, rows, strict=True):
        entry[:, of_entry] = new
    (device,) = leaf.mu.sharding.device_set
    return upload(whole, device, HOST)


class Hosted:
    """The parameters in host memory that the caller must have. For one calling thread."""

    def __init__(
        self, offloaded: OffloadedLeaves, weights: Sequence[jax.Array], state: ZenFlowState
    ):
        self._offloaded = offloaded
        self._numbers = [i for i, spec in enumerate(offloaded.specs) if spec.hosted]
        # Of each: where it is, and samples of it.
        self._given: dict[int, tuple[int, np.ndarray]] = {}
        self._told = False
        self._hidden = True  # whether the selected channels are NaN
        states = offloaded.pick(state.leaves)
        for i in self._numbers:
            spec, rows = states[i].spec, _selected_rows(weights[i], states[i])
            self._hidden = self._hidden and bool(np.isnan(rows).all())
            masters = read(states[i].master).reshape(rows.shape).astype(rows.dtype)
            if int(read(state.step)):
                continue
            if np.isnan(read(weights[i])).any():
                raise ValueError(
                    f"expected {spec.name} without NaN before the first step, got some, as layers "
                    "in host memory have between two flushes: begin with parameters that "
                    "`engine.flush` or `master_params` returned."
                )
            # Masters in the state do not follow parameters that are loaded.
            if not np.array_equal(rows, masters):
                raise ValueError(
                    f"expected the values of {spec.name} that `tx.init` saw, got others. Load "
                    "weights in host memory before you make the state and the engine."
                )
        self.note(weights, [None] * len(weights))

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def hide(self, weights: Sequence[jax.Array], leaves: Sequence[HostLeaf]) -> list[jax.Array]:
        """The parameters without the selected channels, which a step has moved since they had them.

        No update may be on its way: there is none before the first step, nor after a flush.
        """
        weights, numbers = list(weights), [] if self._hidden else self._numbers
        for i in numbers:
            weights[i] = new_parameter(leaves, self._offloaded, i)
        jax.block_until_ready([weights[i] for i in numbers])
        self._hidden = True
        return weights

    def note(self, weights: Sequence[jax.Array], before: Sequence[jax.Array | None]) -> None:
        """Remembers the offloaded leaves' parameters, where they are not as `before`."""
        for i in self._numbers:
            if weights[i] is not before[i]:
                # A method of jax.Array since before 0.10; an array that is on its way has it, too.
                self._given[i] = weights[i].unsafe_buffer_pointer(), _samples(weights[i])

    def changed(self, weights: Sequence[jax.Array], *, wait: bool) -> list[str]:
        """The names of parameters that are not those that were noted.

        An array that a step was given and has returned is where it was, if the step donates it: so
        there is nothing to wait for. Else, or if told to `wait`, values are compared.
        """
        names = []
        for i in self._numbers:
            pointer, samples = self._given[i]
            moved = weights[i].unsafe_buffer_pointer() != pointer
            if moved and not self._told:
                self._told = True
                _logger.warning(
                    "the step copies %s, which is in host memory, and takes the time and memory "
                    "for that: donate the parameters to it, `jax.jit(step, donate_argnums=...)`.",
                    self._offloaded.specs[i].name,
                )
            if moved or wait:
                if not np.array_equal(_samples(weights[i]), samples, equal_nan=True):
                    names.append(self._offloaded.specs[i].name)
        return names

    def current(
        self,
        weights: Sequence[jax.Array],
        leaves: Sequence[HostLeaf],
        states: Sequence[LeafState],
    ) -> list[jax.Array]:
        """The parameters with selected channels, of `states`; the host has made all updates."""
        weights, states = list(weights), self._offloaded.pick(states)
        self._hidden = not self._numbers
        for i in self._numbers:
            (numbers,) = self._offloaded.pieces_of(i)
            deferred = joined([leaves[j].to_upload for j in numbers])
            weights[i] = with_selected(deferred, states[i])
        return weights


def _selected_rows(weight: jax.Array, leaf: LeafState) -> np.ndarray:
    spec = leaf.spec
    whole = read(weight).reshape(spec.view4(spec.n))
    channels = read(leaf.channels).reshape(spec.view4(spec.k)[::2])
    return np.stack([entry[:, k] for entry, k in zip(whole, channels, strict=True)])


def _samples(x: Any) -> np.ndarray:
    return read(x)[places(x.shape)].astype(np.float32)
