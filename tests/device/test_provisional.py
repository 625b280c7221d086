"""Provisional steps: how a deferred weight moves between its updates.

`test_agreement.py` compares whole runs with the reference; this file checks single steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenflow_jax
from tests.device.small_runs import exchanged
from zenflow_jax._device.step import _pack_signs, _unpack_signs

RATE, SHARE = 2.0**-6, 0.5
OPTIONS = {"topk_ratio": 0.25, "update_interval": 4, "provisional_share": SHARE}


def trained(params, gradients, **options):
    """Returns the parameters after each step."""
    tx = zenflow_jax.zenflow(**{"learning_rate": RATE, **OPTIONS, **options})
    state, seen = tx.init(params), []

    @jax.jit
    def step(params, state, gradient):
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    with jax.numpy_dtype_promotion("standard"):
        for gradient in gradients:
            params, state = step(params, exchanged(state), gradient)
            seen.append(np.asarray(params, np.float32))
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_deferred_weight_moves_against_its_sign_by_a_share_of_the_rate(dtype):
    params = jnp.linspace(-2, 2, 24, dtype=dtype).reshape(8, 3)
    gradient = jnp.asarray(np.resize([3, -1e-30, 0, 1e-30, -5], (8, 3)), dtype)
    none, first, second = trained(params, [gradient * 0, *[gradient] * 2])
    start = np.asarray(params, np.float32)
    np.testing.assert_array_equal(none[2:], start[2:])
    # The first two channels are selected.
    old = start[2:]
    for new in (first[2:], second[2:]):
        step = np.float32(SHARE * RATE) * np.sign(np.asarray(gradient, np.float32)[2:])
        old = np.asarray(jnp.asarray(old - step, dtype), np.float32)
        np.testing.assert_array_equal(new, old)


def test_no_step_changes_a_small_float16_to_zero():
    params = jnp.full((8, 3), 3e-5, jnp.float16)
    first, second = trained(params, [params] * 2, learning_rate=2.0**-20)
    np.testing.assert_array_equal(first[2:], np.float32(np.float16(3e-5)))
    moved = np.float16(np.float32(np.float16(3e-5)) - np.float32(2.0**-21))
    np.testing.assert_array_equal(second[2:], np.float32(moved))


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint32])
def test_signs_are_packed_without_a_concatenation_and_unpacked_with_one(dtype):
    # jax 0.10.2 and 0.11.0 miscompile a concatenation of a concatenation on GPUs.
    def joined(signs):
        return _pack_signs(jnp.concatenate([signs, -signs]), 0, dtype)

    signs = jnp.asarray(np.resize([1, 0, -1, 1], (23, 3)), jnp.float32)
    packed = joined(signs)
    assert len(packed) == 2  # 46 rows leave a remainder
    assert str(jax.make_jaxpr(joined)(signs)).count("concatenate") == 1
    unpack = lambda *packed: _unpack_signs(packed, 0, 46)  # noqa: E731
    assert str(jax.make_jaxpr(unpack)(*packed)).count("concatenate") == 1
    np.testing.assert_array_equal(unpack(*packed), np.concatenate([signs, -signs]))
