"""What zenflow makes devices say to each other, counted in compiled programs."""

import math

import jax
import optax
import pytest

import zenflow_jax
from benchmarks.collectives import collectives, compiled_step, placements

N = 4096
GRADIENT = N * N * 2  # bytes, bfloat16


def of_sgd_and_zenflow(sharding):
    """What devices say to each other in a step of either."""
    tx = zenflow_jax.zenflow(1e-3, topk_ratio=0.05, max_grad_norm=1.0)
    with jax.numpy_dtype_promotion("standard"):  # optax is not strict-clean
        return [collectives(compiled_step(x, sharding, N).as_text()) for x in (optax.sgd(1e-3), tx)]


@pytest.mark.parametrize(
    "name",
    [
        "channels over fsdp",
        "the other axis over fsdp",
        "channels over tensor, the other over fsdp",
    ],
)
def test_a_step_adds_the_scores_to_what_devices_exchange_and_nothing_else(name):
    sharding = placements(jax.devices())[name]
    base, ours = of_sgd_and_zenflow(sharding)
    added = sum(c.nbytes for c in ours) - sum(c.nbytes for c in base)
    assert len(base) > 0
    # Four bytes a channel, and the leaf's sum for the norm.
    assert 0 < added <= 4 * N + 4
    assert GRADIENT > 2000 * added


@pytest.mark.parametrize(
    "name",
    [
        "replicated over data",
        "the other axis over fsdp, replicated over data",
        "channels over fsdp, the other over tensor, replicated over data",
    ],
)
def test_where_devices_hold_copies_a_step_adds_the_selected_rows_too(name):
    sharding = placements(jax.devices())[name]
    base, ours = of_sgd_and_zenflow(sharding)
    # Of the block that a device has 5 % of its channels, rounded up. The compiler for CPUs makes
    # four bytes of bfloat16's two, in the sum of the gradients too.
    rows = math.prod(sharding.shard_shape((N, N))) * 4 * 0.051
    added = sum(c.nbytes for c in ours) - sum(c.nbytes for c in base)
    assert 0.04 / 0.05 * rows < added <= rows + 4 * N + 4
    # And the gradient is summed where it was, over those devices that hold copies.
    assert [c for c in ours if c.nbytes > rows] == [c for c in base if c.nbytes > rows]
