"""Places a run's arrays on a mesh of devices, according to a table of rules.

    --mesh data=2,fsdp=2,tensor=2     eight devices; the last axis varies fastest

    axis      weights                batch
    data      a copy on each device  split
    fsdp      split                  split
    tensor    split                  a copy on each device

Devices are numbered node by node, so begin with the axis that may span nodes: `data`, which sends
the least. To shard another model, or to shard differently, change `RULES`.
"""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from train.cli.settings import SettingsError

MESH_AXES = ("data", "fsdp", "tensor")

BATCH_AXES = ("data", "fsdp")  # a batch is split over these, by sequences

# A pattern, matched against a leaf's path (`blocks/0/gate/kernel`), and the mesh axis of each
# dimension, or None to leave the dimension whole. The first match decides; axes that the mesh lacks
# are ignored. The stack axis of blocks, or of vocabulary parts, is never split.
#
# `tensor` splits the inner dimension of a pair of matrices, columns of the first and rows of the
# second, so that a block sums over devices once per pair. `fsdp` splits the other dimension: its
# devices gather a matrix before they use it.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    # (vocabulary, width). If `tensor` split rows and `fsdp` columns, as in a pair's second matrix,
    # the compiler would split lookups by both, and then move all of them.
    (r"^embed/embedding$", ("fsdp", "tensor")),
    (r"^(positions|types)/embedding$", (None, None)),  # an encoder's, which are small
    (r"/(query|key|value|gate|up)/kernel$", ("fsdp", "tensor")),  # (width, heads * d or ffn)
    (r"/(query|key|value|up)/bias$", ("tensor",)),
    (r"/(attention_out|down)/kernel$", ("tensor", "fsdp")),  # (heads * d or ffn, width)
    (r"/(attention_out|down)/bias$", (None,)),
    (r"^head/kernel$", ("fsdp", "tensor")),  # (width, vocabulary)
    (r"^(pooler|classifier)/kernel$", ("fsdp", None)),  # (width, width or labels)
    (r"^(pooler|classifier)/bias$", (None,)),
    (r"norm/(scale|bias)$", (None,)),  # (width,) or (d,): small, so replicated
)

# Leaves that are replicated if the mesh does not divide them: a loaded model's vocabulary size is
# fixed, and BERT's, for instance, is divisible by 2 but not by 4.
UNEVEN = r"^(embed/embedding|head/kernel)$"


def make_mesh(text: str | None) -> Mesh | None:
    """Returns the mesh of `axis=size` pairs over all devices; None if `text` is None."""
    devices = jax.devices()
    processes = jax.process_count()
    all_devices = f"{len(devices)} {devices[0].device_kind} device(s) in {processes} process(es)"
    if text is None:
        if processes > 1:
            raise _mesh_error(f"axes over {all_devices}, such as data={len(devices)}", "none")
        return None
    axes = mesh_axes(text)
    product = math.prod(axes.values())
    if product != len(devices):
        expected = f"sizes that multiply to the number of devices, here {all_devices}"
        raise _mesh_error(expected, f"{text} with the product {product}")
    # With Auto, the compiler derives placements inside the step from its arguments. With jax's
    # default, Explicit, the model would have to specify the placement of some results.
    auto = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto)


def weight_shardings(mesh: Mesh, weights: Any) -> Any:
    """Returns the sharding of each leaf in `weights`, arrays or shapes, by `RULES`."""

    def sharding_of(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, _spec(mesh, name, leaf.shape))

    return jax.tree_util.tree_map_with_path(sharding_of, weights)


def batch_sharding(mesh: Mesh, batch_size: int, micro_batches: int = 1) -> NamedSharding:
    """Returns the sharding of a (micro-)batch `(b, ...)`, with sequences over `BATCH_AXES`."""
    axes = tuple(name for name in BATCH_AXES if name in mesh.shape)
    parts = micro_batches * batch_parts(mesh)
    if batch_size % parts:
        times = f", times {micro_batches} micro-batches" if micro_batches > 1 else ""
        raise SettingsError(
            f"`batch_size`: must be a multiple of {parts}, the number of devices along the mesh "
            f"axes {' and '.join(axes)}{times}, but is {batch_size}. It counts the "
            "sequences on all devices together: pass "
            f"--batch-size {math.ceil(batch_size / parts) * parts}, or another --mesh."
        )
    return NamedSharding(mesh, PartitionSpec(axes))


def batch_parts(mesh: Mesh | None) -> int:
    return 1 if mesh is None else math.prod(mesh.shape.get(name, 1) for name in BATCH_AXES)


def own_rows(sharding: NamedSharding, rows: int) -> np.ndarray:
    """Returns the row indices of an array `(rows, ...)` in this process, ascending."""
    slices = {
        (index[0].start or 0, rows if index[0].stop is None else index[0].stop)
        for index in sharding.addressable_devices_indices_map((rows,)).values()
    }
    return np.concatenate([np.arange(start, stop) for start, stop in sorted(slices)])


def committed(tree: Any, mesh: Mesh | None = None) -> Any:
    """Commits arrays to their devices, like jit's results, so that the step is compiled only once.

    Uncommitted arrays are replicated on the mesh.
    """
    if mesh is None:
        return jax.tree.map(lambda x: jax.device_put(x, x.sharding), tree)

    def commit(x: jax.Array) -> jax.Array:
        if x.committed:
            return x
        everywhere = NamedSharding(mesh, PartitionSpec(), memory_kind=x.sharding.memory_kind)
        # `device_put` would compare the values of all processes.
        value = np.asarray(x)
        return jax.make_array_from_callback(x.shape, everywhere, lambda index: value[index])

    return jax.tree.map(commit, tree)


def mesh_axes(text: str) -> dict[str, int]:
    """Returns the sizes of the axes in `text`, in order, or raises the errors of `make_mesh`."""
    axes: dict[str, int] = {}
    for pair in text.split(","):
        name, _, size = (part.strip() for part in pair.partition("="))
        if not (name and size.isdecimal() and int(size) > 0):
            form = "`axis=size` pairs, separated by commas, such as data=2,fsdp=4"
            raise _mesh_error(form, repr(text))
        if name not in MESH_AXES:
            raise _mesh_error(f"only the axes {', '.join(MESH_AXES)}", f"`{name}`")
        if name in axes:
            raise _mesh_error("every axis once", f"`{name}` twice")
        axes[name] = int(size)
    return axes


def _spec(mesh: Mesh, name: str, shape: tuple[int, ...]) -> PartitionSpec:
    rule = next((axes for pattern, axes in RULES if re.search(pattern, name)), None)
    stacks = r"blocks/(?!\d)|(embed|head)/"
    if rule is not None and len(rule) < len(shape) and re.match(stacks, name):
        rule = (None, *rule)
    if rule is None or len(rule) != len(shape):
        raise SettingsError(
            f"`{name}` {shape} needs a rule in train/distributed/sharding.py, but has "
            f"{rule or 'none'}."
        )
    axes = []
    for dimension, (size, axis) in enumerate(zip(shape, rule, strict=True)):
        if axis not in mesh.shape:
            axis = None
        elif size % mesh.shape[axis]:
            if not re.search(UNEVEN, name):
                raise _mesh_error(
                    f"a size of `{axis}` that divides {size}, dimension {dimension} of `{name}`",
                    f"{axis}={mesh.shape[axis]}",
                )
            axis = None
        axes.append(axis)
    return PartitionSpec(*axes)


def _mesh_error(expected: str, got: str) -> SettingsError:
    return SettingsError(f"`mesh`: needs {expected}, but has {got}.")
