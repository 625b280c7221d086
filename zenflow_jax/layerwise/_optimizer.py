"""An optimizer's update on the device, for one leaf at a time.

A leaf's float32 master is its weight and, if the weight is bfloat16, `rest`, the other 16 bits. The
optimizer sees the tree of the leaf's block (a layer, or the outer weights) with None in place of
all other leaves, which jax takes for empty subtrees. So masks and label functions work as for a
whole tree.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from zenflow_jax.layerwise._progress import Progress
from zenflow_jax.layerwise._transfers import bytes_here, is_large, large_bytes

#: The dtype of `rest` for each dtype of a weight.
_REST = {np.dtype(jnp.bfloat16): jnp.int16}
#: Neighbouring leaves are updated together, by one program, up to this size.
_BUNDLE_BYTES = 32 * 1024**2


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


@dataclasses.dataclass(frozen=True, eq=False)
class Bundle:
    """Neighbouring leaves of a block that one program updates; its arrays are `flat`."""

    places: range
    shapes: tuple[Parts, ...]  # with shardings in device memory
    nbytes: int  # of the large arrays, and of those that only updates read, on one device
    others_nbytes: int
    init: Callable[..., list[Any]]  # (weights) -> arrays
    # (gradients, progress, number, *arrays) -> new arrays, in the memory of the large ones, and the
    # progress' new report; `number` is the first leaf's
    update: Callable[..., tuple[list[Any], Any]]


class Kind:
    """The leaves of all blocks with equal trees, and the programs that make and update them.

    Args:
        tree: A block's weights as shapes with shardings, which the results have, too.
        optimizer: The optimizer, or None if nothing trains.
        jit: `jax.jit` with options.
    """

    def __init__(
        self, tree: PyTree, optimizer: optax.GradientTransformation | None, jit: Any = jax.jit
    ):
        pairs, self.treedef = jax.tree_util.tree_flatten_with_path(tree)
        self.paths, self.weights = [path for path, _ in pairs], [x for _, x in pairs]
        self.optimizer, self.trains = optimizer or optax.identity(), optimizer is not None
        self._jit = jit
        masters = [x.update(dtype=jnp.float32, sharding=None) for x in self.weights]
        alone = (self.alone(i, x) for i, x in enumerate(masters))
        #: The shapes of each leaf's state, as the optimizer's tree.
        self.states = [jax.eval_shape(self.optimizer.init, x) for x in alone]
        self.shapes = [*map(self._parts, self.weights, self.states)]
        self.weights_nbytes = large_bytes(self.weights)
        self.bundles = [*self._bundles()]
        self.nbytes = sum(bundle.nbytes for bundle in self.bundles)

    def alone(self, place: int, x: Any) -> Any:
        """Returns the tree with one leaf, and None in place of all other leaves."""
        count = self.treedef.num_leaves
        return self.treedef.unflatten([x if i == place else None for i in range(count)])

    def state_of(self, place: int, leaf: Parts) -> Any:
        """Returns a leaf's optimizer state as the optimizer's tree."""
        structure = jax.tree.structure(self.states[place])
        return structure.unflatten(leaf.others[len(leaf.others) - structure.num_leaves :])

    def _parts(self, weight: Any, state: PyTree) -> Parts:
        rest = _REST.get(np.dtype(weight.dtype)) if self.trains else None
        shapes = [] if rest is None else [jax.ShapeDtypeStruct(weight.shape, rest)]
        return Parts(weight, tuple(_placed(x, weight) for x in (*shapes, *jax.tree.leaves(state))))

    def _bundles(self) -> Iterator[Bundle]:
        sizes = [sum(map(bytes_here, flat([leaf]))) for leaf in self.shapes]
        begin = 0
        for end in range(1, len(sizes) + 1):
            if end < len(sizes) and sum(sizes[begin : end + 1]) <= _BUNDLE_BYTES:
                continue
            places, shapes = range(begin, end), tuple(self.shapes[begin:end])
            arrays = flat(shapes)
            sizes_here = large_bytes(arrays), large_bytes(arrays[len(shapes) :])
            yield Bundle(places, shapes, *sizes_here, *self._programs(places, shapes))
            begin = end

    def _programs(self, places: range, shapes: tuple[Parts, ...]) -> tuple[Any, Any]:
        """Returns a bundle's programs."""

        def init(weights: Sequence[Any]) -> list[Any]:
            # Otherwise the results would be the caller's arrays.
            return flat([*map(self._made, places, map(jnp.copy, weights))])

        def update(g: Any, progress: Progress, number: Any, *old: Any) -> Any:
            leaves = zip(places, unflat(old, shapes), g, strict=True)
            new = flat([self._updated(*x, progress.factor) for x in leaves])
            kept = [jnp.where(progress.counts, *x) for x in zip(new, old, strict=True)]
            report = progress.report
            # Of the weights, because a check of the update would keep it in a float32 array.
            for n, weight in enumerate(kept[: len(places)]):
                is_first = progress.counts & (report == 0) & ~jnp.all(jnp.isfinite(weight))
                report = jnp.where(is_first, number + (1 + n), report)
            return kept, report

        # Small arrays stay on the device, where a save or a caller may hold them.
        large = [3 + i for i, x in enumerate(flat(shapes)) if is_large(x)]
        where = [x.sharding for x in flat(shapes)]
        return (
            self._jit(init, out_shardings=where),
            self._jit(update, donate_argnums=large, out_shardings=(where, None)),
        )

    def _made(self, place: int, weight: Any) -> Parts:
        if not self.trains:
            return Parts(weight, ())
        master = weight.astype(jnp.float32)
        state = self.optimizer.init(self.alone(place, master))
        return Parts(weight, (*_rest(master, weight), *jax.tree.leaves(state)))

    def _updated(self, place: int, leaf: Parts, gradient: Any, factor: Any) -> Parts:
        params, state = self.alone(place, master_of(leaf)), self.state_of(place, leaf)
        g = self.alone(place, gradient.astype(jnp.float32) * factor)
        change, state = self.optimizer.update(g, state, params)
        (master,) = jax.tree.leaves(optax.apply_updates(params, change))
        weight = _rounded(master, leaf.weight.dtype)
        return Parts(weight, (*_rest(master, weight), *jax.tree.leaves(state)))


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


def master_of(leaf: Parts) -> Any:
    """Returns a leaf's float32 weight."""
    if leaf.weight.dtype == jnp.float32 or not leaf.others:  # without an optimizer
        return leaf.weight.astype(jnp.float32)
    bits = _bits(leaf.weight.astype(jnp.float32)) + leaf.others[0].astype(jnp.int32)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _bits(x: Any) -> Any:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _placed(x: Any, leaf: Any) -> Any:
    """Returns the shape of a state's array with the leaf's sharding if this divides it evenly."""
    sharding = leaf.sharding
    if x.shape != leaf.shape and isinstance(sharding, NamedSharding):
        whole = NamedSharding(sharding.mesh, PartitionSpec())
        try:
            sharding.shard_shape(x.shape)
        except ValueError:
            sharding = whole
        sharding = sharding if len(x.shape) == len(leaf.shape) else whole
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
