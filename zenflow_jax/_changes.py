"""Whether something else than zenflow has changed the parameters.

The host has the masters of deferred channels, so what else happens to those parameters is undone by
the next update. Before the first step the parameters are right and the masters follow them.

Tiny numbers and both zeros count as equal: adding a zero may make one of the other.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from zenflow_jax._channels import LeafSpec, along, contains
from zenflow_jax._shards import SAME, Here, Layout, on_each_device
from zenflow_jax._state import LeafState, some


class Doubts:
    """How much of some leaves' samples had changed, as device programs have found; read late.

    The counts are the same on all processes, and so is the call that raises. For one thread.
    """

    def __init__(self) -> None:
        #: What is wrong, in words, once it has been read; empty before.
        self.known = ""
        self._unread: deque[tuple[int, list[str], Array]] = deque()

    def add(self, step: int, names: Sequence[str], counts: Array) -> None:
        """Has counts, int32 `(leaves,)`, of the parameters after a step."""
        self._unread.append((step, list(names), counts))

    def check(self, until: int) -> None:
        """Reads the counts of the steps until that one, waiting for them.

        Raises:
            RuntimeError: If any of them, or of those that were read before, is not zero.
        """
        while not self.known and self._unread and self._unread[0][0] <= until:
            step, names, counts = self._unread.popleft()
            found = np.asarray(counts.addressable_data(0))
            changed = [name for name, count in zip(names, found, strict=True) if count]
            if changed:
                self.known = _words(step, changed)
        if self.known:
            raise RuntimeError(self.known)


def _words(step: int, names: Sequence[str]) -> str:
    return (
        f"expected parameters that nothing but zenflow changes, got other values of {some(names)} "
        f"after step {step}. On deferred channels its next update undoes such changes, and with "
        "them the run is not what its settings say. Give each step the parameters that the last "
        "`exchange` or `flush` returned, and apply updates by `optax.apply_updates`, as rounded to "
        "a leaf's dtype they are others. Let zenflow be the last of its chain: what "
        "acts on gradients belongs in front, a rate that something else decides "
        "(`optax.contrib.reduce_on_plateau`) into `learning_rate` by `optax.inject_hyperparams`, "
        "what is not to be trained out of it by `optax.partition`; keep averages of the weights "
        "(`optax.ema`, `optax.lookahead`) outside. For weights that are clipped, loaded or reset "
        "in mid-run call `flush`, change them, and go on with a new `tx.init(params)` and a new "
        "engine. This engine takes no more steps."
    )


def checksums(weights: Sequence[Array], leaves: Sequence[LeafState]) -> list[Array]:
    """Of each leaf that travels a number that tells what its deferred channels are, uint32.

    Every bit of them takes part. The same on all devices, and for the same values in any run.
    """
    # A leaf at a time: leaves that are alike share a program.
    return [
        _checksum(weight, leaf.channels, spec=_bare(leaf.spec))
        for weight, leaf in zip(weights, leaves, strict=True)
    ]


def differing(ours: Sequence[Array], theirs: Sequence[Array]) -> list[int]:
    """The places at which checksums differ; waits for them."""
    pairs = zip(jax.device_get(list(ours)), jax.device_get(list(theirs)), strict=True)
    return [i for i, (x, y) in enumerate(pairs) if x != y]


def samples(weights: Sequence[Array], specs: Sequence[LeafSpec]) -> list[Array]:
    """Of each leaf a few hundred numbers on each device, from all over it."""
    return [_sample(w, spec=_bare(spec)) for w, spec in zip(weights, specs, strict=True)]


def _bare(spec: LeafSpec) -> LeafSpec:
    """With nothing in it that the programs here do not ask for."""
    return dataclasses.replace(spec.anonymous, k=0, transfer_dtype=None)


def sample_of(block: Array) -> Array:
    """Some of one device's block of a leaf, always the same places."""
    # All layers of a stack; of a matrix about eight rows and columns.
    most = [32] * (block.ndim - 2) + [8, 8][max(2 - block.ndim, 0) :]
    strides = [max(size // m, 1) for size, m in zip(block.shape, most, strict=True)]
    return block[tuple(slice(stride // 2, None, stride) for stride in strides)]


def differ(x: Array, y: Array) -> Array:
    """Bool: where two arrays of a leaf's dtype are different numbers."""
    tiny = jnp.finfo(x.dtype).tiny
    none = (jnp.abs(x) < tiny) & (jnp.abs(y) < tiny)
    return (x != y) & ~none & ~(jnp.isnan(x) & jnp.isnan(y))


@partial(jax.jit, static_argnames="spec")
def _sample(weight: Array, *, spec: LeafSpec) -> Array:
    layout = Layout(spec)
    take = on_each_device(lambda _, x: sample_of(x), spec, [layout.block], layout.each_device)
    return take(weight)


@partial(jax.jit, static_argnames="spec")
def _checksum(weight: Array, channels: Array, *, spec: LeafSpec) -> Array:
    layout = Layout(spec)
    return on_each_device(_sum_bits, spec, [layout.block, layout.channels], SAME)(weight, channels)


def _sum_bits(here: Here, weight: Array, channels: Array) -> Array:
    spec = here.block
    small = jnp.abs(weight) < jnp.finfo(weight.dtype).tiny
    kind = np.dtype(f"uint{8 * weight.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(weight, kind).astype(jnp.uint32)
    bits = jnp.where(small, jnp.uint32(0), bits)
    # Odd, so that no bit is lost, and another for each place, so that no exchange goes unseen.
    factor, stride = jnp.ones((), jnp.uint32), 2
    for axis in reversed(range(weight.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, weight.shape, axis)
        factor = factor + index * np.uint32(stride % 2**32)
        stride *= weight.shape[axis]
    deferred = along(~contains(here.index(channels), spec.n), spec)
    total = jnp.sum(jnp.where(deferred, bits * factor, jnp.uint32(0)))
    return here.sum_everywhere(total * (2 * here.number_of_device() + 1))
