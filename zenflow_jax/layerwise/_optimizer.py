"""An optimizer's update on the device, for one leaf at a time.

A leaf's float32 master is its weight and, if the weight is bfloat16, `rest`, the other 16 bits. The
optimizer sees the tree of the leaf's block (a layer, or the outer weights) with None in place of
all other leaves, which jax takes for empty subtrees. So masks and label functions work as for a
whole tree.
"""

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

#: The dtype of `rest` for each dtype of a weight.
_REST = {np.dtype(jnp.bfloat16): jnp.int16}
#: Smaller arrays stay on the device, because copies of any size take about as long.
SMALL_BYTES = 64 * 1024


class Control(NamedTuple):
    """The scalars of a step that its updates read; they never leave the device."""

    factor: Any  # the clipping factor
    counts: Any  # bool: whether the step counts; otherwise updates change nothing
    # int32: 0; or 1 + the first leaf whose update is not finite; or -1 - the first block whose
    # gradient is not finite
    report: Any


class Parts(NamedTuple):
    """A trained leaf: its weight, and the arrays that only updates read."""

    weight: Any
    others: tuple[Any, ...]  # `rest`, if any, and the leaves of the optimizer's state


def flat(parts: Sequence[Parts]) -> list[Any]:
    """Returns the arrays of some leaves: first their weights, then their other arrays."""
    return [x.weight for x in parts] + [x for leaf in parts for x in leaf.others]


def unflat(arrays: Sequence[Any], shapes: Sequence[Parts]) -> list[Parts]:
    """Undoes `flat`, for leaves of these shapes."""
    left = iter(arrays[len(shapes) :])
    leaves = zip(arrays, shapes, strict=False)
    return [Parts(x, tuple(next(left) for _ in shape.others)) for x, shape in leaves]


def is_large(x: Any) -> bool:
    """Returns whether an array waits in host memory between its uses."""
    return math.prod(x.shape) * x.dtype.itemsize >= SMALL_BYTES


class Updater:
    """The programs that make and update leaves, which blocks with equal trees share.

    Blocks are given by their treedef, and leaves by their places in it and their `Parts` as shapes
    with shardings, which the results have, too.
    """

    def __init__(self, optimizer: optax.GradientTransformation, options: dict[str, Any] | None):
        self.optimizer = optimizer
        self._jit: Any = partial(jax.jit, compiler_options=options)
        cached = self._state, self._init, self._update, self._masters
        self.state, self.init, self.update, self.masters = map(functools.cache, cached)

    def _state(self, treedef: Any, place: int, shape: tuple[int, ...]) -> Any:
        """Returns the shapes of a leaf's optimizer state, as the optimizer's tree."""
        tree = alone(treedef, place, jax.ShapeDtypeStruct(shape, jnp.float32))
        return jax.eval_shape(self.optimizer.init, tree)

    def shapes(self, treedef: Any, place: int, leaf: Any) -> Parts:
        """Returns the shapes of a leaf's arrays, with shardings on the devices of `leaf`."""
        state = jax.tree.leaves(self.state(treedef, place, leaf.shape))
        rest = _REST.get(np.dtype(leaf.dtype))
        shapes = [] if rest is None else [jax.ShapeDtypeStruct(leaf.shape, rest)]
        return Parts(leaf, tuple(_placed(x, leaf) for x in (*shapes, *state)))

    def names(self, treedef: Any, place: int, leaf: Any) -> list[str]:
        """Returns the names of the arrays in a leaf's state, which identify the optimizer."""
        pairs, _ = jax.tree_util.tree_flatten_with_path(self.state(treedef, place, leaf.shape))
        return [jax.tree_util.keystr(path) for path, _ in pairs]

    def state_of(self, treedef: Any, place: int, leaf: Parts) -> Any:
        """Returns a leaf's optimizer state as the optimizer's tree."""
        structure = jax.tree.structure(self.state(treedef, place, leaf.weight.shape))
        return structure.unflatten(leaf.others[-structure.num_leaves or len(leaf.others) :])

    def _init(self, treedef: Any, places: tuple[int, ...], shapes: tuple[Parts, ...]) -> Callable:
        """Returns a program that makes leaves from weights: (weights) -> `flat` arrays."""

        def made(place: int, weight: Any, shape: Parts) -> Parts:
            new = jnp.copy(weight)  # otherwise the result would be the caller's array
            if not shape.others:  # frozen, or an optimizer without state
                return Parts(new, ())
            master = weight.astype(jnp.float32)
            state = self.optimizer.init(alone(treedef, place, master))
            return Parts(new, (*_rest(master, weight), *jax.tree.leaves(state)))

        def init(weights: Sequence[Any]) -> list[Any]:
            return flat([*map(made, places, weights, shapes)])

        return self._jit(init, out_shardings=[x.sharding for x in flat(shapes)])

    def _update(self, treedef: Any, places: tuple[int, ...], shapes: tuple[Parts, ...]) -> Callable:
        """Returns a program that updates leaves: (gradients, control, number, *arrays).

        Returns their new `flat` arrays, in the memory of the large ones, and the control's new
        report. `number` is the first leaf's.
        """

        def update(g: Any, control: Control, number: Any, *old: Any) -> Any:
            leaves = zip(places, unflat(old, shapes), g, strict=True)
            new = flat([self._updated(treedef, *x, control.factor) for x in leaves])
            kept = [jnp.where(control.counts, *x) for x in zip(new, old, strict=True)]
            report = control.report
            # Of the weights, because a check of the update would keep it in a float32 array.
            for n, weight in enumerate(kept[: len(places)]):
                is_first = control.counts & (report == 0) & ~jnp.all(jnp.isfinite(weight))
                report = jnp.where(is_first, number + (1 + n), report)
            return kept, report

        # Small arrays stay on the device, where a save or a caller may hold them.
        large = [3 + i for i, x in enumerate(flat(shapes)) if is_large(x)]
        shardings = [x.sharding for x in flat(shapes)], None
        return self._jit(update, donate_argnums=large, out_shardings=shardings)

    def _masters(self, shapes: tuple[Parts, ...]) -> Callable:
        """Returns a program that makes leaves' masters: (`flat` arrays) -> float32 arrays."""

        def masters(arrays: Sequence[Any]) -> list[Any]:
            return [jnp.copy(_master(leaf)) for leaf in unflat(arrays, shapes)]

        return self._jit(masters, out_shardings=[x.weight.sharding for x in shapes])

    def _updated(self, treedef: Any, place: int, leaf: Parts, gradient: Any, factor: Any) -> Parts:
        params = alone(treedef, place, _master(leaf))
        state = self.state_of(treedef, place, leaf)
        g = alone(treedef, place, gradient.astype(jnp.float32) * factor)
        change, state = self.optimizer.update(g, state, params)
        (master,) = jax.tree.leaves(optax.apply_updates(params, change))
        weight = _rounded(master, leaf.weight.dtype)
        return Parts(weight, (*_rest(master, weight), *jax.tree.leaves(state)))


def alone(treedef: Any, place: int, x: Any) -> Any:
    """Returns a block's tree with one leaf, and None in place of all other leaves."""
    return treedef.unflatten([x if i == place else None for i in range(treedef.num_leaves)])


def _rounded(master: Any, dtype: Any) -> Any:
    if dtype == jnp.bfloat16:
        # XLA:GPU drops a cast to bfloat16 and back, after which `rest` would be zero.
        master = jax.lax.reduce_precision(master, exponent_bits=8, mantissa_bits=7)
    return master.astype(dtype)


def _rest(master: Any, weight: Any) -> tuple[Any, ...]:
    """Returns the rest of a master beside its weight.

    A bfloat16 number is the upper 16 bits of a float32 number, so the rest is a difference of bits.
    It is exact but for masters halfway between two weights, one in 131,072 numbers: 32768 is not
    an int16, so they move by one float32 unit.
    """
    if weight.dtype == jnp.float32:
        return ()
    rest = _bits(master) - _bits(weight.astype(jnp.float32))
    return (jnp.clip(rest, -(2**15), 2**15 - 1).astype(jnp.int16),)


def _master(leaf: Parts) -> Any:
    if leaf.weight.dtype == jnp.float32:
        return leaf.weight
    bits = _bits(leaf.weight.astype(jnp.float32)) + leaf.others[0].astype(jnp.int32)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _bits(x: Any) -> Any:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _placed(x: Any, leaf: Any) -> Any:
    """Returns an array's shape with the leaf's sharding, on each axis that it divides evenly."""
    sharding = leaf.sharding
    if x.shape != leaf.shape and isinstance(sharding, NamedSharding):
        spec: list[Any] = []
        if len(x.shape) == len(leaf.shape):
            pairs = zip(leaf.shape, sharding.shard_shape(leaf.shape), strict=True)
            counts = [whole // max(shard, 1) for whole, shard in pairs]
            axes = [*sharding.spec, *[None] * len(counts)]
            evenly = [n % max(count, 1) == 0 for n, count in zip(x.shape, counts, strict=True)]
            spec = [axis if even else None for axis, even in zip(axes, evenly, strict=False)]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
