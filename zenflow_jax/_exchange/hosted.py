"""Parameters in host memory: an update is a new array in the place of the old one.

No array ever changes: a step may still read the one that it was given, as long as it likes. The
host's arrays lack the selected channels, whose masters are in the optimizer state and move at every
step. In a parameter these rows are NaN, so that whoever reads it without them sees it at once;
`flush` returns parameters that have them.
"""

import logging
from collections.abc import Sequence

import jax
import numpy as np

from zenflow_jax._device.memory import read
from zenflow_jax._device.samples import places
from zenflow_jax._device.state import LeafState, ZenFlowState
from zenflow_jax._exchange.parts import (
    OffloadedLeaves,
    Part,
    host_channels,
    host_part,
    put_leaf,
)
from zenflow_jax._host.arrays import copied
from zenflow_jax._host.state import HostLeaf

_logger = logging.getLogger("zenflow_jax")


def new_parameter(leaves: Sequence[HostLeaf], offloaded: OffloadedLeaves, number: int) -> jax.Array:
    """A leaf's parameter as the host has it now; it may still be on its way."""
    return put_leaf(offloaded, number, lambda i: leaves[i].to_upload)


def with_selected(deferred: np.ndarray, leaf: LeafState, part: Part) -> np.ndarray:
    """A part of a leaf's parameter or masters: a copy of `deferred`, with the state's rows."""
    whole = copied(deferred)
    rows = _masters(leaf, part).astype(whole.dtype)
    entries = whole.reshape(part.spec.view4(part.spec.n))
    for entry, channels, new in zip(entries, _channels(leaf, part), rows, strict=True):
        entry[:, channels] = new
    return whole


class Hosted:
    """The parameters in host memory that the caller must have. For one calling thread."""

    def __init__(
        self, offloaded: OffloadedLeaves, weights: Sequence[jax.Array], state: ZenFlowState
    ):
        self._offloaded = offloaded
        self._numbers = [i for i, spec in enumerate(offloaded.specs) if spec.hosted]
        # Of each: where its pieces are, and samples of them.
        self._given: dict[int, tuple[list[int], np.ndarray]] = {}
        self._copies = 0  # steps that have copied some
        self._hidden = True  # whether the selected channels are NaN
        self.behind = False  # whether they have moved since the caller's parameters had them
        states = offloaded.pick(state.leaves)
        for part in offloaded.parts:
            if not part.spec.hosted:
                continue
            name, leaf, weight = part.spec.name, states[part.leaf], weights[part.leaf]
            whole = host_part(weight, part)
            entries = whole.reshape(part.spec.view4(part.spec.n))
            channels = _channels(leaf, part)
            rows = np.stack([entry[:, k] for entry, k in zip(entries, channels, strict=True)])
            self._hidden = self._hidden and bool(np.isnan(rows).all())
            if int(read(state.step)):
                continue
            if np.isnan(whole).any():
                raise ValueError(
                    f"expected {name} without NaN before the first step, got some, as layers "
                    "in host memory have between two flushes: begin with parameters that "
                    "`engine.flush` or `master_params` returned."
                )
            # Masters in the state do not follow parameters that are loaded.
            if not np.array_equal(rows, _masters(leaf, part).astype(rows.dtype)):
                raise ValueError(
                    f"expected the values of {name} that `tx.init` saw, got others. Load "
                    "weights in host memory before you make the state and the engine."
                )
        self.note(weights, [None] * len(weights))

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def step_made(self) -> None:
        self.behind = any(self._offloaded.specs[i].k for i in self._numbers)

    def hide(self, weights: Sequence[jax.Array], leaves: Sequence[HostLeaf]) -> list[jax.Array]:
        """The parameters without the selected channels, which a step has moved since they had them.

        No update of them may be under way: there is none before the first step, and a flush waits.
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
                self._given[i] = _pointers(weights[i]), _samples(weights[i])

    def changed(self, weights: Sequence[jax.Array], *, wait: bool) -> list[str]:
        """The names of parameters that are not those that were noted.

        An array that a step was given and has returned is where it was, if the step donates it: so
        there is nothing to wait for. Else, or if told to `wait`, values are compared.
        """
        names, copies = [], []
        for i in self._numbers:
            pointers, samples = self._given[i]
            moved = _pointers(weights[i]) != pointers
            if moved:
                copies.append(self._offloaded.specs[i].name)
            if moved or wait:
                if not np.array_equal(_samples(weights[i]), samples, equal_nan=True):
                    names.append(self._offloaded.specs[i].name)
        self._copies += bool(copies)
        # The first time it may be NumPy's memory, which nobody can donate to a CPU's step.
        if copies and self._copies == 2:
            _logger.warning(
                "the step copies %s, which is in host memory, and takes the time and memory "
                "for that: donate the parameters to it, `jax.jit(step, donate_argnums=...)`.",
                copies[0],
            )
        return names

    def current(
        self,
        weights: Sequence[jax.Array],
        leaves: Sequence[HostLeaf],
        states: Sequence[LeafState],
    ) -> list[jax.Array]:
        """The parameters with selected channels, of `states`; the host has made all updates."""
        weights, states = list(weights), self._offloaded.pick(states)
        self._hidden, self.behind = not self._numbers, False

        def whole(j: int) -> np.ndarray:
            part = self._offloaded.parts[j]
            return with_selected(leaves[j].to_upload, states[part.leaf], part)

        for i in self._numbers:
            weights[i] = put_leaf(self._offloaded, i, whole)
        return weights


def _masters(leaf: LeafState, part: Part) -> np.ndarray:
    """The state's rows of a part's selected channels, `(entries, rows, k, tail)`."""
    return part.cut(read(part.of(leaf.master))).reshape(part.spec.view4(part.spec.k))


def _channels(leaf: LeafState, part: Part) -> np.ndarray:
    return host_channels(part.of(leaf.channels), part)


def _pointers(x: jax.Array) -> list[int]:
    # A method of jax.Array since before 0.10; an array that is on its way has it, too.
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


def _samples(x: jax.Array) -> np.ndarray:
    pieces = (shard.data for shard in x.addressable_shards)
    each = [read(piece)[places(piece.shape)].astype(np.float32).ravel() for piece in pieces]
    return np.concatenate(each)
