"""Whether something else than zenflow has changed the parameters.

The host has the masters of deferred channels, so what else happens to those parameters is undone by
the next update. Before the first step the parameters are right and the masters follow them.

Tiny numbers and both zeros count as equal: adding a zero may make one of the other.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from zenflow_jax._device.channels import broadcast_channels, contains
from zenflow_jax._device.shards import REPLICATED, Here, Layout, on_each_device
from zenflow_jax._device.state import LeafState
from zenflow_jax._plan.leaf import LeafSpec


def checksums(weights: Sequence[Array], leaves: Sequence[LeafState]) -> list[Array]:
    """Of each offloaded leaf a number that tells what its deferred channels are, uint32.

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
    return on_each_device(_sum_bits, spec, [layout.block, layout.channels], REPLICATED)(
        weight, channels
    )


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
    deferred = broadcast_channels(~contains(here.to_local(channels), spec.n), spec)
    total = jnp.sum(jnp.where(deferred, bits * factor, jnp.uint32(0)))
    return here.sum_everywhere(total * (2 * here.number_of_device() + 1))
