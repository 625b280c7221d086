"""8-bit moments keep their parameters' shardings, and updates need no other device."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import zenflow_jax


@pytest.mark.usefixtures("promotion_as_users_have_it")
@pytest.mark.parametrize(
    ("spec", "axis_type"),
    [
        (("a", "b"), AxisType.Auto),
        (("b",), AxisType.Explicit),
        ((None, ("a", "b")), AxisType.Auto),
    ],
)
def test_codes_and_scales_are_sharded_like_the_parameter_and_updates_stay_local(spec, axis_type):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(axis_type,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    tx = zenflow_jax.compact(optax.adamw(1e-3))
    with jax.set_mesh(mesh):
        params = jax.device_put(jnp.ones((64, 512)), sharding)
        state = tx.init(params)
        update = jax.jit(tx.update).lower(params, state, params).compile()
        _, new = update(params, state, params)
    arrays = jax.tree.leaves((state[0].mu, state[0].nu, new[0].mu, new[0].nu))
    assert len(arrays) == 8
    assert all(x.sharding.is_equivalent_to(sharding, 2) for x in arrays)
    text = update.as_text()
    assert not any(f" {name}" in text for name in ("all-", "collective-", "reduce-scatter"))
