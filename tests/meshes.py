"""Meshes, placements and settings for tests on several devices."""

import dataclasses
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests import comparisons
from tests.reference import Reference
from tests.runs import EVERYTHING, Leaf, Leaves, Plan, Training
from zenflow_jax import AutoSelect, AutoWindow

# All sizes are divisible by eight devices. Each offloaded leaf adds to ten of the engine's
# programs, for each placement, so most runs have two leaves, which differ in every respect.
LEAVES: Leaves = (
    Leaf("bias", (16,), None, "float32"),
    Leaf("rows", (32, 8), -2, "float32", decay=False, speed=3.0),
    Leaf("stacked_columns", (2, 8, 16), -1, "bfloat16"),
)
# Covers FIRST, SECOND and THIRD in `runs`.
MORE_LEAVES: Leaves = (
    Leaf("bias", (16,), None, "float32"),
    Leaf("columns", (8, 32), -1, "bfloat16"),
    Leaf("rows", (32, 8), -2, "float32", decay=False),
    Leaf("stack", (2, 16, 8), -2, "bfloat16"),
)

# With windows of four steps, the stack is cut into ranges.
IN_RANGES: Leaves = (
    Leaf("rows", (16, 8), -2, "float32"),
    Leaf("stack", (6, 16, 8), -2, "bfloat16"),
)

# These settings hand channels over at each boundary.
STALE = dataclasses.replace(EVERYTHING, topk_ratio=0.2, select_interval=4, full_warm_up_rounds=1)
# The decisions depend on numbers that must be equal on all devices.
ADAPTIVE = dataclasses.replace(
    STALE, update_interval=AutoWindow(5, 0.4), select_interval=AutoSelect(0.6, 3)
)

MESHES = {
    "data": {"data": 8},
    "fsdp": {"fsdp": 8},
    "two": {"fsdp": 4, "tensor": 2},
    "three": {"data": 2, "fsdp": 2, "tensor": 2},
}

# The mesh axes that divide each leaf's axes. Axes that a mesh lacks have no effect.
PLACEMENTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "replicated": {"bias": (), "columns": (), "rows": (), "stack": (), "stacked_columns": ()},
    "channels": {
        "bias": ("fsdp",),
        "columns": (None, "fsdp"),
        "rows": ("fsdp",),
        "stack": (None, "fsdp"),
        "stacked_columns": (None, None, "fsdp"),
    },
    "others": {
        "bias": (),
        "columns": ("fsdp", None),
        "rows": (None, "fsdp"),
        "stack": (None, None, "fsdp"),
        "stacked_columns": (None, "fsdp"),
    },
    "both": {
        "bias": ("tensor",),
        "columns": ("tensor", "fsdp"),
        "rows": (("fsdp", "data"), "tensor"),
        "stack": (None, "tensor", "fsdp"),
        "stacked_columns": (None, "fsdp", "tensor"),
    },
    "stacks": {
        "bias": (),
        "columns": ("data",),
        "rows": ("tensor", None),
        "stack": ("tensor", None, "fsdp"),
        "stacked_columns": ("tensor", "fsdp"),
    },
}


def make_mesh(name: str, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    axes = MESHES[name]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def shardings(
    mesh: jax.sharding.Mesh, placement: str, leaves: Leaves = LEAVES
) -> dict[str, NamedSharding]:
    def axis(entry: Any) -> Any:
        if isinstance(entry, tuple):
            return tuple(name for name in entry if name in mesh.shape) or None
        return entry if entry in mesh.shape else None

    return {
        leaf.name: NamedSharding(mesh, PartitionSpec(*map(axis, PLACEMENTS[placement][leaf.name])))
        for leaf in leaves
    }


def pieces(leaves: Leaves, shardings: dict[str, NamedSharding]) -> list[int]:
    """Returns the number of pieces of each leaf's channel axis."""
    counts = []
    for leaf in leaves:
        cut = shardings[leaf.name].shard_shape(leaf.shape)
        counts.append(1 if leaf.axis is None else leaf.shape[leaf.axis] // cut[leaf.axis])
    return counts


def assert_agrees(training: Training, plan: Plan) -> Reference:
    """Compares a run with a reference that knows the shards; checks that no array moved."""
    before = comparisons.describe((training.params, training.state))
    slow = comparisons.assert_agrees(training, plan, pieces(training.leaves, training.shardings))
    assert comparisons.describe((training.params, training.state)) == before
    return slow
