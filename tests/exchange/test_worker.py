"""The worker: waits, independence of timing, failures, and shutdown.

Hooks slow the worker down until they are released. Tests check the order of events, never the
clock.
"""

import functools
import gc
import threading
import weakref

import jax
import pytest

from tests import comparisons, processes, runs
from tests.exchange.hooks import hooked
from tests.runs import BUSY, CALM, FEW, TOGETHER, Plan, Settings, Training
from zenflow_jax._exchange.messages import Update
from zenflow_jax._exchange.worker import Worker

TIMEOUT_S = 60  # after this time, a test that hangs fails

PLAN = Plan(14, bad=(5,), flush_at=(8,))
FIVE = tuple(runs.Leaf(f"w{i}", (6, 4), -2, "float32") for i in range(5))


@pytest.fixture
def hooks(monkeypatch):
    return hooked(monkeypatch)


@pytest.fixture
def passes(hooks):
    """Blocks the worker before each piece of an update until the test releases a semaphore."""
    passes = threading.Semaphore(1000)
    hooks.update = lambda: passes.acquire(timeout=TIMEOUT_S)
    return passes


def take_all(passes):
    while passes.acquire(blocking=False):
        pass


@functools.cache
def undisturbed(settings, leaves=FEW):
    """Returns the parameters after each of twelve steps."""
    with Training(leaves, settings) as training:
        return [values for _, values in training.follow(Plan(12))]


@pytest.mark.slow
def test_a_run_is_bit_identical_with_any_timing_of_the_worker(hooks, monkeypatch):
    with Training(FEW, BUSY) as training:
        expected = training.history(PLAN)

    # Early: the worker has finished its work before each step.
    with Training(FEW, BUSY) as training:
        for t, values in training.follow(PLAN):
            training.settle()
            comparisons.assert_same_bits(values, expected.params[t - 1])
        comparisons.assert_same_bits(training.moments(), expected.moments)

    # Late: the worker works only while the caller waits for it.
    waiting, wait = threading.Event(), Worker.wait

    def wait_and_let_work(*args):
        waiting.set()
        try:
            return wait(*args)
        finally:
            waiting.clear()

    def be_late():
        assert waiting.wait(TIMEOUT_S)

    hooks.mail = hooks.update = be_late
    with Training(FEW, BUSY) as training:
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "wait", wait_and_let_work)
            for t, values in training.follow(PLAN):
                comparisons.assert_same_bits(values, expected.params[t - 1])
        waiting.set()
        comparisons.assert_same_bits(training.moments(), expected.moments)


def test_an_update_as_long_as_a_window_blocks_no_exchange_before_its_boundary(passes):
    expected = undisturbed(TOGETHER, FIVE)
    with Training(FIVE, TOGETHER) as training:
        training.go(7)
        training.settle()
        take_all(passes)
        # Closes a window whose update cannot begin; the mail of two more steps fits in the queue.
        training.go(3)
        (update,) = training.on_their_way
        for mail in training.unread:
            mail.arrived.result(TIMEOUT_S)  # otherwise the next piece would come first
        # After one of five pieces, the worker takes these in before the next piece.
        passes.release()
        training.go(1)
        assert not update.done()
        comparisons.assert_same_bits(training.values(), expected[10])
        # The boundary waits for the update.
        threading.Timer(0.1, passes.release, [1000]).start()
        training.go(1)
        assert update.done()
        comparisons.assert_same_bits(training.values(), expected[11])


@pytest.mark.parametrize(
    ("settings", "before", "hook", "calls", "words"),
    [
        (TOGETHER, 7, "update", 2, r"leaf \['rows'\], window 2"),
        (BUSY, 1, "update", 1, "the hand-over after window 1"),
        (CALM, 1, "mail", 1, "the mail of step 2, window 1"),
    ],
    ids=["update", "hand-over", "mail"],
)
def test_a_failure_of_the_worker_is_raised_with_its_position_by_all_later_calls(
    hooks, settings, before, hook, calls, words
):
    made = []

    def explode():
        made.append(None)
        if len(made) == calls:
            raise FloatingPointError("moment is nan")

    def go_until_failed():
        training.go(1)
        await_end(training)
        training.go(1)

    with Training(FEW, settings) as training:
        training.go(before)
        training.settle()
        setattr(hooks, hook, explode)
        with pytest.raises(RuntimeError, match=f"{words}: moment is nan") as caught:
            go_until_failed()
        assert isinstance(caught.value.__cause__, FloatingPointError)
        for call in (training.exchange, training.flush, training.exchange):
            with pytest.raises(RuntimeError, match="the host worker failed at .*: moment is nan"):
                call()
        training.engine.close()


def await_end(training):
    """Waits until the worker has ended, after a failure."""
    thread = training.engine._worker._thread
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def fail(training):
    """Makes the worker fail, unknown to the caller."""
    training.engine._worker.post(Update(len(training.host.counted), []))  # there is no such group
    await_end(training)


def assert_ended(before):
    """Checks that no new thread remains; some threads end shortly after they are told to."""
    for thread in set(threading.enumerate()) - before:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), thread.name


def test_close_during_work_returns_after_the_current_piece(passes, monkeypatch):
    request_stop = Worker.request_stop

    def request_stop_and_end_the_piece(worker):
        request_stop(worker)
        passes.release()  # earlier, the worker could begin the next piece

    monkeypatch.setattr(Worker, "request_stop", request_stop_and_end_the_piece)
    before = set(threading.enumerate())
    with Training(FIVE, TOGETHER) as training:
        training.go(7)
        training.settle()
        take_all(passes)
        training.go(1)
        closing = threading.Thread(target=training.engine.close)
        closing.start()
        closing.join(TIMEOUT_S / 2)  # a worker that continues waits longer for a permit
        assert not closing.is_alive()
        assert_ended(before)


def test_an_engine_that_is_collected_on_its_own_thread_does_not_hang(hooks):
    # The collector runs wherever memory is allocated, even on a kernel's thread.
    forgotten = threading.Event()

    def collect():
        assert forgotten.wait(TIMEOUT_S)
        gc.collect()

    hooks.mail = collect

    def run():
        training = Training(FEW, BUSY, threads=2)
        training.go(1)
        training.engine.itself = training.engine  # a cycle, as in a trainer
        return weakref.ref(training.engine)

    before = set(threading.enumerate())
    gc.disable()
    try:
        engine = run()
    finally:
        gc.enable()
    forgotten.set()
    assert_ended(before)
    assert engine() is None


@pytest.mark.parametrize("call", [Training.flush, fail, lambda _: None])
def test_an_exception_leaves_the_with_block_unchanged(call, monkeypatch, caplog):
    training, error = Training(FEW, TOGETHER), KeyError("the user's")
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def leave():
        with training.engine:
            training.go(7)
            call(training)
            raise error

    with pytest.raises(KeyError) as caught:
        leave()
    assert caught.value is error
    assert error.__cause__ is error.__context__ is None
    # jax's own message, in the other process, does not give the reason.
    (told,) = caplog.messages
    assert 'Process 0 leaves the run: KeyError("the user\'s")' in told


def test_a_block_that_ends_after_a_failure_that_was_never_raised_raises_it():
    def leave():
        with training.engine:
            training.go(7)
            fail(training)

    training = Training(FEW, TOGETHER)
    with pytest.raises(RuntimeError, match="the host worker failed at .*: list index"):
        leave()


def leave_open():
    """Leaves engines open, as a user's script may."""
    leaf = runs.Leaf("w", (2048, 1024), -2, "float32")
    settings = Settings(topk_ratio=0.1, update_interval=1, select_interval=100)
    idle, at_work = (Training((leaf,), settings, threads=2) for _ in range(2))
    globals()["kept"] = idle, at_work
    at_work.go(3)
    (update,) = at_work.on_their_way
    assert not update.done()


@pytest.mark.slow
def test_the_interpreter_exits_with_idle_and_busy_engines_left_open():
    text = processes.assert_ends(processes.start_process("exchange.test_worker", "leave_open"))
    assert text.count("never reached the parameters") == 1  # only one engine has taken a step
