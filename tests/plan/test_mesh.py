"""Where the parts of blocks are that several devices hold; decided without a device."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from zenflow_jax._plan.resolve import LeafRules, resolve_specs

# No part is cut along an axis of one.
MESH = AbstractMesh((2, 4, 1), ("data", "fsdp", "model"))


@pytest.mark.parametrize(
    ("shape", "axis", "block", "part"),
    [
        # The last axis first.
        ((16, 8, 8), -3, (), ((), (), ("data", "fsdp"))),
        # As far as it goes; then the one before.
        ((16, 8, 6), -3, (), ((), ("fsdp",), ("data",))),
        # What divides the block divides the part as before, inside of which it is cut on.
        ((16, 8), -2, (None, "fsdp"), ((), ("fsdp", "data"))),
        ((16, 4), -2, (None, "fsdp"), ((), ("fsdp",))),
        # Neither the channels nor the entries of a stack, whatever their sizes.
        ((8, 16, 3), -2, (), ((), (), ())),
        ((3, 16), -1, (), ((), ())),
    ],
    ids=str,
)
def test_parts_are_cut_along_the_last_axis_first_and_never_along_stacks_or_channels(
    shape, axis, block, part
):
    (spec,) = resolve_specs(
        [jax.ShapeDtypeStruct(shape, jnp.float32)],
        LeafRules(0.2, axis, resident=None, partition_replicated=True, transfer_dtype=None),
        param_shardings=[NamedSharding(MESH, PartitionSpec(*block))],
        mask=None,
    )
    assert spec.placement.part == part
