"""Adam's moments in 8 bits for any optax optimizer, without an engine.

Between updates, moments are codes and scales: the host's format (`_host/moments.py`, which explains
it), computed in jax. Buckets of 32 lie along the last axis, so codes and scales have their moment's
axes, and a parameter's sharding fits them.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Integer

from zenflow_jax._host.arrays import BUCKET
from zenflow_jax._host.moments import BEND, LEAST, PER_FIRST, PER_SECOND, TOP_FIRST, TOP_SECOND

#: Some other states with `mu` and `nu` would fail: centred RMSProp subtracts `mu**2` from its `nu`,
#: which codes would make negative.
_STATES = (optax.ScaleByAdamState, optax.ScaleByLionState)
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


class Codes(NamedTuple):
    """One moment of one leaf between updates."""

    codes: Integer[Array, "*lead n"]  # int8 for a first moment, uint8 for a second
    scales: Float[Array, "*lead buckets"]  # bfloat16 for a first moment, float32 for a second


def compact(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that keeps Adam's moments in 8 bits between updates.

    A moment takes 1.0625 or 1.125 bytes for each parameter in place of 4. Each update decodes the
    moments to float32, calls `optimizer`, and rounds the new moments; parameters and updates are
    not rounded. Limits are those of `host_state="compact"`: a parameter hardly moves if its
    gradients are 785 times smaller than a neighbour's.

    Compacted are `mu` and `nu` with two axes or more in each `optax.ScaleByAdamState` (of `adamw`,
    `nadamw`, `lamb`, `adamax`, `yogi`, `radam`, and Muon for leaves that it leaves to Adam) and
    `optax.ScaleByLionState`. `chain`, `masked`, `partition`, `inject_hyperparams`, `MultiSteps` and
    other wrappers may be inside or around `compact`. All else stays: vectors' moments, Muon's
    momentum, averages, sums of gradients.

    With bfloat16 parameters, the moments that the optimizer sees are float32, and so are its
    updates. `init` makes the optimizer's own state first; under `jax.jit`, XLA makes only codes.

    On a mesh, put a parameter's last axis on devices only where each gets whole buckets: its size
    is a multiple of 32 times their number. Otherwise XLA gathers the moments at every update.

    Args:
        optimizer: Any optax optimizer whose state contains such moments.

    Returns:
        An optimizer. Its state is `optimizer`'s, with `codes` and `scales` in place of moments.

    Raises:
        ValueError: By `init`, if no such state is found.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, zenflow_jax
        >>> tx = zenflow_jax.compact(optax.adamw(1e-3))
        >>> state = jax.jit(tx.init)({"w": jnp.ones((64, 96))})
        >>> mu = optax.tree.get(state, "mu")["w"]
        >>> mu.codes.dtype, mu.scales.shape
        (dtype('int8'), (64, 3))
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Any:
        state = optimizer.init(params)
        if not any(isinstance(x, _STATES) for x in jax.tree.leaves(state, is_leaf=_has_moments)):
            raise ValueError(
                "`compact` found no state with Adam's moments in the optimizer's state. Use the "
                f"optimizer without `compact`, or one with {_names()}."
            )
        # Otherwise XLA would compute the codes when it compiles, which takes minutes.
        return _encode_state(jax.tree.map(lax.optimization_barrier, state))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        state = jax.tree.map(lambda x: _decode(x) if _is_codes(x) else x, state, is_leaf=_is_codes)
        updates, state = optimizer.update(updates, state, params, **extra_args)
        return updates, _encode_state(state)

    return optax.GradientTransformationExtraArgs(init, update)


def _names() -> str:
    return ", ".join(f"`optax.{x.__name__}`" for x in _STATES)


def _has_moments(x: Any) -> bool:
    return isinstance(x, _STATES)


def _is_codes(x: Any) -> bool:
    return isinstance(x, Codes)


def _encode_state(state: Any) -> Any:
    def encode_leaf(x: Any, first: bool) -> Any:
        # Codes are the result of another `compact` inside. Complex and float64 numbers stay.
        fits = not _is_codes(x) and x.ndim > 1 and x.dtype in _DTYPES
        return _encode(x, first) if fits else x

    def encode_moments(x: Any) -> Any:
        if not _has_moments(x):
            return x
        fields = {name: getattr(x, name) for name in ("mu", "nu") if name in x._fields}
        return x._replace(
            **{
                name: jax.tree.map(partial(encode_leaf, first=name == "mu"), y, is_leaf=_is_codes)
                for name, y in fields.items()
            }
        )

    return jax.tree.map(encode_moments, state, is_leaf=_has_moments)


def _decode(x: Codes) -> Array:
    first = x.codes.dtype == jnp.int8
    codes, scales = _buckets(x.codes).astype(jnp.float32), x.scales.astype(jnp.float32)[..., None]
    shares = codes * (jnp.abs(codes) + 2 * BEND) * PER_FIRST if first else codes * PER_SECOND
    # The choice changes no number. Without it, XLA multiplies constant and scale first.
    numbers = jnp.where(codes == 0, 0, shares) * scales
    return _unbucketed(numbers if first else numbers * numbers, x.codes.shape)


def _encode(x: Array, first: bool) -> Codes:
    wide = _buckets(x.astype(jnp.float32))
    size = jnp.abs(wide) if first else jnp.sqrt(wide)
    scales = jnp.max(size, axis=-1, keepdims=True, initial=0)
    scales = jnp.where(scales < LEAST, 0, scales)  # a NaN stays
    if first:
        # Not a cast to bfloat16 and back, which XLA drops on GPUs (jax 0.10.2 to 0.12).
        scales = lax.reduce_precision(scales, 8, 7)
    top = TOP_FIRST if first else TOP_SECOND
    # The minimum changes no code. Without it, compilers round product and sum below only once.
    size = jnp.minimum(size * jnp.where(scales > 0, top / scales, 0), top)
    if first:
        codes = jnp.rint(jnp.copysign(jnp.sqrt(size + BEND * BEND) - BEND, wide)).astype(jnp.int8)
    else:
        codes = jnp.maximum(jnp.rint(size), (size > 0).astype(size.dtype)).astype(jnp.uint8)
    scales = scales.astype(jnp.bfloat16 if first else jnp.float32)
    return Codes(_unbucketed(codes, x.shape), scales[..., 0])


def _buckets(x: Array) -> Array:
    """Returns `(*lead, buckets, 32)`, with zeros after the last element."""
    *lead, n = x.shape
    x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, -n % BUCKET)])
    return x.reshape(*lead, -(-n // BUCKET), BUCKET)


def _unbucketed(x: Array, shape: tuple[int, ...]) -> Array:
    return x.reshape(*shape[:-1], -1)[..., : shape[-1]]
