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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leaves", "changes"),
    [(SECOND, {"rolling": False}), (SCANNED, {"full_warm_up_rounds": 0})],
    ids=["together", "stacks in ranges"],
)
def test_no_large_program_is_compiled_after_the_second_step_and_no_bit_is_another(
    leaves, changes, monkeypatch
):
    settings, histories = dataclasses.replace(SETTINGS, **changes), []
    for on in True, False:
        monkeypatch.setenv("ZENFLOW_JAX_COMPILE_AHEAD", str(int(on)))
        jax.clear_caches()  # other tests have the same programs
        with Training(leaves, settings) as training, compilations() as names:
            training.go(2)
            assert names
            names.clear()
            # The warm-up's end, selections, windows, and steps that are compared.
            histories.append(training.history(runs.Plan(20, bad=(5, 9), flush_at=(8,))))
            assert training.engine.stats.reselections > (4 if settings.rolling else 2)
            assert bool(slow(names)) != on
    comparisons.assert_same_bits(*histories)


def test_arrays_that_were_not_expected_are_no_error_and_what_cannot_be_compiled_is_one():
    ahead = Ahead()
    sums, wrong = (jax.jit(lambda x, y=y: x @ jax.numpy.ones(y)) for y in ((3,), (5, 5)))
    for name, program in (("sums", sums), ("wrong", wrong)):
        ahead.prepare(name, program, jax.ShapeDtypeStruct((3,), "float32"))
    for shape, dtype in (((3,), "float32"), ((4, 3), "float32")):
        assert (ahead.call("sums", sums, jax.numpy.ones(shape, dtype)) == 3).all()
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
