"""The annotations of the library hold in the tests that are not slow."""

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from tests.checked_types import check_types
from zenflow_jax._device.adamw import add_gradient


@jax.jit
def add(factor):
    return add_gradient(jnp.zeros(3), jnp.ones(3), factor, jnp.bool_(True))


def test_a_wrong_shape_is_found():
    with pytest.raises(jaxtyping.TypeCheckError, match="add_gradient"):
        add(jnp.ones(1))


def test_what_was_traced_by_a_slow_test_is_traced_again():
    check_types(False)
    add(jnp.ones(3))
    check_types(True)
    with pytest.raises(jaxtyping.TypeCheckError, match="add_gradient"):
        add(jnp.ones(3))
