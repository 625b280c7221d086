"""Stacks of layers that close their windows in ranges, on a mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import zenflow_jax
from tests import comparisons, meshes, runs
from tests.meshes import STALE
from tests.resuming import put_by_name
from tests.runs import Leaf, Plan, Training

LEAVES: runs.Leaves = (
    Leaf("layers", (6, 16, 8), -2, "bfloat16"),
    Leaf("rows", (16, 8), -2, "float32"),
)
PLAN = Plan(12, bad=(6,), flush_at=(9,))
ENGINE = dict(threads=1, host_kernel="numpy", donate=True)
PLACEMENTS = {
    "replicated": {"layers": (), "rows": ()},
    "cut": {"layers": (None, "tensor", "fsdp"), "rows": ("fsdp", None)},
    "by layers": {"layers": ("tensor",), "rows": ()},
}


def shardings(placement, kind=AxisType.Auto):
    mesh = meshes.make_mesh("three", kind)
    entries = PLACEMENTS[placement].items()
    return {name: NamedSharding(mesh, PartitionSpec(*axes)) for name, axes in entries}


def places_of(training):
    arrays = jax.tree.leaves((training.params, training.state))
    return [x.sharding.devices_indices_map(x.shape) for x in arrays]


@pytest.mark.parametrize(
    ("placement", "kind", "more"),
    [
        ("replicated", AxisType.Auto, ENGINE),
        ("cut", AxisType.Auto, ENGINE),
        ("cut", AxisType.Explicit, {"offload": False}),
    ],
    ids=["replicated", "cut", "in-graph"],
)
def test_ranges_on_a_mesh_equal_the_reference(placement, kind, more):
    places = shardings(placement, kind)
    shards = meshes.pieces(LEAVES, places)
    expected, slow = comparisons.reference(LEAVES, STALE, PLAN, shards=shards)
    assert len(slow.turns) == 4
    with Training(LEAVES, STALE, shardings=places, **more) as training:
        assert [len(leaf.spec.groups) for leaf in training.state.leaves] == [3, 1]
        before = places_of(training)
        comparisons.assert_agree(training.history(PLAN), expected)
        assert places_of(training) == before


def test_a_checkpoint_in_ranges_goes_on_on_a_mesh_but_not_where_it_divides_layers():
    with Training(LEAVES, STALE, **ENGINE) as training:
        training.go(7)
        saved = jax.tree.map(np.asarray, (training.params, training.state, training.engine.state()))
        training.go(12)
        training.flush()
        expected = training.values()
    for placement in "replicated", "by layers":
        with Training(LEAVES, STALE, shardings=shardings(placement), **ENGINE) as training:
            both = put_by_name(saved[:2], (training.params, training.state))
            if placement == "by layers":
                with pytest.raises(ValueError, match="ranges of .*layers.* 3, got 1"):
                    zenflow_jax.HostEngine(*both, engine_state=saved[2])
                continue
            (training.params, training.state), training.t = both, 7
            training.renew(engine_state=saved[2])
            training.go(12)
            training.flush()
            comparisons.assert_close([training.values()], [expected])
