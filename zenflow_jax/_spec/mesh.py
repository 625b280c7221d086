"""A leaf's placement on a mesh: the mesh axes that divide the leaf, or the work on it.

This metadata is static and hashable, and names no devices. `_device/shards.py` uses it.

Words: a device holds a *block* of a parameter. If several devices hold the same block (data
parallelism), each works only on its *part* of it, as in ZeRO. Otherwise the part is the block.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

#: An array of jax, traced or not, or its shape and sharding.
ArrayOrShape = jax.Array | jax.ShapeDtypeStruct


class HasShape(Protocol):
    """An array of jax or NumPy, or a shape of jax or of a checkpoint library."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...


#: The mesh axes that divide each axis of a leaf, the outermost first.
MeshAxes = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a mesh divides a leaf's parameter, and the arrays that belong to the leaf."""

    mesh: AbstractMesh
    block: MeshAxes  # divide the parameter
    part: MeshAxes  # divide moments, mail and the deferred half: the block's axes and maybe more

    def count(self, axes: Sequence[str]) -> int:
        """Returns the number of pieces that these mesh axes cut an axis into."""
        return math.prod(self.mesh.shape[name] for name in axes)

    def map(self, change: Callable[[MeshAxes], MeshAxes]) -> "Placement":
        """Returns the placement of a leaf with other axes."""
        return dataclasses.replace(self, block=change(self.block), part=change(self.part))

    @property
    def cuts(self) -> MeshAxes:
        """Returns `block` without mesh axes of size one, which jit drops from its outputs."""
        return tuple(
            tuple(name for name in names if self.mesh.shape[name] > 1) for names in self.block
        )

    @property
    def shares(self) -> MeshAxes:
        """Returns, for each leaf axis, the mesh axes that cut a block into parts."""
        return tuple(p[len(b) :] for b, p in zip(self.block, self.part, strict=True))

    def running_mesh(self, arrays: Sequence[jax.typing.ArrayLike]) -> AbstractMesh:
        """Returns the mesh with the axis types of the program that is being traced."""
        meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in arrays)]
        return next((x for x in meshes if x.shape_tuple == self.mesh.shape_tuple), self.mesh)


def explicit_axes(mesh: Mesh | AbstractMesh) -> frozenset[str]:
    """Returns the mesh axes whose sharding is part of an array's type."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in types if kind == AxisType.Explicit)


def placement_of(leaf: HasShape, sharding: Sharding | None = None) -> Placement | None:
    """Returns `leaf`'s placement on its mesh, or None on one device or before it is known.

    `sharding` replaces the leaf's own sharding, which a traced leaf has only on Explicit axes.
    """
    if sharding is None and isinstance(leaf, Tracer):
        typed = jax.typeof(leaf).sharding
        sharding = typed if AxisType.Explicit in typed.mesh.axis_types else None
    elif sharding is None:
        sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    # With Auto axes: axis types belong to a program, not to a leaf.
    mesh = sharding.mesh.abstract_mesh
    mesh = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))
    axes = mesh_axes(sharding.spec, len(leaf.shape))
    return Placement(mesh, axes, axes)


def mesh_axes(spec: PartitionSpec, rank: int) -> MeshAxes:
    """Expands `spec` to one tuple of mesh axes for each of `rank` axes."""

    def names(entry: object) -> tuple[str, ...]:
        # A single name need not be in a tuple. All else divides no axis: None, `UNCONSTRAINED`.
        return (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()

    return tuple(map(names, [*spec, *[None] * (rank - len(spec))]))


def divide_blocks(placement: Placement, shape: Sequence[int], axes: Sequence[int]) -> Placement:
    """Cuts each block that several devices hold into parts, as far as the leaf's shape allows.

    `axes` lists the leaf axes that may be cut, in order of preference.
    """
    part = [list(names) for names in placement.block]
    used = {name for names in part for name in names}
    for name, size in placement.mesh.shape.items():
        if name in used or size == 1:
            continue
        for axis in axes:
            if shape[axis] % (placement.count(part[axis]) * size) == 0:
                part[axis].append(name)
                break
    return dataclasses.replace(placement, part=tuple(map(tuple, part)))


def partition_spec(axes: MeshAxes) -> PartitionSpec:
    # Spelled as in jit's outputs: a single name without a tuple, no trailing None.
    entries = [names[0] if len(names) == 1 else names or None for names in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
