"""Stacks of layers that close their windows in ranges, on a mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import zenflow_jax
from tests import comparisons, meshes
from tests.meshes import STALE, assert_agrees
from tests.resuming import put_by_name
from tests.runs import Leaf, Leaves, Plan, Training

LEAVES: Leaves = (Leaf("rows", (16, 8), -2, "float32"), Leaf("stack", (6, 16, 8), -2, "bfloat16"))
PLAN = Plan(12, bad=(6,), flush_at=(9,))


def shardings(placement, kind=AxisType.Auto):
    return meshes.shardings(meshes.make_mesh("three", kind), placement, LEAVES)


@pytest.mark.parametrize(
    ("placement", "kind", "more"),
    [
        ("replicated", AxisType.Auto, {"donate": True}),
        ("both", AxisType.Auto, {"donate": True}),
        ("both", AxisType.Explicit, {"offload": False}),
    ],
    ids=["replicated", "cut", "in-graph"],
)
def test_ranges_on_a_mesh_equal_the_reference(placement, kind, more):
    with Training(LEAVES, STALE, shardings=shardings(placement, kind), **more) as training:
        assert [len(leaf.spec.groups) for leaf in training.state.leaves] == [1, 3]
        slow = assert_agrees(training, PLAN)
        assert len(slow.turns) == 4


def test_a_checkpoint_in_ranges_goes_on_on_a_mesh_but_not_where_it_divides_layers():
    with Training(LEAVES, STALE, donate=True) as training:
        training.go(7)
        saved = jax.tree.map(np.asarray, (training.params, training.state, training.engine.state()))
        training.go(12)
        training.flush()
        expected = training.values()
    for placement in "replicated", "stacks":
        with Training(LEAVES, STALE, shardings=shardings(placement), donate=True) as training:
            both = put_by_name(saved[:2], (training.params, training.state))
            if placement == "stacks":
                with pytest.raises(ValueError, match="A mesh may divide the layers of a stack"):
                    zenflow_jax.HostEngine(*both, engine_state=saved[2])
                continue
            (training.params, training.state), training.t = both, 7
            training.renew(engine_state=saved[2])
            training.go(12)
            training.flush()
            comparisons.assert_close([training.values()], [expected])
