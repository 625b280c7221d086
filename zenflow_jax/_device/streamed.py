"""Layers whose gradients are read inside the backward scan: what stands for such a leaf.

A `Streamed` has the weights of all layers and *probes* beside them, zeros in the shapes of what a
step takes from a gradient. A layer's weights leave it through a function with a derivative of its
own, whose backward pass makes the probes' gradients from the layer's gradient, right there. So what
`jax.grad` stacks are these, and the weights' own gradient is never there as a whole.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zenflow_jax._device.channels import broadcast_channels, gather_to_channels, positions
from zenflow_jax._device.host_slices import check_slices
from zenflow_jax._device.shards import Layout, Shard, on_each_device
from zenflow_jax._device.state import LeafState
from zenflow_jax._device.step import GradientParts, split_gradient
from zenflow_jax._spec.leaf import LeafSpec
from zenflow_jax._spec.rules import SendGradients


class Probes(NamedTuple):
    """The gradient of a `Streamed`, of one layer or stacked."""

    passed: Any  # float32 (); `_ONCE` for each time that the layer's weights were used
    norms: Any  # roots of `squares`: a mean of several gradients has others
    squares: Any  # the rest as in `GradientParts`
    gradient: Any
    signs: Any  # packed, `_as_floats`: a gradient must be a float
    mail: Any


#: A norm is the root of its squares to this, whatever compilers do. Means of gradients are further
#: off in some channel.
_OF_NORM = 1e-4
#: Gradients so small are not looked at: their squares may be zero.
_SMALL = 1e-18

#: So large that a norm of gradients in front of zenflow, which would not be theirs, is infinite.
_ONCE = 1e30


class _Sending(NamedTuple):
    """What the backward pass makes of a layer's gradient."""

    spec: LeafSpec  # of one layer
    signs: bool  # whether its signs are needed
    rank: int  # of its mail


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("weights", "channels", "masters", "probes"),
    meta_fields=("sending",),
)
@dataclasses.dataclass(frozen=True)
class Streamed:
    """Stacked layers for `scan_layers`, or their gradient, or one layer inside of it.

    It is no array: whatever reads it otherwise fails.
    """

    weights: Any
    channels: Any  # float32 copy of the selected ones: jax.grad wants floats
    masters: Any  # of selected channels, which weights in host memory lack; None on the device
    probes: Probes
    sending: _Sending

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weights.shape

    @property
    def dtype(self) -> Any:
        return self.weights.dtype

    def __jax_array__(self) -> Any:
        """Refuses to be read as an array, which all functions of jax try."""
        raise TypeError(
            "expected `streaming.scan_layers` over the layers that `streaming.stream` returned, "
            f"got something else that reads the {self.dtype} {self.shape} of them, such as "
            "`jax.lax.scan`, linen's `nn.scan` or an operation in front of the scan."
        )

    def __getitem__(self, _: Any) -> Any:
        """As above: nnx reads its variables by an index."""
        return self.__jax_array__()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unmoved:
    """The update of a parameter in host memory: added to it, it gives the parameter itself.

    It has a key in place of numbers. Arithmetic takes none, so what would change the update raises.
    """

    key: Any = dataclasses.field(default_factory=lambda: jax.random.key(0))

    def __radd__(self, parameter: Any) -> Any:
        return parameter


def is_streamed(x: Any) -> bool:
    return isinstance(x, Streamed)


def streamed(weights: jax.Array, leaf: LeafState, rank: int, *, signs: bool) -> Streamed:
    """A leaf of stacked layers as `scan_layers` takes it; `rank` is that of mail.

    Nothing reads the values of the probes, so the compiler leaves them out.
    """
    spec, weights = layer_spec(leaf.spec), _with_no_derivative(weights)
    masters = leaf.master if spec.hosted else None
    sending = _Sending(spec, signs and not spec.hosted, rank - 1)
    layer = jax.ShapeDtypeStruct(spec.shape, spec.dtype)
    assert leaf.channels is not None
    made = jax.eval_shape(partial(_probes, sending), leaf.channels[0], layer)
    zeros = jax.tree.map(lambda x: jnp.zeros((len(weights), *x.shape), x.dtype), made)
    zeros = zeros._replace(mail=jax.device_put(zeros.mail, jax.memory.Space.Host))
    return Streamed(weights, leaf.channels.astype(jnp.float32), masters, zeros, sending)


@jax.custom_jvp
def _with_no_derivative(weights: Any) -> Any:
    """Weights by which, through `stream`, the derivative would be zero."""
    return check_slices(weights)


@_with_no_derivative.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise ValueError(
        "expected a derivative with respect to what `streaming.stream` returns, as in "
        "`jax.grad(loss)(streaming.stream(params, opt_state))`, got one with respect to what it "
        "was given: call it outside of the function that you differentiate."
    )


def check_layers_whole(spec: LeafSpec) -> None:
    """Refuses leaves that are not in one piece along their first axis, or on Explicit axes."""
    place = spec.placement
    if place is not None and (place.block[0] or place.explicit):
        how = (
            "Explicit mesh axes" if place.explicit else f"its layers divided over {place.block[0]}"
        )
        raise ValueError(
            f"expected streamed layers whole along their first axis, on Auto mesh axes, got {how} "
            f"at {spec.name}."
        )


def layer_spec(spec: LeafSpec) -> LeafSpec:
    """The spec of one entry of a leaf's first stack axis, as a leaf of its own."""
    assert spec.axis is not None
    place = spec.placement
    if place is not None:
        place = dataclasses.replace(place, block=place.block[1:], part=place.part[1:])
    return dataclasses.replace(
        spec.anonymous, shape=spec.shape[1:], axis=spec.axis - 1, placement=place
    )


def layer_weights(layer: Streamed) -> jax.Array:
    """The weights of one layer, whose gradient goes to the probes."""
    spec, weights = layer.sending.spec, layer.weights
    if (weights.shape, weights.dtype, layer.channels.dtype) != (spec.shape, spec.dtype, np.float32):
        raise ValueError(
            f"expected layers of {spec.dtype} {spec.shape} as `streaming.stream` returns them, got "
            f"{weights.dtype} {weights.shape}, which something has cast or reshaped before the "
            "scan. Do that with the arrays that the scan's body gets."
        )
    if layer.masters is not None:
        lay = Layout(spec)
        put = on_each_device(_put_selected, spec, [lay.block, lay.channels, lay.part], lay.block)
        weights = put(weights, layer.channels.astype(jnp.int32), layer.masters)
    return _passed(layer.sending, weights, layer.channels, layer.probes)


def _put_selected(shard: Shard, weights: Any, channels: Any, masters: Any) -> Any:
    spec = shard.block
    place = positions(shard.to_local(channels), spec.n)
    selected = gather_to_channels(masters.astype(spec.dtype), place, spec)
    return jnp.where(broadcast_channels(place >= 0, spec), selected, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _passed(sending: _Sending, weights: Any, channels: Any, probes: Any) -> Any:
    return weights


def _forward(sending: _Sending, weights: Any, channels: Any, probes: Any) -> Any:
    return weights, channels


def _backward(sending: _Sending, channels: Any, g: Any) -> Any:
    # Channels come back, so that the step sees whether they are still the state's.
    return None, channels, _probes(sending, channels, g)


_passed.defvjp(_forward, _backward)


def _probes(sending: _Sending, channels: Any, g: Any) -> Probes:
    seen = split_gradient(
        g,
        sending.spec,
        channels.astype(jnp.int32),
        SendGradients.DURING_STEP,
        sending.rank,
        signs=sending.signs,
        packing=jnp.uint32,
    )
    seen = seen._replace(signs=jax.tree.map(_as_floats, seen.signs))
    return Probes(jnp.full((), _ONCE), jnp.sqrt(seen.squares), *seen)


#: The bits of the smallest normal float32. The next 3**19 are all normal and finite, so zeros may
#: be added to them. With negative ones there is room for 3**20, but then XLA needs more memory
#: where all are unpacked (benchmarks/LOG.md).
_SMALLEST = np.uint32(1 << 23)


def _as_floats(packed: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(packed + _SMALLEST, jnp.float32)


def _as_packed(floats: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(floats, jnp.uint32) - _SMALLEST


def parts_of(g: Streamed) -> GradientParts:
    """What a step takes from the gradient of a streamed leaf."""
    probes = g.probes
    signs = jax.tree.map(_as_packed, probes.signs)
    return GradientParts(probes.squares, probes.gradient, signs, probes.mail)


def misused(gradients: Sequence[Any], leaves: Sequence[LeafState]) -> jax.Array:
    """Whether some layer was not used exactly once, or something has changed its gradient.

    Its mail is then not the gradient.
    """
    pairs = [(g, leaf) for g, leaf in zip(gradients, leaves, strict=True) if is_streamed(g)]
    return jnp.any(jnp.stack([jnp.zeros((), bool), *(_misused(*pair) for pair in pairs)]))


def _misused(g: Streamed, leaf: LeafState) -> jax.Array:
    norms, channels = g.probes.norms, leaf.channels
    assert channels is not None
    apart = jnp.abs(norms - jnp.sqrt(g.probes.squares)) > _OF_NORM * norms + _SMALL
    wrong = [
        g.probes.passed != np.float32(_ONCE),
        apart,  # a NaN is not: the step is skipped
        g.channels != channels.astype(jnp.float32),  # of other weights, or of another state
    ]
    if not leaf.spec.hosted:  # there nothing else can read them
        wrong.append(g.weights != 0)  # read elsewhere; else zeros, which compilers know
    return jnp.any(jnp.stack([jnp.any(x) for x in wrong]))
