"""The signs that are kept until it is known whether a provisional step counts.

`test_agreement.py` compares runs with provisional steps with the reference.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zenflow_jax._device.step import _pack_signs, _unpack_signs


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
