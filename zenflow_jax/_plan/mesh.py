"""How a leaf lies on a mesh: which mesh axes divide it, and which divide the work on it.

Static facts, hashable, with no device in them: they ride in the state's treedef, and mean the same
on another set of devices of the same mesh shape. What is done with them is `_device/shards.py`'s.

Words: a device holds a *block* of a parameter. Where several devices hold the same block (data
parallelism), each works on its *part* of it only, as ZeRO does; else the part is the block.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

#: For each axis of a leaf the mesh axes that divide it, the outermost first.
MeshAxes = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a leaf's parameter is, and where what belongs to it is."""

    mesh: AbstractMesh
    block: MeshAxes  # of the parameter
    part: MeshAxes  # of its moments, mail and deferred half: the block's axes and perhaps more

    def count(self, axes: Sequence[str]) -> int:
        """Into how many pieces these mesh axes cut an axis together."""
        return math.prod(self.mesh.shape[name] for name in axes)

    @property
    def cuts(self) -> MeshAxes:
        """`block` without mesh axes of one device, which jit leaves out of what it returns."""
        return tuple(
            tuple(name for name in names if self.mesh.shape[name] > 1) for names in self.block
        )

    @property
    def shares(self) -> MeshAxes:
        """For each axis of the leaf the mesh axes that cut a block into parts."""
        return tuple(p[len(b) :] for b, p in zip(self.block, self.part, strict=True))

    @property
    def explicit(self) -> frozenset[str]:
        """The mesh axes whose sharding is part of an array's type."""
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return frozenset(name for name, kind in types if kind == AxisType.Explicit)


def placement_of(leaf: Any, sharding: Any = None) -> Placement | None:
    """How `leaf` lies on its mesh; None if it lies on one device, or if nobody knows yet.

    Args:
        leaf: An array, a traced one, or a `ShapeDtypeStruct`.
        sharding: Used instead of the leaf's own. Traced leaves know theirs on Explicit axes only.
    """
    told = sharding is not None
    if not told:
        sharding = (
            jax.typeof(leaf).sharding
            if isinstance(leaf, Tracer)
            else getattr(leaf, "sharding", None)
        )
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    mesh = sharding.mesh
    if not isinstance(mesh, AbstractMesh):
        mesh = mesh.abstract_mesh
    if not told and isinstance(leaf, Tracer) and AxisType.Explicit not in mesh.axis_types:
        return None
    axes = mesh_axes(sharding.spec, len(leaf.shape))
    return Placement(mesh, axes, axes)


def mesh_axes(spec: PartitionSpec, rank: int) -> MeshAxes:
    """`spec` in full: one tuple of mesh axes for each of `rank` axes."""
    entries = [*spec, *[None] * (rank - len(spec))]
    return tuple(
        ()
        if entry is None or entry is PartitionSpec.UNCONSTRAINED
        # One name may stand without a tuple around it.
        else (entry,)
        if isinstance(entry, str)
        else tuple(entry)
        for entry in entries
    )


def divide_blocks(placement: Placement, shape: Sequence[int], axes: Sequence[int]) -> Placement:
    """Cuts blocks that several devices hold into parts, as far as the sizes allow.

    Args:
        placement: With parts that are blocks.
        shape: Of the leaf.
        axes: Axes of the leaf that may be cut, the preferred one first.
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


def partition_spec(axes: MeshAxes, lead: int = 0) -> PartitionSpec:
    """As jax writes it, behind `lead` unit axes."""
    # A lone name without its tuple, and no trailing None: what jit gives to its outputs.
    entries = [names[0] if len(names) == 1 else names or None for names in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*[None] * lead, *entries) if entries else PartitionSpec()
