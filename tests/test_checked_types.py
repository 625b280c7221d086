"""The annotations of the library hold in the tests that are not slow."""

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from tests.checked_types import CHECKED_CALLS, _checked, check_types, checked
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


def test_functions_that_are_defined_again_share_checks_if_their_annotations_are_the_same():
    def define(kind, default):
        @jaxtyping.jaxtyped(typechecker=checked)
        def inner(x: kind = default) -> kind:
            return x

        return inner

    define(int, 0)()
    known = len(_checked)
    number, word, same = define(int, 1), define(str, "one"), define(int, 2)
    assert (number(3), word(), same()) == (3, "one", 2)
    assert len(_checked) == known + 2  # of `word`, before its call and after it
    for function, wrong in ((number, "one"), (word, 1), (same, "one")):
        with pytest.raises(jaxtyping.TypeCheckError, match="inner"):
            function(wrong)


def test_each_test_checks_the_first_calls_of_a_function():
    @jaxtyping.jaxtyped(typechecker=checked)
    def inner(x: int) -> int:
        return x

    for _ in range(2):
        check_types(True)  # as before each test
        for x in range(CHECKED_CALLS):
            with pytest.raises(jaxtyping.TypeCheckError, match="inner"):
                inner(str(x))
        assert inner("unchecked") == "unchecked"


def test_a_wrong_result_is_found():
    @jaxtyping.jaxtyped(typechecker=checked)
    def inner(x: int) -> str:
        return x

    with pytest.raises(jaxtyping.TypeCheckError, match="return value"):
        inner(1)
