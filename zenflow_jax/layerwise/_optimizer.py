"""An optimizer's update on the device, for one leaf at a time.

A leaf's float32 master is its weight and, if the weight is bfloat16, `rest`, the other 16 bits. The
optimizer sees the tree of the leaf's block (a layer, or the outer weights) with None in place of
all other leaves, which jax takes for empty subtrees. So masks and label functions work as for a
whole tree.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from zenflow_jax.layerwise._progress import Progress
from zenflow_jax.layerwise._transfers import bytes_here, stays

#: Neighbouring leaves are updated together, by one program, up to this size.
_BUNDLE_BYTES = 32 * 1024**2

# A trained leaf: its weight, and what only updates read: (`rest` or None, the optimizer's state).
Leaf = tuple[Any, tuple[Any, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Bundle:
    """Neighbouring leaves of a block that one program updates.

    Its arrays are a list: first the weights, then the other arrays.
    """

    places: range
    shapes: Any  # ([weight, ...], [(rest, state), ...]), with shardings in device memory
    nbytes: int  # of the arrays, and of those that only updates read, on one device
    others_nbytes: int
    init: Callable[..., list[Any]]  # (weights) -> arrays
    # (gradients, progress, number, *arrays) -> new arrays, in the memory of the old ones, and the
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
        #: Each leaf's other arrays, as shapes.
        self.others = [*map(self._shapes_of_others, range(len(pairs)), self.weights)]
        self.weights_nbytes = sum(map(bytes_here, self.weights))
        self.bundles = [*self._bundles()]
        self.nbytes = sum(bundle.nbytes for bundle in self.bundles)

    def alone(self, place: int, x: Any) -> Any:
        """Returns the tree with one leaf, and None in place of all other leaves."""
        count = self.treedef.num_leaves
        return self.treedef.unflatten([x if i == place else None for i in range(count)])

    def _bundles(self) -> Iterator[Bundle]:
        leaves = zip(self.weights, self.others, strict=True)
        sizes = [sum(map(bytes_here, jax.tree.leaves(leaf))) for leaf in leaves]
        begin = 0
        for end in range(1, len(sizes) + 1):
            if end < len(sizes) and sum(sizes[begin : end + 1]) <= _BUNDLE_BYTES:
                continue
            shapes = self.weights[begin:end], self.others[begin:end]
            others_here = sum(map(bytes_here, jax.tree.leaves(shapes[1])))
            here = others_here + sum(map(bytes_here, shapes[0]))
            places = range(begin, end)
            yield Bundle(places, shapes, here, others_here, *self._programs(places, shapes))
            begin = end

    def _programs(self, places: range, shapes: Any) -> tuple[Any, Any]:
        """Returns a bundle's programs."""

        def init(weights: Sequence[Any]) -> list[Any]:
            # Otherwise the results would be the caller's arrays.
            weights = [*map(jnp.copy, weights)]
            return jax.tree.leaves((weights, [*map(self._new, places, weights)]))

        def update(g: Any, progress: Progress, number: Any, *old: Any) -> Any:
            leaves = zip(places, leaves_of(shapes, old), g, strict=True)
            pairs = [self._updated(*x, progress.factor) for x in leaves]
            new = jax.tree.leaves([*zip(*pairs, strict=True)])
            kept = [jnp.where(progress.counts, *x) for x in zip(new, old, strict=True)]
            report = progress.report
            # Of the weights, because a check of the update would keep it in a float32 array.
            for n, weight in enumerate(kept[: len(places)]):
                is_first = progress.counts & (report == 0) & ~jnp.all(jnp.isfinite(weight))
                report = jnp.where(is_first, number + (1 + n), report)
            return kept, report

        arrays = jax.tree.leaves(shapes)
        # A save or a caller may hold arrays that are not fetched as copies.
        copies = [3 + i for i, x in enumerate(arrays) if not stays(x)]
        where = [x.sharding for x in arrays]
        return (
            self._jit(init, out_shardings=where),
            self._jit(update, donate_argnums=copies, out_shardings=(where, None)),
        )

    def _shapes_of_others(self, place: int, weight: jax.ShapeDtypeStruct) -> Any:
        shapes = jax.eval_shape(partial(self._new, place), weight.update(sharding=None))
        return jax.tree.map(partial(_placed, leaf=weight), shapes)

    def _new(self, place: int, weight: Any) -> tuple[Any, Any]:
        """Returns a new leaf's other arrays."""
        master = weight.astype(jnp.float32)
        rest = _rest(master, weight) if self.trains else None
        return rest, self.optimizer.init(self.alone(place, master))

    def _updated(self, place: int, leaf: Leaf, gradient: Any, factor: Any) -> Leaf:
        weight, (rest, state) = leaf
        params = self.alone(place, master_of(weight, rest))
        g = self.alone(place, gradient.astype(jnp.float32) * factor)
        change, state = self.optimizer.update(g, state, params)
        (master,) = jax.tree.leaves(optax.apply_updates(params, change))
        weight = _rounded(master, weight.dtype)
        return weight, (_rest(master, weight), state)


def leaves_of(shapes: Any, arrays: Sequence[Any]) -> list[Leaf]:
    """Returns a bundle's leaves, from its `shapes` and its arrays."""
    weights, others = jax.tree.structure(shapes).unflatten(arrays)
    return [*zip(weights, others, strict=True)]


def _rounded(master: Any, dtype: Any) -> Any:
    if dtype == jnp.bfloat16:
        # XLA:GPU drops a cast to bfloat16 and back, after which `rest` would be zero.
        master = jax.lax.reduce_precision(master, exponent_bits=8, mantissa_bits=7)
    return master.astype(dtype)


def _rest(master: Any, weight: Any) -> Any:
    """Returns the rest of a master beside its weight.

    A bfloat16 number is the upper 16 bits of a float32 number, so the rest is a difference of bits.
    It is exact but for masters halfway between two weights, one in 131,072 numbers: 32768 is not
    an int16, so they move by one float32 unit.
    """
    if weight.dtype == jnp.float32:
        return None
    rest = _bits(master) - _bits(weight.astype(jnp.float32))
    return jnp.clip(rest, -(2**15), 2**15 - 1).astype(jnp.int16)


def master_of(weight: Any, rest: Any) -> Any:
    """Returns a leaf's float32 weight."""
    weight = weight.astype(jnp.float32)
    if rest is None:  # of float32, or without an optimizer
        return weight
    return jax.lax.bitcast_convert_type(_bits(weight) + rest.astype(jnp.int32), jnp.float32)


def _bits(x: Any) -> Any:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _placed(x: Any, leaf: Any) -> Any:
    """Returns the shape of a state's array with the leaf's sharding if this divides it evenly."""
    sharding = leaf.sharding
    if x.shape != leaf.shape and isinstance(sharding, NamedSharding):
        sizes = zip(x.shape, sharding.shard_shape(leaf.shape), leaf.shape, strict=False)
        fits = all(n * shard % max(whole, 1) == 0 for n, shard, whole in sizes)
        if not fits or len(x.shape) != len(leaf.shape):
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
