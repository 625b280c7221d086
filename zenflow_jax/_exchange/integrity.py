"""Detects changes to the parameters by other code.

Before a step, values of the next few leaves are noted. After it, a program on the device counts the
values that are not the step's results; the counts are read late, to avoid a wait.

The state determines the new values of selected channels: a low-precision leaf has a master, and a
float32 leaf's change follows from its moments. A deferred weight has moved by a provisional step,
up or down, or has not moved.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from zenflow_jax._device.adamw import change_of
from zenflow_jax._device.channels import broadcast_channels, contains, take
from zenflow_jax._device.leaves import first_names
from zenflow_jax._device.shards import (
    BLOCK,
    CHANNELS,
    EACH_DEVICE,
    REPLICATED,
    Shard,
    on_each_device,
)
from zenflow_jax._device.state import LeafState, Leaves, ZenFlowState, places_of
from zenflow_jax._device.step import provisional_change
from zenflow_jax._spec.scalars import AdamScalars, StepScalars
from zenflow_jax._spec.schedule import Schedule

# The leaves in a comparison, which each cost two small programs, and the least number of steps
# between two comparisons. A prime covers all steps of a window.
_LEAVES, _INTERVAL = 8, 7
# Relative tolerances between two correct programs: for values, and for a selected float32 value's
# change. The last places of `b**n`, about 2**-21, may differ, so a change with `1 - b**n` below
# 2**-15 is not compared: a false alarm would end a correct run.
_VALUE, _CHANGE, _LEAST = 2.0**-20, 0.05, 2.0**-15
# Values of selected channels or a resident leaf, and of all channels of other leaves.
_Values = tuple[Array | None, Array | None]


class Integrity:
    """Checks the parameters of one engine's run. Must be used from one thread only.

    All processes get the same counts, so the same call raises an error in each process. With
    `everything`, all values are compared at each step, which needs a second copy of the parameters.
    """

    def __init__(self, state: ZenFlowState, *, everything: bool):
        self._error = ""
        self._unread: deque[tuple[int, Sequence[int], Sequence[Array]]] = deque()
        self._names = [leaf.spec.name for leaf in state.leaves]
        # Runs that differ only in windows and selections share programs.
        same = {"window": 1, "select": 1, "groups": 1, "staleness": None, "window_scaling": False}
        same |= {"auto_window": None, "auto_select": None}
        share = state.schedule.provisional_share or 0.0
        schedule = dataclasses.replace(state.schedule, **same, provisional_share=share)
        self._schedule, self._all = schedule, everything
        compared = [i for i, leaf in enumerate(state.leaves) if 0 not in leaf.spec.shape]
        # Each comparison's leaves are spread over the whole tree.
        count = min(len(compared), 1) if everything else -(-len(compared) // _LEAVES)
        self._turns = deque(compared[first::count] for first in range(count))
        self._since, self._before = _INTERVAL, list[_Values]()

    def check(self, until: int) -> None:
        """Waits for counts of steps up to `until`; raises an error if any was ever nonzero."""
        while not self._error and self._unread and self._unread[0][0] <= until:
            step, turn, counts = self._unread[0]
            values = jax.device_get(counts)  # every device has all counts
            self._unread.popleft()  # last: an interrupted wait must not lose a comparison
            changed = [self._names[i] for i, count in zip(turn, values, strict=True) if count]
            if changed:
                self._error = (
                    f"Something other than zenflow changed {first_names(changed)} in or after step "
                    f"{step}. Pass each step the last result of `exchange` or `flush`. Put zenflow "
                    'last in its chain (docs/usage.md, "Changes that an engine rejects").'
                )
        if self._error:
            raise RuntimeError(self._error)

    def note_parameters(self, weights: Sequence[Array], leaves: Leaves, *, if_due: bool) -> None:
        """Replaces the noted values before a step; with `if_due`, if a comparison is due."""
        self._before = []
        if self._turns and (self._all or (if_due and self._since >= _INTERVAL)):
            self._since = 0
            self._before = [_note(weights[i], _alone(leaves[i]), self._all) for i in self._turns[0]]

    def step_made(
        self, step: int, weights: Sequence[Array], leaves: Leaves, step_scalars: StepScalars
    ) -> None:
        """Compares the step's results with the values that were noted before the step."""
        self._since += 1
        if not self._before:
            return
        shared = step_scalars, self._schedule, self._all
        turn = self._turns[0]
        pairs = zip(turn, self._before, strict=True)
        # Scalars stay separate, because no arrays are joined outside programs: some GPUs compute
        # single operations incorrectly (jax-ml/jax#40633).
        counts = [_compare(weights[i], old, _alone(leaves[i]), *shared) for i, old in pairs]
        self._unread.append((step, turn, counts))
        self._turns.rotate(-1)
        self._before = []


def _alone(leaf: LeafState) -> LeafState:
    """Returns the leaf without its name, so that similar leaves share programs."""
    spec = dataclasses.replace(leaf.spec, name="", transfer_dtype=None, groups=(0,))
    return leaf.replace(scores=None, spec=spec)


@partial(jax.jit, static_argnums=2)
def _note(weight: Array, leaf: LeafState, all_: bool) -> _Values:
    takes = [BLOCK, None if leaf.channels is None else CHANNELS]
    look = partial(_look, all_=all_)
    return on_each_device(look, leaf.spec, takes, EACH_DEVICE, weight, leaf.channels)


def _look(shard: Shard, weight: Array, channels: Array | None, *, all_: bool) -> _Values:
    if channels is None:
        return _sample(weight, all_), None
    rows = shard.own(take(weight, shard.to_local(channels), shard.block)) if shard.part.k else None
    return None if rows is None else _sample(rows, all_), _sample(weight, all_)


def _sample(x: Array, all_: bool) -> Array:
    """Returns values of a device's block, always at the same positions."""
    # All layers of a stack (32 to 63 if there are more); about eight rows and columns of a matrix.
    most = x.shape if all_ else [32] * (x.ndim - 2) + [8, 8][max(2 - x.ndim, 0) :]
    strides = [max(size // max(m, 1), 1) for size, m in zip(x.shape, most, strict=True)]
    x = x[tuple(slice(stride // 2, None, stride) for stride in strides)]
    return jnp.atleast_1d(jnp.copy(x))  # jit would return its argument, which the next step donates


@partial(jax.jit, static_argnums=(4, 5))
def _compare(
    weight: Array, old: _Values, leaf: LeafState, sent: StepScalars, schedule: Schedule, all_: bool
) -> Array:
    """Counts the values that are not the step's results."""
    # The scalars that the step sent are in host memory.
    facts = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), sent).unpack()

    def count(shard, weight, old, leaf, scalars, step, finite):
        scalars, counts = AdamScalars(*scalars), finite > 0  # a skipped step changes nothing
        wrong, new = jnp.zeros((), jnp.int32), _look(shard, weight, leaf.channels, all_=all_)
        if new[0] is not None:
            values, slack = _expected(shard, old[0], leaf, scalars, all_)
            values = jnp.where(counts, values, old[0].astype(jnp.float32))
            wrong += jnp.sum(_strays(new[0], old[0], [values], slack), dtype=jnp.int32)
        if new[1] is not None:
            length = schedule.provisional_step(step, scalars.learning_rate, counts)
            moves = [0.0, *(provisional_change(old[1], x) for x in (length, -length))]
            values = [old[1].astype(jnp.float32) + x for x in moves]
            deferred = ~contains(shard.to_local(leaf.channels), shard.block.n)
            deferred = jnp.broadcast_to(broadcast_channels(deferred, shard.block), weight.shape)
            stray = _strays(new[1], old[1], values) & _sample(deferred, all_)
            wrong += jnp.sum(stray, dtype=jnp.int32)
        return shard.sum_everywhere(wrong)

    places = places_of(leaf.spec).replace(scores=None)
    takes = [BLOCK, EACH_DEVICE, places, *[REPLICATED] * 3]
    scalars = jnp.stack(facts.adam.scaled(leaf.spec.lr_scale))
    args = weight, old, leaf, scalars, facts.step, facts.finite
    return on_each_device(count, leaf.spec, takes, REPLICATED, *args)


def _strays(new: Array, old: Array, accepted: Sequence[Array], slack: Any = 0.0) -> Array:
    """Returns a mask of values that are not near any accepted value; NaN is near everything."""
    old, new = old.astype(jnp.float32), new.astype(jnp.float32)
    slack += _VALUE * (jnp.abs(old) + jnp.abs(new)) + float(jnp.finfo(jnp.float32).tiny)
    return reduce(jnp.logical_and, [jnp.abs(new - x) > slack for x in accepted])


def _expected(
    shard: Shard, old: Array, leaf: LeafState, scalars: AdamScalars, all_: bool
) -> tuple[Array, Array]:
    """Returns new values of selected channels or of a resident leaf, with their tolerance."""
    spec, see, old = shard.part, partial(_sample, all_=all_), old.astype(jnp.float32)
    if leaf.master is not None:
        # Both neighbours are accepted, because a device compiler may omit a rounding.
        master = see(leaf.master)
        return master, float(jnp.finfo(spec.dtype).eps) / 2 * jnp.abs(master)
    steps = leaf.steps if spec.resident else broadcast_channels(leaf.steps, spec)
    steps = see(jnp.broadcast_to(jnp.maximum(steps, 1), leaf.mu.shape))
    change = change_of(old, see(leaf.mu), see(leaf.nu), steps, scalars, decay=spec.decay)
    slack = jnp.abs(change) + 2 * jnp.abs(scalars.learning_rate * scalars.weight_decay * old)
    corrections = 1 - jnp.maximum(scalars.b1, scalars.b2) ** steps.astype(jnp.float32)
    return old + change, jnp.where(corrections > _LEAST, _CHANGE * slack, jnp.inf)
