"""Shows whether anything but zenflow has changed the parameters.

The host has the masters of deferred channels, so the next update undoes other changes of these
parameters. Before the first step the parameters are right, and the masters follow them.

Subnormal numbers and both zeros count as equal: adding a zero may turn one into another.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from zenflow_jax._device.channels import broadcast_channels, contains
from zenflow_jax._device.shards import REPLICATED, Here, Layout, on_each_device
from zenflow_jax._device.state import LeafState
from zenflow_jax._plan.leaf import LeafSpec


def checksums(weights: Sequence[Array], leaves: Sequence[LeafState]) -> list[Array]:
    """A uint32 checksum of the deferred channels of each offloaded leaf.

    Every bit takes part. All devices have the same one, and the same values give it in any run.
    """
    # A leaf at a time: leaves that are alike share a program.
    return [
        _checksum(weight, leaf.channels, spec=_bare(leaf.spec))
        for weight, leaf in zip(weights, leaves, strict=True)
    ]


def differing(ours: Sequence[Array], theirs: Sequence[Array]) -> list[int]:
    """The indices at which checksums differ; waits for the checksums."""
    pairs = zip(jax.device_get(list(ours)), jax.device_get(list(theirs)), strict=True)
    return [i for i, (x, y) in enumerate(pairs) if x != y]


def samples(weights: Sequence[Array], specs: Sequence[LeafSpec]) -> list[Array]:
    """A few hundred numbers from all over each leaf, on each device."""
    return [_sample(w, spec=_bare(spec)) for w, spec in zip(weights, specs, strict=True)]


def abstract_samples(weight: Any, spec: LeafSpec) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of what `samples` gives for a parameter."""
    made = jax.eval_shape(partial(_sample, spec=_bare(spec)), weight)
    return of_each_device(made, weight.sharding, spec)


def of_each_device(made: Any, beside: Any, spec: LeafSpec) -> jax.ShapeDtypeStruct:
    """Shape and dtype of `made`, placed as what differs on every device of a leaf's parameter.

    Args:
        made: Has a shape and a dtype.
        beside: The parameter's sharding.
        spec: The leaf.
    """
    if isinstance(beside, NamedSharding):
        beside = NamedSharding(beside.mesh, Layout(spec).each_device)
    return jax.ShapeDtypeStruct(made.shape, made.dtype, sharding=beside)


def _bare(spec: LeafSpec) -> LeafSpec:
    """The spec without what the programs here do not ask for."""
    return dataclasses.replace(spec.anonymous, k=0, transfer_dtype=None)


def sample_of(block: Array) -> Array:
    """Some values of one device's block of a leaf, always from the same places."""
    # Of a stack all layers, or 32 to 63 of many; of a matrix about eight rows and columns.
    most = [32] * (block.ndim - 2) + [8, 8][max(2 - block.ndim, 0) :]
    strides = [max(size // m, 1) for size, m in zip(block.shape, most, strict=True)]
    return block[tuple(slice(stride // 2, None, stride) for stride in strides)]


def differ(x: Array, y: Array) -> Array:
    """Bool: where two arrays of a leaf's dtype hold different numbers."""
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
    # An odd factor loses no bit. Each place has a different one, so that swapped values show.
    factor, stride = jnp.ones((), jnp.uint32), 2
    for axis in reversed(range(weight.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, weight.shape, axis)
        factor = factor + index * np.uint32(stride % 2**32)
        stride *= weight.shape[axis]
    deferred = broadcast_channels(~contains(here.to_local(channels), spec.n), spec)
    total = jnp.sum(jnp.where(deferred, bits * factor, jnp.uint32(0)))
    return here.sum_everywhere(total * (2 * here.number_of_device() + 1))
