"""Counts the bytes that zenflow makes devices exchange in compiled programs."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import zenflow_jax
from benchmarks.collectives import collectives

N = 4096
GRADIENT = N * N * 2  # bytes, bfloat16


def _on(shape, *entries):
    """Returns the matrix's sharding on all devices; its channels are along its first axis."""
    mesh = jax.make_mesh((*shape.values(),), (*shape,), axis_types=(AxisType.Auto,) * len(shape))
    return NamedSharding(mesh, P(*entries))


CUT = {"fsdp": 2, "tensor": 4}, "tensor", "fsdp"
COPIED = {"data": 8}, None
CUT_AND_COPIED = {"data": 2, "fsdp": 2, "tensor": 2}, "fsdp", "tensor"


def compiled_step(tx, sharding):
    """Compiles a training step with one `N` x `N` bfloat16 matrix and 64 examples per device."""
    mesh = sharding.mesh
    params = {"w": jax.ShapeDtypeStruct((N, N), jnp.bfloat16, sharding=sharding)}
    spread = NamedSharding(mesh, P(mesh.axis_names[0]))
    batch = jax.ShapeDtypeStruct((64 * mesh.size, N), jnp.bfloat16, sharding=spread)

    def step(params, state, batch):
        def loss(params):
            return jnp.sum(jnp.tanh(batch @ params["w"]).astype(jnp.float32) ** 2)

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step).lower(params, tx.init(params), batch).compile()


def of_sgd_and_zenflow(sharding):
    """Returns the collectives in a step with SGD, and in a step with zenflow."""
    tx = zenflow_jax.zenflow(1e-3, topk_ratio=0.05, max_grad_norm=1.0)
    with jax.numpy_dtype_promotion("standard"):  # optax promotes dtypes
        return [collectives(compiled_step(x, sharding).as_text()) for x in (optax.sgd(1e-3), tx)]


def test_a_zenflow_step_exchanges_only_scores_in_addition_to_an_sgd_step():
    base, zenflow = of_sgd_and_zenflow(_on(*CUT))
    added = sum(c.nbytes for c in zenflow) - sum(c.nbytes for c in base)
    assert len(base) > 0
    # Expects four bytes per channel, and the leaf's sum for the norm.
    assert 0 < added <= 4 * N + 4
    assert GRADIENT > 2000 * added


@pytest.mark.parametrize("placement", [COPIED, CUT_AND_COPIED], ids=["copied", "cut and copied"])
def test_with_copies_a_step_also_exchanges_the_selected_rows(placement):
    sharding = _on(*placement)
    base, zenflow = of_sgd_and_zenflow(sharding)
    # 5% of the channels in a device's block, rounded up. The compiler for CPUs widens bfloat16 from
    # two bytes to four, also in the gradients' sum.
    block = math.prod(sharding.shard_shape((N, N)))
    rows = block * 4 * 0.051
    added = sum(c.nbytes for c in zenflow) - sum(c.nbytes for c in base)
    # The block's signs, four to a byte, determine the provisional step.
    assert 0.04 / 0.05 * rows < added - block / 4 <= rows + 4 * N + 4
    # As before, the gradient is also summed over the devices that hold copies.
    assert [c for c in zenflow if c.nbytes > block] == [c for c in base if c.nbytes > block]


@pytest.mark.usefixtures("as_scripts_run")
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
    sharding = NamedSharding(mesh, P(*spec))
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
