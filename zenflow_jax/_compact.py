"""Adam's moments in 8 bits for any optax optimizer, without an engine.

Between updates, moments are codes and scales: the host's format (`_host/codes.py`, which explains
it), computed in jax. Buckets of 32 lie along the last axis, so codes and scales have their moment's
axes, and a parameter's sharding fits them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, PyTree

from zenflow_jax._host.codes import (
    BEND,
    BUCKET,
    LEAST,
    PER_FIRST,
    PER_SECOND,
    TOP_FIRST,
    TOP_SECOND,
)

#: Some other states with `mu` and `nu` would fail: centred RMSProp subtracts `mu**2` from its `nu`,
#: which codes would make negative.
_STATES = (optax.ScaleByAdamState, optax.ScaleByLionState)
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


class Codes(NamedTuple):
    """One moment of all parameters between updates; both trees are like the parameters'.

    Two trees, because flax nnx would not keep pairs in place of arrays.
    """

    codes: Any  # int8 for first moments, uint8 for second, `(*lead, n)`; or a moment that stays
    scales: Any  # bfloat16 for first moments, float32 for second, `(*lead, buckets)`; or a zero


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
        An optimizer. Its state is `optimizer`'s, with trees of codes and scales as `mu` and `nu`.

    Raises:
        ValueError: By `init`, if no such state is found.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, zenflow_jax
        >>> tx = zenflow_jax.compact(optax.adamw(1e-3))
        >>> state = jax.jit(tx.init)({"w": jnp.ones((64, 96))})
        >>> mu = optax.tree.get(state, "mu")
        >>> mu.codes["w"].dtype, mu.scales["w"].shape
        (dtype('int8'), (64, 3))
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> Any:
        state = optimizer.init(params)
        names = [f"`optax.{x.__name__}`" for x in _STATES]
        if not any(isinstance(x, _STATES) for x in jax.tree.leaves(state, is_leaf=_has_moments)):
            raise ValueError(
                "`compact` found no state with Adam's moments in the optimizer's state. Use the "
                f"optimizer without `compact`, or one with {' or '.join(names)}."
            )
        # Otherwise XLA would compute the codes when it compiles, which takes minutes.
        return _encode_state(jax.tree.map(lax.optimization_barrier, state))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> tuple[Any, Any]:
        state = jax.tree.map(
            lambda x: jax.tree.map(_decode, *x) if _is_codes(x) else x, state, is_leaf=_is_codes
        )
        updates, state = optimizer.update(updates, state, params, **extra_args)
        return updates, _encode_state(state)

    return optax.GradientTransformationExtraArgs(init, update)


def _has_moments(x: object) -> bool:
    return isinstance(x, _STATES)


def _is_codes(x: object) -> bool:
    return isinstance(x, Codes)


def _encode_state(state: PyTree) -> Any:
    def encode_tree(x: PyTree, first: bool) -> Any:
        if _is_codes(x):  # the result of another `compact` inside
            return x
        leaves, treedef = jax.tree.flatten(x)
        pairs = [_encode(leaf, first) for leaf in leaves]
        return Codes(*(treedef.unflatten([pair[i] for pair in pairs]) for i in range(2)))

    def encode_moments(x: PyTree) -> Any:
        if not _has_moments(x):
            return x
        names = [name for name in ("mu", "nu") if name in x._fields]
        return x._replace(**{name: encode_tree(getattr(x, name), name == "mu") for name in names})

    return jax.tree.map(encode_moments, state, is_leaf=_has_moments)


def _decode(codes: Array, scales: Array) -> Array:
    if codes.dtype not in (jnp.int8, jnp.uint8):
        return codes
    first = codes.dtype == jnp.int8
    x, wide = _buckets(codes).astype(jnp.float32), scales.astype(jnp.float32)[..., None]
    shares = x * (jnp.abs(x) + 2 * BEND) * PER_FIRST if first else x * PER_SECOND
    # The choice changes no number. Without it, XLA multiplies constant and scale first.
    numbers = jnp.where(x == 0, 0, shares) * wide
    return _unbucketed(numbers if first else numbers * numbers, codes.shape)


def _encode(x: Array, first: bool) -> tuple[Array, Array]:
    """Returns codes and scales; vectors, complex and float64 numbers stay, with a zero."""
    if x.ndim < 2 or x.dtype not in _DTYPES:
        return x, jnp.zeros((), jnp.float32)
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
    return _unbucketed(codes, x.shape), scales[..., 0]


def _buckets(x: Array) -> Array:
    """Returns `(*lead, buckets, 32)`, with zeros after the last element."""
    *lead, n = x.shape
    x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, -n % BUCKET)])
    return x.reshape(*lead, -(-n // BUCKET), BUCKET)


def _unbucketed(x: Array, shape: tuple[int, ...]) -> Array:
    return x.reshape(*shape[:-1], -1)[..., : shape[-1]]
