"""Stands in for layers whose gradients are read inside the backward scan.

A `Streamed` contains the weights of all layers, and *probes*: zeros in the shapes of
`GradientParts`. A function with a custom derivative returns a layer's weights; its backward pass
immediately turns the layer's gradient into the probes' gradients. So `jax.grad` stacks only the
probes' gradients, and the weights' whole gradient never exists.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from zenflow_jax._device.gpu_faults import check_slices
from zenflow_jax._device.state import LeafState, Leaves
from zenflow_jax._device.step import GradientParts, split_gradient
from zenflow_jax._spec.checks import SendGradients
from zenflow_jax._spec.leaf import LeafSpec
from zenflow_jax._spec.mesh import explicit_axes


class Probes(NamedTuple):
    """The gradient of a `Streamed`, of one layer or stacked."""

    passed: Any  # float32 (); `_ONCE` for each use of the layer's weights
    norms: Any  # square roots of `parts.squares`: a mean of gradients breaks this relation
    parts: GradientParts  # with signs from `_as_floats`, because gradients must be floats


#: The relative tolerance between a norm and the root of the squares, for any compiler. Means of
#: gradients exceed it in at least one channel.
_NORM_TOLERANCE = 1e-4
#: Smaller gradients are not checked: their squares may be zero.
_SMALL = 1e-18

#: Large enough to make a gradient norm before zenflow infinite, because that norm would be wrong.
_ONCE = 1e30


class _Sending(NamedTuple):
    """Settings for the backward pass of a layer."""

    spec: LeafSpec  # of one layer
    signs: bool  # whether its signs are needed
    rank: int  # of its mail


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Streamed:
    """Stacked layers for `scan_layers`, or their gradient, or one layer inside the scan.

    A `Streamed` is not an array, so any other read fails, with an error of jax or Python.
    """

    weights: PyTree
    channels: Any  # selected channels, as float32 because jax.grad needs floats
    probes: Probes
    sending: _Sending = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weights.shape

    @property
    def dtype(self) -> Any:
        return self.weights.dtype


def is_streamed(x: object) -> TypeGuard[Streamed]:
    return isinstance(x, Streamed)


def streamed(weights: jax.Array, leaf: LeafState, rank: int, *, signs: bool) -> Streamed:
    """Wraps a leaf of stacked layers for `scan_layers`; `rank` is mail's rank.

    The probes' values are never read, so the compiler drops them.
    """
    spec, weights = layer_spec(leaf.spec), _with_no_derivative(weights)
    sending = _Sending(spec, signs, rank - 1)
    layer = jax.ShapeDtypeStruct(spec.shape, spec.dtype)
    assert leaf.channels is not None
    made = jax.eval_shape(partial(_probes, sending), leaf.channels[0], layer)
    zeros = jax.tree.map(lambda x: jnp.zeros((len(weights), *x.shape), x.dtype), made)
    mail = jax.device_put(zeros.parts.mail, jax.memory.Space.Host)
    zeros = zeros._replace(parts=zeros.parts._replace(mail=mail))
    return Streamed(weights, leaf.channels.astype(jnp.float32), zeros, sending)


@jax.custom_jvp
def _with_no_derivative(weights: PyTree) -> Any:
    """Returns weights that reject a derivative through `stream`, because it would be zero."""
    return check_slices(weights)


@_with_no_derivative.defjvp
def _refuse(primals: PyTree, tangents: PyTree) -> Any:
    raise ValueError(
        "`streaming.stream` is called inside the function that you differentiate. Call it outside: "
        "`jax.grad(loss)(streaming.stream(params, opt_state))`."
    )


def check_layers_whole(spec: LeafSpec, weights: PyTree) -> None:
    """Rejects leaves that a mesh divides along their first axis, or that have Explicit axes."""
    place = spec.placement
    if place is None:
        return
    explicit, divided = explicit_axes(place.running_mesh([weights])), place.cuts[0]
    if explicit or divided:
        how = "has Explicit mesh axes" if explicit else f"has its layers divided over {divided}"
        raise ValueError(
            f"{spec.name} {how}. Streamed layers must be whole, on Auto mesh axes. Leave the leaf "
            "out with `streaming.stream(where=...)`."
        )


def layer_spec(spec: LeafSpec) -> LeafSpec:
    """Returns the spec for one entry on a leaf's first stack axis, as a separate leaf."""
    assert spec.axis is not None
    place = spec.placement and spec.placement.map(lambda axes: axes[1:])
    return dataclasses.replace(
        spec.anonymous, shape=spec.shape[1:], axis=spec.axis - 1, placement=place
    )


def layer_weights(layer: Streamed) -> jax.Array:
    """Returns one layer's weights, whose gradient goes to the probes."""
    spec, weights = layer.sending.spec, layer.weights
    if (weights.shape, weights.dtype, layer.channels.dtype) != (spec.shape, spec.dtype, np.float32):
        raise ValueError(
            f"A streamed layer is {weights.dtype} {weights.shape}, not {spec.dtype} {spec.shape}. "
            "Cast or reshape it in the scan's body, not before the scan."
        )
    return _passed(layer.sending, weights, layer.channels, layer.probes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _passed(sending: _Sending, weights: PyTree, channels: jax.Array, probes: PyTree) -> Any:
    return weights


def _forward(sending: _Sending, weights: PyTree, channels: jax.Array, probes: PyTree) -> Any:
    return weights, channels


def _backward(sending: _Sending, channels: jax.Array, g: jax.Array) -> Any:
    # Channels are returned so that the step can compare them with the state's.
    return None, channels, _probes(sending, channels, g)


_passed.defvjp(_forward, _backward)


def _probes(sending: _Sending, channels: jax.Array, g: jax.Array) -> Probes:
    seen = split_gradient(
        g,
        channels.astype(jnp.int32),
        spec=sending.spec,
        sending=SendGradients.DURING_STEP,
        rank=sending.rank,
        signs=sending.signs,
        packing=jnp.uint32,
    )
    seen = seen._replace(signs=jax.tree.map(_as_floats, seen.signs))
    return Probes(jnp.full((), _ONCE), jnp.sqrt(seen.squares), seen)


#: The bits of the smallest normal float32. The next 3**19 are all normal and finite, so adding
#: zeros is safe. With negative numbers there would be 3**20, but XLA needs more memory to unpack
#: them (benchmarks/LOG.md).
_SMALLEST = np.uint32(1 << 23)


def _as_floats(packed: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(packed + _SMALLEST, jnp.float32)


def _as_packed(floats: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(floats, jnp.uint32) - _SMALLEST


def gradient_parts(g: Streamed) -> GradientParts:
    """Returns the gradient parts of a streamed leaf."""
    return g.probes.parts._replace(signs=jax.tree.map(_as_packed, g.probes.parts.signs))


def misused(gradients: Sequence[object], leaves: Leaves) -> jax.Array:
    """Returns whether any layer was not used exactly once, or its gradient was changed.

    The layer's mail then differs from its gradient.
    """
    pairs = [(g, leaf) for g, leaf in zip(gradients, leaves, strict=True) if is_streamed(g)]
    return jnp.any(jnp.stack([jnp.zeros((), bool), *(_misused(*pair) for pair in pairs)]))


def _misused(g: Streamed, leaf: LeafState) -> jax.Array:
    # Zeros in place of a gradient that jax did not compute are in device memory.
    probes, channels = g.probes, leaf.channels
    if jax.typeof(probes.parts.mail).memory_space != jax.memory.Space.Host:
        raise ValueError(
            f"The loss has no gradient for the streamed layers {leaf.spec.name}. Leave this leaf "
            "out with `streaming.stream(where=...)`."
        )
    assert channels is not None
    apart = jnp.abs(probes.norms - jnp.sqrt(probes.parts.squares))
    wrong = [
        probes.passed != np.float32(_ONCE),
        # False for NaN, for which the step is skipped.
        apart > _NORM_TOLERANCE * probes.norms + _SMALL,
        g.channels != channels.astype(jnp.float32),  # different weights, or a different state
        g.weights != 0,  # nonzero if read outside the scan, else constant zeros
    ]
    return jnp.any(jnp.stack([jnp.any(x) for x in wrong]))
