"""An interrupted or failed call never counts as completed, at whichever line it ends."""

import contextlib
import dataclasses
import inspect
import re
import sys

import jax
import numpy as np
import pytest

from tests.runs import CALM, FEW, Training
from zenflow_jax import _engine
from zenflow_jax._exchange.lifecycle import Lifecycle

#: Nothing but updates moves the deferred weights, and all windows close together.
SETTINGS = dataclasses.replace(CALM, update_interval=2, rolling=False, provisional_share=None)
ENGINE = inspect.getfile(_engine)


class Interruption:
    """Raises `KeyboardInterrupt` at the start of a line, the number `at`, of the engine's code."""

    def __init__(self, at: int):
        self.left, self.where = at, ""

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _trace(self, frame, event, arg):
        code = frame.f_code
        if code.co_filename != ENGINE and code is not inspect.unwrap(Lifecycle.change).__code__:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = f"{code.co_name}, line {frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace


def call(training, method):
    """Calls a method of the engine with the last results; returns the parameters."""
    if method in ("exchange", "flush"):
        training.params, training.state = getattr(training.engine, method)(
            training.params, training.state
        )
    elif method == "state":
        training.engine.state()
    else:
        training.engine.snapshot().close()
    return jax.tree.map(np.asarray, training.params)


def begun(method):
    """Returns a run whose last update is pending, before the call of `method`."""
    training = Training(FEW, SETTINGS)
    training.go(3 if method == "exchange" else 4)
    if method == "exchange":
        training.step()
    return training


def closed(engine, caplog):
    engine.close()
    return caplog.text


def left(engine, caplog):
    with pytest.raises(RuntimeError) as caught, engine:
        pass
    return str(caught.value)


@pytest.mark.parametrize(
    ("method", "end"),
    [
        *((method, None) for method in ("exchange", "flush", "state", "snapshot")),
        *((method, left) for method in ("exchange", "flush", "state")),
        ("flush", closed),
    ],
)
def test_after_an_interruption_the_call_can_be_repeated_or_the_loss_is_reported(
    method, end, caplog
):
    with begun(method) as undisturbed:
        expected = call(undisturbed, method)
        undisturbed.flush()
    lines = 0
    while True:
        lines += 1
        training = begun(method)
        engine = training.engine
        interruption = Interruption(lines)
        with contextlib.suppress(KeyboardInterrupt), interruption:
            call(training, method)
        if not interruption.where:
            break  # the call has fewer lines
        caplog.clear()
        if end is not None:
            assert re.search("never reached the parameters|was interrupted", end(engine, caplog))
            continue
        with contextlib.ExitStack() as stack:
            if training.engine._lifecycle.interrupted:
                stack.enter_context(pytest.raises(RuntimeError, match="was interrupted"))
            again = call(training, method)
            jax.tree.map(np.testing.assert_array_equal, again, expected)
        engine.close()
    training.engine.close()
    assert lines > 5
