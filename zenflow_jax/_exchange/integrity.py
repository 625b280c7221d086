"""Detects changes to the parameters by other code.

A comparison covers one step: the values of some leaves before the step, the step's update, and the
values after the step. A program on the device counts the values that differ, and the counts are
read late, to avoid a wait. Every comparison covers the next few leaves.

The state determines the new values of selected channels: a low-precision leaf has a master, and a
float32 leaf's change follows from its moments. A deferred weight has moved by a provisional step,
up or down, or has not moved.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from zenflow_jax._device.adamw import change_of
from zenflow_jax._device.channels import broadcast_channels, contains, take
from zenflow_jax._device.leaves import first_names
from zenflow_jax._device.memory import read
from zenflow_jax._device.samples import sample_of
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

# The number of leaves in one comparison. Each leaf costs the dispatch of two small programs.
_LEAVES_PER_COMPARISON = 8
# The minimum number of steps between comparisons. A prime covers all steps in a window.
_INTERVAL = 7
# The number of channels compared in each stack entry.
_CHANNELS = 4
#: Relative tolerances between two programs: for a step, because `1 - b**n` may be off by a few
#: units in the last place of the power (1% with b2 = 0.99999), and for a float32 parameter. A false
#: positive would abort a correct run; a transformation after `zenflow` changes steps by more.
_STEP_TOLERANCE, _PARAMETER_TOLERANCE = 0.05, 2.0**-20


@dataclasses.dataclass(frozen=True)
class _Extent:
    """The selection of a leaf's values to compare."""

    schedule: Schedule
    everything: bool

    @property
    def channels(self) -> int | None:
        """Returns how many selected channels to compare in each stack entry, or None for all."""
        return None if self.everything else _CHANNELS

    def sample(self, x: Array) -> Array:
        # Copied, because jit would return its own argument, which the next step donates.
        return jnp.copy(x) if self.everything else sample_of(x)


class Integrity:
    """Checks the parameters of one engine's run. Must be used from one thread only.

    All processes get the same counts, so the same call raises an error in each process. With
    `everything`, all values are compared at each step, which needs a second copy of the parameters
    on the device.
    """

    def __init__(self, state: ZenFlowState, *, everything: bool):
        self._error = ""  # the error message, after an error
        self._step = int(read(state.step))
        self._unread: deque[tuple[int, Sequence[str], Sequence[Array]]] = deque()
        self._specs = [leaf.spec for leaf in state.leaves]
        # Comparisons use only the warm-up and the provisional share; with equal other options, runs
        # share programs.
        same: dict[str, Any] = {"window": 1, "select": 1, "groups": 1, "staleness": None}
        schedule = dataclasses.replace(state.schedule, **same, window_scaling=False)
        self._extent = _Extent(schedule, everything)
        compared = [i for i, spec in enumerate(self._specs) if 0 not in spec.shape]
        gap = min(len(compared), 1) if everything else -(-len(compared) // _LEAVES_PER_COMPARISON)
        # Spreads each comparison's leaves over the whole tree.
        self._batches = [compared[start::gap] for start in range(gap)]
        self._turn = 0
        self._since = _INTERVAL
        self._before: list[_Rows] | None = None

    def check(self, until: int) -> None:
        """Waits for counts of steps up to `until`; raises an error if any was ever nonzero."""
        while not self._error and self._unread and self._unread[0][0] <= until:
            step, names, counts = self._unread[0]
            values = jax.device_get(counts)  # every device has all counts
            self._unread.popleft()  # last: an interrupted wait must not lose a comparison
            changed = [name for name, count in zip(names, values, strict=True) if count]
            if changed:
                self._error = (
                    f"Something other than zenflow changed {first_names(changed)} in or after step "
                    f"{step}, and this engine does not accept further steps. Pass each step the "
                    "parameters that the last `exchange` or `flush` returned, and apply updates "
                    "with `optax.apply_updates`. Put zenflow last in its chain; for a variable "
                    "learning rate, use `optax.inject_hyperparams`. To change weights during a "
                    "run, call `flush` and `tx.init(params)`, then make a new engine."
                )
        if self._error:
            raise RuntimeError(self._error)

    def step_made(
        self, weights: Sequence[Array], leaves: Leaves, step_scalars: StepScalars
    ) -> None:
        """Compares the step's results with the values that were noted before the step."""
        self._step += 1
        self._since += 1
        before, self._before = self._before, None
        if before is None:
            return
        batch = self._batches[self._turn]
        self._turn = (self._turn + 1) % len(self._batches)
        sent = step_scalars._replace(statistics=None)
        counts = [
            _compare(weights[i], rows, _alone(leaves[i]), sent, extent=self._extent)
            for i, rows in zip(batch, before, strict=True)
        ]
        self._add([self._specs[i].name for i in batch], counts)

    def _add(self, names: Sequence[str], counts: Sequence[Array]) -> None:
        # Scalars stay separate, because no arrays are joined outside programs: some GPUs compute
        # single operations incorrectly (jax-ml/jax#40633).
        self._unread.append((self._step, names, counts))

    def forget(self) -> None:
        """Drops the noted values, because the parameters change between two steps."""
        self._before = None

    def note_parameters(self, weights: Sequence[Array], leaves: Leaves, *, if_due: bool) -> None:
        """Notes values before a step; with `if_due`, only when a comparison is due."""
        due = self._extent.everything or (if_due and self._since >= _INTERVAL)
        if self._batches and due:
            self._since = 0
            self._before = [
                _rows(weights[i], _alone(leaves[i]), extent=self._extent)
                for i in self._batches[self._turn]
            ]


def _alone(leaf: LeafState) -> LeafState:
    """Returns the leaf without its name, so that similar leaves share programs."""
    spec = dataclasses.replace(leaf.spec, name="", transfer_dtype=None, groups=(0,))
    return leaf.replace(scores=None, spec=spec)


class _Rows(NamedTuple):
    """Samples of a parameter on each device."""

    selected: Array | None  # from selected channels or a resident leaf; at least one axis
    samples: Array | None  # from all channels; None for a resident leaf


@partial(jax.jit, static_argnames="extent")
def _rows(weight: Array, leaf: LeafState, *, extent: _Extent) -> _Rows:
    takes = [BLOCK, None if leaf.channels is None else CHANNELS]
    see = partial(_rows_of, extent=extent)
    return on_each_device(see, leaf.spec, takes, EACH_DEVICE)(weight, leaf.channels)


def _rows_of(shard: Shard, weight: Array, channels: Array | None, *, extent: _Extent) -> _Rows:
    selected: Array | None = weight
    if channels is not None:
        index = shard.to_local(channels)[..., : extent.channels]
        selected = shard.own(take(weight, index, shard.block)) if shard.part.k else None
    return _Rows(
        None if selected is None else jnp.atleast_1d(extent.sample(selected)),
        None if channels is None else extent.sample(weight),
    )


@partial(jax.jit, static_argnames="extent")
def _compare(
    weight: Array, rows: _Rows, leaf: LeafState, sent: StepScalars, *, extent: _Extent
) -> Array:
    # The scalars that the step sent are in host memory.
    on_device = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), sent)
    step = on_device.unpack()

    def count(shard, weight, rows, leaf, scalars, step, finite):
        adam_scalars, counts = AdamScalars(*scalars), finite > 0  # a skipped step changes nothing
        after = _rows_of(shard, weight, leaf.channels, extent=extent)
        wrong = jnp.zeros((), jnp.int32)
        if rows.selected is not None:
            assert after.selected is not None
            wrong += _count_selected(
                shard, rows.selected, after.selected, leaf, adam_scalars, counts, extent
            )
        if rows.samples is not None:
            assert after.samples is not None
            length = jnp.zeros((), jnp.float32)
            if extent.schedule.provisional_share is not None:
                length = extent.schedule.provisional_step(step, adam_scalars.learning_rate, counts)
            deferred = ~contains(shard.to_local(leaf.channels), shard.block.n)
            deferred = jnp.broadcast_to(broadcast_channels(deferred, shard.block), weight.shape)
            stray = _strays(rows.samples, after.samples, length) & extent.sample(deferred)
            wrong += jnp.sum(stray, dtype=jnp.int32)
        return shard.sum_everywhere(wrong)

    places = places_of(leaf.spec).replace(scores=None)
    takes = [BLOCK, EACH_DEVICE, places, *[REPLICATED] * 3]
    counted = on_each_device(count, leaf.spec, takes, REPLICATED)
    scalars = jnp.stack(step.adam[leaf.spec.rate])
    return counted(weight, rows, leaf, scalars, step.step, step.finite)


def _strays(before: Array, after: Array, length: Array) -> Array:
    """Returns a mask of values that neither stayed nor moved by a provisional step, up or down."""
    old, new = before.astype(jnp.float32), after.astype(jnp.float32)
    slack = _PARAMETER_TOLERANCE * (jnp.abs(old) + jnp.abs(new) + length)
    moved = [old + provisional_change(before, step) for step in (length, -length)]
    near = [jnp.abs(new - x) <= slack for x in (old, *moved)]
    return ~(near[0] | near[1] | near[2]) & ~jnp.isnan(new)


def _count_selected(
    shard: Shard,
    before: Array,
    after: Array,
    leaf: LeafState,
    adam_scalars: AdamScalars,
    counts: Array,
    extent: _Extent,
) -> Array:
    """Counts values in selected channels or a resident leaf that do not match the step."""
    spec = shard.part

    def sampled(x: Array) -> Array:
        """Returns the entries of `x` that match the selected values of `_rows_of`."""
        if spec.axis is not None:
            limit = min(extent.channels or spec.k, spec.k)
            x = jax.lax.slice_in_dim(x, 0, limit, axis=spec.axis)
        return jnp.atleast_1d(extent.sample(x)).astype(jnp.float32)

    old, new = before.astype(jnp.float32), after.astype(jnp.float32)
    if leaf.master is not None:
        # Both neighbours are accepted, because a device compiler may omit a rounding.
        kind = jnp.finfo(spec.dtype)
        expected = sampled(leaf.master)
        slack = float(kind.eps) / 2 * jnp.abs(expected) + float(kind.smallest_subnormal)
    else:
        steps = jnp.maximum(leaf.steps, 1)
        steps = steps if spec.resident else broadcast_channels(steps, spec)
        steps = sampled(jnp.broadcast_to(steps, leaf.mu.shape)).astype(jnp.int32)
        change = change_of(
            old, sampled(leaf.mu), sampled(leaf.nu), steps, adam_scalars, decay=spec.decay
        )
        decay = jnp.abs(adam_scalars.learning_rate * adam_scalars.weight_decay * old)
        expected, slack = old + change, _STEP_TOLERANCE * (jnp.abs(change) + 2 * decay)
    slack = slack + _PARAMETER_TOLERANCE * (jnp.abs(old) + jnp.abs(new))
    expected = jnp.where(counts, expected, old)
    return jnp.sum(jnp.abs(new - expected) > slack, dtype=jnp.int32)
