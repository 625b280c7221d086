"""Device programs that the engine runs between steps: merge, choose, enter.

One program each for all leaves, so that a boundary costs a few dispatches however many leaves
there are.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from zenflow_jax._channels import LeafSpec, along, positions, spread, take, top_channels

Arrays = tuple[Array, ...]
Specs = tuple[LeafSpec, ...]


# The uploads are donated, never the caller's parameters: those may be in use elsewhere. Either way
# parameters and uploads are there once each, and the result takes the place of one.
@partial(jax.jit, static_argnames="specs", donate_argnames="uploads")
def merge(weights: Arrays, uploads: Arrays, masks: Arrays, *, specs: Specs) -> Arrays:
    """The parameters, with the uploads where their mask `(*stack, n)` is True."""
    return tuple(
        jnp.where(along(mask, spec), new, old)
        for old, new, mask, spec in zip(weights, uploads, masks, specs, strict=True)
    )


@partial(jax.jit, static_argnames="specs")
def choose(
    weights: Arrays,
    scores: Arrays,
    channels: Arrays,
    masters: tuple[Array | None, ...],
    *,
    specs: Specs,
) -> tuple[Arrays, Arrays]:
    """The channels to select from now on, and the masters of those selected until now."""
    chosen = tuple(top_channels(s, spec.k) for s, spec in zip(scores, specs, strict=True))
    current = tuple(
        take(weight, index, spec) if master is None else master
        for weight, index, master, spec in zip(weights, channels, masters, specs, strict=True)
    )
    return chosen, current


@partial(jax.jit, static_argnames="specs")
def enter(weights: Arrays, masters: Arrays, channels: Arrays, *, specs: Specs) -> Arrays:
    """The parameters, with the masters' casts on the selected channels."""

    def one(weight: Array, master: Array, channels: Array, spec: LeafSpec) -> Array:
        place = positions(channels, spec.n)
        new = spread(master.astype(spec.dtype), place, spec)
        return jnp.where(along(place >= 0, spec), new, weight)

    return tuple(one(*args) for args in zip(weights, masters, channels, specs, strict=True))
