"""Checks whether the updates that zenflow emits reach the parameters as they are.

A transformation behind `zenflow` in a chain sees no change of a deferred channel, so it acts on the
few selected ones alone. The state says what a step made of those: a low-precision leaf has a
master, and a float32 leaf has moments from which its change follows. Now and then some numbers of
some leaves are compared, other leaves each time.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from zenflow_jax._device.adamw import change_of
from zenflow_jax._device.channels import broadcast_channels, take
from zenflow_jax._device.rows import of_each_device
from zenflow_jax._device.samples import sample_of
from zenflow_jax._device.shards import REPLICATED, Here, Layout, on_each_device
from zenflow_jax._device.state import LeafState, leaf_layout
from zenflow_jax._device.step_scalars import StepScalars
from zenflow_jax._exchange.ahead import Ahead, abstract
from zenflow_jax._plan.leaf import LeafSpec
from zenflow_jax._plan.scalars import AdamScalars

#: Leaves that are compared together, and the least steps from one comparison to the next. Each leaf
#: costs the dispatch of two small programs.
LEAVES_PER_LOOK = 8
APART = 8
#: Channels that are compared in each stack entry.
_CHANNELS = 4
#: How far two programs may differ, relatively: in a step, whose `1 - b**n` may be off by a few
#: units in the last place of the power (with b2 = 0.99999 a hundredth), and in a float32 parameter.
#: A false alarm would end a run that is right; what acts behind `zenflow` changes steps by more.
_OF_STEP, _OF_PARAMETER = 0.05, 2.0**-20


class Emitted:
    """Compares what one engine's steps emitted with its parameters. For one calling thread.

    Args:
        specs: All leaves of the state.
        ahead: Compiles the programs.
    """

    def __init__(self, specs: Sequence[LeafSpec], ahead: Ahead):
        self._ahead = ahead
        moving = [i for i, s in enumerate(specs) if 0 not in s.shape and (s.resident or s.k)]
        gap = -(-len(moving) // LEAVES_PER_LOOK)
        looks = [moving[start::gap] for start in range(gap)]
        #: Of each look some leaves from all over the tree, always as many: what they have is
        #: stacked, and another number would be another program.
        self._looks = [(look + moving)[: len(looks[0])] for look in looks]
        self._turn = 0
        self._since = APART
        self._before: list[Array] | None = None

    def prepare(
        self, weights: Sequence[Array], leaves: Sequence[LeafState], step_scalars: StepScalars
    ) -> None:
        """Begins to compile what looks at these parameters and states, before the first step."""
        sent = jax.tree.map(abstract, step_scalars._replace(statistics=None))
        known = set()
        for i in (i for look in self._looks for i in look):
            leaf = jax.tree.map(abstract, _alone(leaves[i]))
            if leaf.spec in known:
                continue
            known.add(leaf.spec)
            weight = abstract(weights[i])
            made = jax.eval_shape(_rows, weight, leaf)
            rows = of_each_device(made, weight.sharding, leaf.spec)
            self._ahead.prepare(("rows", leaf.spec), _rows, weight, leaf)
            self._ahead.prepare(("compare", leaf.spec), _compare, weight, rows, leaf, sent)

    def compare(
        self, weights: Sequence[Array], leaves: Sequence[LeafState], step_scalars: StepScalars
    ) -> tuple[list[int], Array] | None:
        """After a step: some leaves, and how many numbers of each are not what the step made.

        None if `note_parameters` did not look at them before the step.
        """
        self._since += 1
        before, self._before = self._before, None
        if before is None:
            return None
        look = self._looks[self._turn]
        self._turn = (self._turn + 1) % len(self._looks)
        sent = step_scalars._replace(statistics=None)
        counts = []
        for i, rows in zip(look, before, strict=True):
            leaf = _alone(leaves[i])
            key = ("compare", leaf.spec)
            counts.append(self._ahead.call(key, _compare, weights[i], rows, leaf, sent))
        return look, jnp.stack(counts)

    def note_parameters(self, weights: Sequence[Array], leaves: Sequence[LeafState]) -> None:
        """Before a step, now and then: notes the values of some leaves."""
        if self._looks and self._since >= APART:
            self._since = 0
            look = self._looks[self._turn]
            alone = [_alone(leaves[i]) for i in look]
            self._before = [
                self._ahead.call(("rows", leaf.spec), _rows, weights[i], leaf)
                for i, leaf in zip(look, alone, strict=True)
            ]


def _alone(leaf: LeafState) -> LeafState:
    """The leaf without what distinguishes it from leaves that are alike."""
    spec = dataclasses.replace(leaf.spec, name="", transfer_dtype=None, groups=(0,))
    return dataclasses.replace(leaf, deferred=None, scores=None, spec=spec)


@jax.jit
def _rows(weight: Array, leaf: LeafState) -> Array:
    layout = Layout(leaf.spec)
    takes = [layout.block, None if leaf.channels is None else layout.channels]
    rows = on_each_device(_rows_here, leaf.spec, takes, layout.each_device)
    return rows(weight, leaf.channels)


def _rows_here(here: Here, weight: Array, channels: Array | None) -> Array:
    """Some selected values of a parameter; of a scalar, a vector of one."""
    if channels is not None:
        index = here.to_local(channels)[..., :_CHANNELS]
        weight = here.own(take(weight, index, here.block))
    return jnp.atleast_1d(sample_of(weight))


@jax.jit
def _compare(weight: Array, rows: Array, leaf: LeafState, sent: StepScalars) -> Array:
    # Scalars that left in the step are in host memory.
    here = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), sent)
    step = here.unpack()
    layout = Layout(leaf.spec)
    mine = dataclasses.replace(leaf_layout(leaf.spec, deferred=False), scores=None)
    count = on_each_device(
        _count,
        leaf.spec,
        [layout.block, layout.each_device, mine, REPLICATED, REPLICATED],
        REPLICATED,
    )
    return count(weight, rows, leaf, jnp.stack(step.adam), step.finite)


def _count(
    here: Here, weight: Array, rows: Array, leaf: LeafState, scalars: Array, finite: Array
) -> Array:
    spec = here.part

    def some(x: Array) -> Array:
        """The entries of `x`, one for each selected value, that `_rows_here` has, too."""
        if spec.axis is not None:
            x = jax.lax.slice_in_dim(x, 0, min(_CHANNELS, spec.k), axis=spec.axis)
        return jnp.atleast_1d(sample_of(x)).astype(jnp.float32)

    old = rows.astype(jnp.float32)
    new = _rows_here(here, weight, leaf.channels).astype(jnp.float32)
    if leaf.master is not None:
        # Either neighbour is right: a compiler for devices may round once less.
        kind = jnp.finfo(spec.dtype)
        expected = some(leaf.master)
        slack = float(kind.eps) / 2 * jnp.abs(expected) + float(kind.smallest_subnormal)
    else:
        steps = jnp.maximum(leaf.steps, 1)
        steps = steps if spec.resident else broadcast_channels(steps, spec)
        steps = some(jnp.broadcast_to(steps, leaf.mu.shape)).astype(jnp.int32)
        of_step = AdamScalars(*scalars)
        change = change_of(old, some(leaf.mu), some(leaf.nu), steps, of_step, decay=spec.decay)
        decay = jnp.abs(of_step.learning_rate * of_step.weight_decay * old)
        expected, slack = old + change, _OF_STEP * (jnp.abs(change) + 2 * decay)
    slack = slack + _OF_PARAMETER * (jnp.abs(old) + jnp.abs(new))
    wrong = (jnp.abs(new - expected) > slack) & (finite > 0)
    return here.sum_everywhere(jnp.sum(wrong, dtype=jnp.int32))
