"""Where the arrays of a run lie on a mesh of devices: a table of rules, and what follows from it.

    --mesh data=2,fsdp=2,tensor=2     eight devices, numbered in this order, the last axis fastest

    axis      weights                batch
    data      a copy on each device  split
    fsdp      split                  split
    tensor    split                  a copy on each device

A link between nodes is slower than one inside a node. Devices are counted node by node, so name the
axis that may cross nodes first: `data`, which sends the least.

To shard another model, or this one otherwise, change `RULES`. Whatever they say, the training is
the same up to the order of sums; what they change is memory, and what the devices send each other.
"""

from __future__ import annotations

import difflib
import math
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from train.settings import SettingsError

MESH_AXES = ("data", "fsdp", "tensor")

BATCH_AXES = ("data", "fsdp")  # the sequences of a batch are split over these

# A pattern (a regular expression that is searched in the path of a leaf, such as
# `blocks/0/gate/kernel`) and the mesh axis of each dimension, None for a dimension that is not
# split. The first pattern that is found decides; axes that the mesh does not have split nothing.
# With its blocks stacked, a leaf (`blocks/gate/kernel`) has one dimension more in front, which is
# not split.
#
# `tensor` cuts the inner side of a pair of matrices, columns of the first and rows of the second,
# so that a block sums over devices once behind each pair. `fsdp` cuts the other side: its devices
# gather a matrix before they use it.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    # (vocabulary, width). Rows by `tensor` and columns by `fsdp`, as of a second matrix, would make
    # the compiler split what is looked up by both, and then move all of it.
    (r"^embed/embedding$", ("fsdp", "tensor")),
    (r"^(positions|types)/embedding$", (None, None)),  # of an encoder: small
    (r"/(query|key|value|gate|up)/kernel$", ("fsdp", "tensor")),  # (width, heads * d or ffn)
    (r"/(query|key|value|up)/bias$", ("tensor",)),
    (r"/(attention_out|down)/kernel$", ("tensor", "fsdp")),  # (heads * d or ffn, width)
    (r"/(attention_out|down)/bias$", (None,)),
    (r"^head/kernel$", ("fsdp", "tensor")),  # (width, vocabulary)
    (r"^(pooler|classifier)/kernel$", ("fsdp", None)),  # (width, width or labels)
    (r"^(pooler|classifier)/bias$", (None,)),
    (r"norm/(scale|bias)$", (None,)),  # (width,) or (d,): small, so whole on every device
)


# Leaves that are whole where they do not divide: the vocabulary of a model that was read from a
# folder cannot be chosen, and BERT's, say, divides by 2 but not by 4.
UNEVEN = r"^(embed/embedding|head/kernel)$"


def make_mesh(text: str | None) -> Mesh | None:
    """The mesh that the setting asks for, over all devices of all processes.

    Args:
        text: `axis=size` pairs with commas between them, axes of `MESH_AXES`; None for no mesh.

    Returns:
        A mesh with the axes in the order of `text`, or None where none is asked for.

    Raises:
        SettingsError: If `text` is not of that form, if the sizes do not multiply to the number of
            devices, or if there are several processes and no mesh.
    """
    devices = jax.devices()
    here = f"{len(devices)} {devices[0].device_kind} device(s) in {jax.process_count()} process(es)"
    if text is None:
        if jax.process_count() > 1:
            raise _mesh_error(
                f"a mesh over {here}", "none", f"For example --mesh data={len(devices)}."
            )
        return None
    axes = mesh_axes(text)
    wanted = math.prod(axes.values())
    if wanted != len(devices):
        remedy = "Change the sizes, or give the run other devices (docs/multi_host.md)."
        raise _mesh_error(
            f"sizes that multiply to the number of devices, here {here}",
            f"{text}, which is {wanted}",
            remedy,
        )
    # Auto: the compiler derives placements inside the step from those of its arguments. jax's
    # default is Explicit, where the model would have to name the placement of some results.
    auto = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto)


def weight_shardings(mesh: Mesh, weights: Any) -> Any:
    """The tree of `weights` with the sharding of each leaf, by `RULES`.

    Args:
        mesh: The devices.
        weights: A tree of arrays, or of anything with a shape.

    Raises:
        SettingsError: If no rule fits a leaf, or its size does not divide by its axes.
    """

    def one(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, _spec(mesh, name, leaf.shape))

    return jax.tree_util.tree_map_with_path(one, weights)


def batch_sharding(mesh: Mesh, batch_size: int, micro_batches: int = 1) -> NamedSharding:
    """The sharding of a batch or micro-batch `(b, ...)`: its sequences over `BATCH_AXES`.

    Raises:
        SettingsError: If a micro-batch does not divide by their sizes.
    """
    axes = tuple(name for name in BATCH_AXES if name in mesh.shape)
    parts = micro_batches * batch_parts(mesh)
    if batch_size % parts:
        times = f", times {micro_batches} micro-batches" if micro_batches > 1 else ""
        raise SettingsError(
            f"`batch_size`: expected a multiple of {parts}, the devices along "
            f"{' and '.join(axes)} of the mesh{times}, got {batch_size}. It counts the "
            "sequences of all devices together: pass "
            f"--batch-size {math.ceil(batch_size / parts) * parts}, or another --mesh."
        )
    return NamedSharding(mesh, PartitionSpec(axes))


def batch_parts(mesh: Mesh | None) -> int:
    """In how many parts a batch is split."""
    return 1 if mesh is None else math.prod(mesh.shape.get(name, 1) for name in BATCH_AXES)


def own_rows(sharding: NamedSharding, rows: int) -> np.ndarray:
    """The numbers, ascending, of the rows of an array `(rows, ...)` that lie on this process."""
    slices = {
        (index[0].start or 0, rows if index[0].stop is None else index[0].stop)
        for index in sharding.addressable_devices_indices_map((rows,)).values()
    }
    return np.concatenate([np.arange(start, stop) for start, stop in sorted(slices)])


def committed(tree: Any, mesh: Mesh | None = None) -> Any:
    """The same arrays, each bound to its place.

    What jit returns is bound to a place if any of its arguments is. Were the first ones not, the
    second step would differ from the first in that alone, and compile again.

    Args:
        tree: Arrays.
        mesh: Where arrays go that are bound to nothing yet (such as the step counts of an
            optimizer): a copy to each of its devices. None: each to the device and the memory that
            it is in.
    """
    if mesh is None:
        return jax.tree.map(lambda x: jax.device_put(x, x.sharding), tree)

    def one(x: jax.Array) -> jax.Array:
        if x.committed:
            return x
        everywhere = NamedSharding(mesh, PartitionSpec(), memory_kind=x.sharding.memory_kind)
        # `device_put` would ask all other processes whether they have the same value.
        value = np.asarray(x)
        return jax.make_array_from_callback(x.shape, everywhere, lambda index: value[index])

    return jax.tree.map(one, tree)


def mesh_axes(text: str) -> dict[str, int]:
    """The sizes of the axes that the setting names, in its order.

    Raises:
        SettingsError: If it is not of the form that `make_mesh` takes.
    """
    form = "`axis=size` pairs with commas between them, such as data=2,fsdp=4"
    axes: dict[str, int] = {}
    for pair in text.split(","):
        name, _, size = (part.strip() for part in pair.partition("="))
        if not (name and size.isdecimal() and int(size) > 0):
            raise _mesh_error(form, repr(text), "Sizes are whole numbers above 0.")
        if name not in MESH_AXES:
            near = difflib.get_close_matches(name, MESH_AXES, n=1)
            remedy = f"Did you mean `{near[0]}`?" if near else "Use one of these."
            raise _mesh_error(f"axes of {', '.join(MESH_AXES)}", f"`{name}`", remedy)
        if name in axes:
            raise _mesh_error("every axis once", f"`{name}` twice", "Multiply their sizes.")
        axes[name] = int(size)
    return axes


def _spec(mesh: Mesh, name: str, shape: tuple[int, ...]) -> PartitionSpec:
    rule = next((axes for pattern, axes in RULES if re.search(pattern, name)), None)
    if rule is not None and re.match(r"blocks/(?!\d)", name):
        rule = (None, *rule)
    if rule is None or len(rule) != len(shape):
        got = "none" if rule is None else f"one for {len(rule)} dimensions: {rule}"
        raise SettingsError(
            f"expected a rule for the leaf `{name}` of shape {shape}, got {got}. Change RULES in "
            "train/sharding.py."
        )
    axes = tuple(axis if axis in mesh.shape else None for axis in rule)
    if re.search(UNEVEN, name):
        axes = tuple(
            axis if axis and size % mesh.shape[axis] == 0 else None
            for size, axis in zip(shape, axes, strict=True)
        )
    for dimension, (size, axis) in enumerate(zip(shape, axes, strict=True)):
        if axis is not None and size % mesh.shape[axis]:
            raise _mesh_error(
                f"a size of `{axis}` that divides dimension {dimension} of the leaf `{name}`, "
                f"which is {size}",
                f"{axis}={mesh.shape[axis]}",
                "Change that size or the model's, or the leaf's rule in train/sharding.py.",
            )
    return PartitionSpec(*axes)


def _mesh_error(expected: str, got: str, remedy: str) -> SettingsError:
    return SettingsError(f"`mesh`: expected {expected}, got {got}. {remedy}")
