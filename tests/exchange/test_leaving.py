"""Leaving the `with` block of an engine hides neither what is lost nor an exception of the user."""

import pytest

from tests.resuming import SETTINGS
from tests.runs import FIRST, Training


@pytest.mark.parametrize("call", [Training.flush, Training.fail_elsewhere, lambda _: None])
def test_an_exception_leaves_the_with_block_as_it_is(call):
    training, error = Training(FIRST, SETTINGS), KeyError("the user's")

    def leave():
        with training.engine:
            training.go(7)
            call(training)
            raise error

    with pytest.raises(KeyError) as caught:
        leave()
    assert caught.value is error
    assert error.__cause__ is error.__context__ is None


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (Training.fail_elsewhere, "process 1 failed: the memory is gone"),
        (lambda _: None, "never reached the param"),
    ],
    ids=["a failure that the caller has not heard of", "without a flush"],
)
def test_a_block_that_ends_with_updates_under_way_ends_with_an_error(last, words):
    def leave():
        with training.engine:
            training.go(7)
            last(training)

    training = Training(FIRST, SETTINGS)
    with pytest.raises(RuntimeError, match=words):
        leave()
