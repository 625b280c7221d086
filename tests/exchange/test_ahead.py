"""What boundaries need is compiled while the first step is, on another thread."""

import contextlib
import dataclasses
import logging
import threading

import jax
import pytest

from tests import comparisons, runs
from tests.runs import FIRST, SCANNED, SECOND, Settings, Training
from zenflow_jax._exchange.ahead import Ahead

SETTINGS = Settings(topk_ratio=0.3, update_interval=3, select_interval=6, full_warm_up_rounds=4)


@pytest.fixture(autouse=True)
def ahead(monkeypatch):
    monkeypatch.setenv("ZENFLOW_JAX_COMPILE_AHEAD", "1")


class Compiled(logging.Handler):
    """The names of the programs that this thread has compiled, or found compiled on disk."""

    def __init__(self):
        super().__init__()
        self.names = []
        self._thread = threading.get_ident()

    def emit(self, record):
        message = record.getMessage()
        if message.startswith("Compiling ") and record.thread == self._thread:
            self.names.append(message.split()[1])


@contextlib.contextmanager
def compilations():
    handler, logger = Compiled(), logging.getLogger("jax")
    logger.addHandler(handler)
    jax.config.update("jax_log_compiles", True)
    propagates, logger.propagate = logger.propagate, False
    try:
        yield handler.names
    finally:
        jax.config.update("jax_log_compiles", False)
        logger.propagate = propagates
        logger.removeHandler(handler)


def slow(names):
    """Those that grow with the number of leaves."""
    return [x for x in names if any(part in x for part in ("merge", "choose", "enter"))]


@pytest.mark.parametrize(
    ("leaves", "changes"),
    [
        pytest.param(SECOND, {}, marks=pytest.mark.slow),
        (SECOND, {"rolling": False}),
        (SCANNED, {"full_warm_up_rounds": 0}),
    ],
    ids=["in turn", "together", "stacks in ranges"],
)
def test_no_large_program_is_compiled_after_the_second_step(leaves, changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    jax.clear_caches()  # other tests have the same programs
    with Training(leaves, settings) as training, compilations() as names:
        training.go(2)
        assert names
        names.clear()
        # The warm-up's end, selections, windows, and steps that are compared.
        training.go(18)
        assert training.engine.stats.reselections > (4 if settings.rolling else 2)
        assert not slow(names)


def test_it_is_the_variable_that_has_them_compiled_ahead(monkeypatch):
    monkeypatch.setenv("ZENFLOW_JAX_COMPILE_AHEAD", "0")
    jax.clear_caches()
    with Training(SECOND, SETTINGS) as training, compilations() as names:
        training.go(2)
        names.clear()
        training.go(18)
        assert slow(names)


@pytest.mark.slow
def test_what_was_compiled_ahead_gives_the_bits_of_what_was_not(monkeypatch):
    settings = dataclasses.replace(SETTINGS, full_warm_up_rounds=0)  # as above
    histories = []
    for on in "1", "0":
        monkeypatch.setenv("ZENFLOW_JAX_COMPILE_AHEAD", on)
        with Training(SCANNED, settings) as training:
            histories.append(training.history(runs.Plan(14, bad=(3, 9), flush_at=(8,))))
    comparisons.assert_same_bits(*histories)


def test_arrays_that_were_not_expected_are_no_error():
    ahead = Ahead()
    double = jax.jit(lambda x: 2 * x)
    ahead.prepare("double", double, jax.ShapeDtypeStruct((3,), "float32"))
    for size, dtype in ((3, "float32"), (4, "float32"), (3, "int32")):
        x = jax.numpy.ones(size, dtype)
        assert ahead.call("double", double, x).tolist() == [2] * size
    ahead.close()


def test_what_cannot_be_compiled_is_an_error_where_it_is_called():
    ahead = Ahead()
    wrong = jax.jit(lambda x: x @ jax.numpy.ones((5, 5)))
    ahead.prepare("wrong", wrong, jax.ShapeDtypeStruct((3,), "float32"))
    with pytest.raises(TypeError, match="dot_general"):
        ahead.call("wrong", wrong, jax.numpy.zeros(3))
    ahead.close()


def test_an_engine_that_is_closed_compiles_no_more():
    with Training(FIRST, SETTINGS, host_kernel="numba"):
        compiling = [t for t in threading.enumerate() if t.name.startswith("zenflow-compile")]
        assert compiling
    for thread in compiling:
        thread.join(60)
        assert not thread.is_alive()
