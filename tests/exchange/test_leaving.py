"""Leaving the `with` block of an engine says what is lost, and hides no exception of the user."""

import copy

import pytest

from tests.resuming import SETTINGS, fail_elsewhere
from tests.runs import FIRST, Training


def fail(training):
    fail_elsewhere(training.engine)


def be_interrupted(training):
    def interrupt(*_):
        raise KeyboardInterrupt

    training.engine._updates.collect = interrupt
    with pytest.raises(KeyboardInterrupt):
        training.go(1)


THEIRS = KeyError("the user's")
LOST = [
    "closed after step 7 with updates that never reached the parameters",
    "from the last checkpoint",
    "HostEngine(params, opt_state, engine_state=...)",
]


@pytest.mark.parametrize(
    ("error", "steps", "calls", "words"),
    [
        (THEIRS, 7, [], LOST),
        (THEIRS, 2, [], []),  # all of them have reached them
        (THEIRS, 7, [Training.flush, lambda training: training.engine.close()], []),
        (THEIRS, 7, [fail], ["the engine has failed as well: process 1 failed: the memory"]),
        # That is what is raised.
        (RuntimeError("process 1 failed: the memory is gone. Deferred"), 7, [fail], []),
        (KeyboardInterrupt(), 5, [be_interrupted], ["interrupted in a call after step 5"]),
    ],
    ids=["lost", "nothing lost", "flushed", "failed", "raised", "interrupted"],
)
def test_an_exception_leaves_the_with_block_as_it_is_with_a_note_of_what_is_lost(
    error, steps, calls, words
):
    training = Training(FIRST, SETTINGS)
    error = copy.copy(error)  # notes stay with an exception

    def leave():
        with training.engine:
            training.go(steps)
            for call in calls:
                call(training)
            raise error

    with pytest.raises(type(error)) as caught:
        leave()
    assert caught.value is error
    assert error.__cause__ is error.__context__ is None
    notes = getattr(error, "__notes__", [])
    assert len(notes) == bool(words)
    assert all(word in note for note in notes for word in words)


@pytest.mark.parametrize(
    ("last", "words"),
    [(fail, "process 1 failed: the memory is gone"), (lambda _: None, "never reached the param")],
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
