"""`HostEngine`: its timing, its refusals, its end, and the forms a user may call it in.

What the arithmetic gives is `test_equality.py`'s. Here the worker is slowed down by a kernel that
does nothing until it is told to, and the order of events is what is looked at, never the clock.
"""

import dataclasses
import gc
import threading
import time
import weakref
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zenflow_jax
from tests import processes, runs
from tests.runs import FEW, Plan, Settings, Training
from zenflow_jax import HostEngine, _engine
from zenflow_jax._device import memory
from zenflow_jax._exchange import messages
from zenflow_jax._exchange.pinned import IN_FLIGHT
from zenflow_jax._exchange.worker import Worker
from zenflow_jax._host import state as host_state
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.state import HostState

TIMEOUT_S = 60  # after it a test that would hang fails instead

# Windows of three steps, channels change hands at each boundary.
BUSY = Settings(topk_ratio=0.3, update_interval=3, select_interval=3)
# Longer ones, without changes of hands after the first.
CALM = Settings(topk_ratio=0.3, update_interval=4, select_interval=400)
# The same, but all leaves close their windows together, and updates take as long as a window.
TOGETHER = dataclasses.replace(CALM, rolling=False)


class Gate:
    """Where the worker stops: every call of a kernel needs a pass."""

    def __init__(self):
        self._passes = threading.Semaphore(0)
        self._open = threading.Event()
        self._reached = threading.Event()
        self.log = []  # what passed, in order

    def let_through(self, count=1):
        self._passes.release(count)

    def open(self):
        self._open.set()
        self._passes.release(1)

    def shut(self):
        self._open.clear()
        while self._passes.acquire(blocking=False):
            pass

    def await_next(self, call):
        """Calls, then waits until the worker stands at the gate."""
        self._reached.clear()
        call()
        assert self._reached.wait(TIMEOUT_S)

    def pass_through(self, what):
        self._reached.set()
        assert self._open.is_set() or self._passes.acquire(timeout=TIMEOUT_S), f"stuck: {what}"
        self.log.append(what)


@pytest.fixture
def gate(monkeypatch):
    """A gate that is open, in front of every piece of an update; mail passes, but is noted."""
    gate = Gate()
    gate.open()

    class Noted(HostState):
        def add(self, *args):
            gate.log.append("mail")
            super().add(*args)

    class Gated(HostAdam):
        def adamw(self, *args):
            gate.pass_through("piece")
            yield from super().adamw(*args)

    monkeypatch.setattr(_engine, "HostState", Noted)
    monkeypatch.setattr(_engine, "HostAdam", Gated)
    return gate


def started(settings=BUSY, leaves=FEW, **more):
    return Training(leaves, settings, **{"host_kernel": "numpy", "threads": 1, **more})


PLAN = Plan(14, bad=(5,), flush_at=(8,))


@pytest.mark.slow
def test_a_run_gives_the_same_bits_whatever_the_timing_of_the_worker(monkeypatch):
    with started() as training:
        expected = training.history(PLAN)

    # Early: the worker has nothing left to do before each step.
    with started() as training:
        for t, values in training.follow(PLAN):
            training.settle()
            runs.assert_same_bits(values, expected.params[t - 1])
        runs.assert_same_bits(training.moments(), expected.moments)

    # Late: it does nothing unless the caller waits for it.
    waiting, wait = threading.Event(), Worker.wait

    class LateToRead(HostState):
        def add(self, *args):
            assert waiting.wait(TIMEOUT_S)
            super().add(*args)

    class Late(HostAdam):
        def adamw(self, *args):
            assert waiting.wait(TIMEOUT_S)
            yield from super().adamw(*args)

    def wait_and_let_work(worker, future, after):
        waiting.set()
        try:
            return wait(worker, future, after)
        finally:
            waiting.clear()

    monkeypatch.setattr(_engine, "HostState", LateToRead)
    monkeypatch.setattr(_engine, "HostAdam", Late)
    monkeypatch.setattr(Worker, "wait", wait_and_let_work)
    with started() as training:
        for t, values in training.follow(PLAN):
            runs.assert_same_bits(values, expected.params[t - 1])
        monkeypatch.setattr(Worker, "wait", wait)
        waiting.set()
        training.settle()
        runs.assert_same_bits(training.moments(), expected.moments)


@pytest.mark.parametrize(
    ("options", "unhindered", "hindered"),
    [
        # The eighth step closes a window, whose update arrives after the twelfth.
        (dict(rolling=False), 7, 4),
        # One leaf's window closes with the seventh, another's with the eighth; the first update
        # arrives after the tenth.
        (dict(staleness=3), 6, 3),
    ],
    ids=["together", "in turn"],
)
def test_no_exchange_waits_for_the_sums_of_a_window_before_its_update_is_due(
    monkeypatch, options, unhindered, hindered
):
    settings = dataclasses.replace(CALM, send_gradients="per_window", **options)
    copied = threading.Event()

    def copy_to_host(pieces):
        if threading.current_thread().name.startswith("zenflow-sums"):
            assert copied.wait(TIMEOUT_S)
        return memory.copy_to_host(pieces)

    with started(settings) as undisturbed:
        undisturbed.go(12)
        expected = undisturbed.values()
    monkeypatch.setattr(messages, "copy_to_host", copy_to_host)
    with started(settings) as training:
        copied.set()
        training.go(unhindered)
        training.settle()
        copied.clear()
        training.go(hindered)
        assert training.on_their_way
        assert not any(update.done() for update in training.on_their_way)
        copied.set()
        training.go(12 - training.t)
        runs.assert_same_bits(training.values(), expected)


@pytest.mark.parametrize(
    ("dtype", "transfer_dtype", "sending"),
    [
        ("float16", None, "during_step"),
        ("float16", None, "per_window"),
        ("bfloat16", np.float32, "during_step"),
        # Rounded, as the reference does.
        ("bfloat16", None, "during_step"),
        ("bfloat16", None, "per_window"),
    ],
)
def test_gradients_wider_than_their_leaves_reach_the_host_in_the_mails_dtype(
    dtype, transfer_dtype, sending
):
    # As after loss scaling: of float16 gradients of this size nothing would be left.
    leaves = (runs.Leaf("bias", (5,), None, dtype), runs.Leaf("rows", (12, 5), -2, dtype))

    def small(leaves, step, seed=0, bad=False):
        wide = tuple(leaf._replace(dtype="float32") for leaf in leaves)
        scale = np.float32(1e-9)
        return {n: scale * g for n, g in runs.gradients(wide, step, seed, bad).items()}

    settings = Settings(
        topk_ratio=0.3,
        update_interval=2,
        select_interval=4,
        eps=1e-15,
        send_gradients=sending,
        transfer_dtype=transfer_dtype,
    )
    plan = runs.Plan(7, flush_at=(7,))
    expected, _ = runs.reference(leaves, settings, plan, gradients=small)
    for offload in (False, True):
        kernel = {"host_kernel": "numpy"} if offload else {}
        with Training(leaves, settings, offload=offload, gradients=small, **kernel) as training:
            runs.assert_agree(training.history(plan), expected)


@pytest.mark.parametrize("sending", IN_FLIGHT)
def test_no_more_mail_is_unread_than_there_is_memory_for(sending):
    with started(dataclasses.replace(CALM, send_gradients=sending)) as training:
        unread = []
        for _ in range(4):
            training.go(1)
            unread.append(len(training.engine._mailbox._unread))
        training.flush()
    assert max(unread) == IN_FLIGHT[sending]


def test_how_many_mails_are_kept_does_not_change_a_bit(monkeypatch):
    settings = dataclasses.replace(BUSY, update_interval=8, select_interval=8)
    outcomes = []
    for kept in (0, 3, 100):
        monkeypatch.setattr(host_state, "MAILS_KEPT", kept)
        with started(settings) as training:
            host = training.engine._worker._host
            params = []
            for _, values in training.follow(PLAN._replace(steps=20)):
                training.settle()
                assert host.mails_kept <= kept
                params.append(values)
            outcomes.append((params, training.moments()))
    for outcome in outcomes[1:]:
        runs.assert_same_bits(outcome, outcomes[0])


@pytest.mark.parametrize(
    ("rolling", "early_bytes", "missing_bytes"),
    [
        # The update of the ninth step is of both leaves, and that of the twelfth, which is the last
        # one, has not reached its boundary.
        (False, [320, 80, 0], [0, 240, 320]),
        # The ninth step closes the second leaf's window. The last update is the fourteenth step's,
        # of the first leaf.
        (True, [240, 0, 0], [0, 0, 80]),
    ],
    ids=["together", "in turn"],
)
def test_how_much_is_prefetched_does_not_change_a_bit(rolling, early_bytes, missing_bytes):
    settings = dataclasses.replace(BUSY, rolling=rolling)
    outcomes, uploaded, early = [], [], []
    # The first offloaded leaf has 80 bytes, the next one 240.
    for prefetch_bytes in (None, 100, 0):
        with started(settings, prefetch_bytes=prefetch_bytes) as training:
            params = []
            for t, values in training.follow(PLAN):
                if t == 9:
                    training.settle()
                    # What is on its way lies on the device as far as it may.
                    (update,) = training.on_their_way
                    early.append(sum(x.nbytes for pieces in update.result() for x in pieces))
                params.append(values)
            training.settle()
            outcomes.append((params, training.moments()))
            uploaded.append(training.engine.stats.bytes_to_device)
    for outcome in outcomes[1:]:
        runs.assert_same_bits(outcome, outcomes[0])
    assert early == early_bytes
    assert uploaded == [uploaded[0] - missing for missing in missing_bytes]


FIVE = tuple(runs.Leaf(f"w{i}", (6, 4), -2, "float32") for i in range(5))


def test_an_update_as_long_as_a_window_makes_no_exchange_wait_before_its_boundary(
    gate, monkeypatch
):
    with started(TOGETHER, FIVE) as undisturbed:
        expected = [values for _, values in undisturbed.follow(Plan(12))]

    with started(TOGETHER, FIVE) as training:
        training.go(7)
        training.settle()
        gate.shut()
        gate.log.clear()
        gate.await_next(lambda: training.go(1))  # closes a window, whose update cannot begin
        (update,) = training.on_their_way
        # Two mails of the next window fit in the box while the worker is in a piece.
        training.go(2)
        assert gate.log.count("piece") == 0
        for mail in training.engine._mailbox._unread:
            mail.arrived.result(TIMEOUT_S)  # or the next piece would come first
        # One piece, and the third is taken: mail comes before the next piece.
        gate.let_through()
        training.go(1)
        gate.let_through()
        assert not update.done()
        runs.assert_same_bits(training.values(), expected[10])

        # At the boundary it is waited for, and only there.
        waited_for = []

        def note(worker, future, after, wait=Worker.wait):
            waited_for.append(future is update)  # it cannot be done while the gate is shut
            gate.open()
            return wait(worker, future, after)

        monkeypatch.setattr(Worker, "wait", note)
        training.go(1)
        assert any(waited_for)
        runs.assert_same_bits(training.values(), expected[11])
        training.settle()

    # The window's last mail, a piece of its update, mail of the next window, another piece.
    kinds = [kind for i, kind in enumerate(gate.log) if gate.log[i - 1 : i] != [kind]]
    assert kinds[:4] == ["mail", "piece", "mail", "piece"]
    assert gate.log.count("mail") == 5


def test_an_exchange_waits_for_no_update_but_the_one_that_is_due(gate, monkeypatch):
    settings = dataclasses.replace(CALM, staleness=2)
    with started(settings) as undisturbed:
        expected = [values for _, values in undisturbed.follow(Plan(12))]

    waited_for = []

    def note(worker, future, after, wait=Worker.wait):
        if not future.done():
            waited_for.append(future)
            gate.open()
        return wait(worker, future, after)

    with started(settings) as training:
        training.go(6)
        training.settle()
        gate.shut()
        gate.await_next(lambda: training.go(1))  # closes a window, whose update cannot begin
        monkeypatch.setattr(Worker, "wait", note)
        training.go(1)  # closes another group's
        assert waited_for == []
        runs.assert_same_bits(training.values(), expected[7])
        update, later = training.on_their_way
        training.go(1)
        assert waited_for == [update]
        assert training.on_their_way == [later]
        runs.assert_same_bits(training.values(), expected[8])
        training.go(3)
        runs.assert_same_bits(training.values(), expected[11])


@pytest.fixture
def bomb(monkeypatch):
    """Set its `fuse` to (method, n): the n-th call of the kernel's method from then on raises."""

    class Bomb:
        fuse = ("nothing", 0)

        def count(self, method):
            if self.fuse[0] == method:
                self.fuse = (method, self.fuse[1] - 1)
                if self.fuse[1] == 0:
                    raise FloatingPointError("moment is nan")

    bomb = Bomb()

    class ExplosiveHalf(HostState):
        def add(self, *args):
            bomb.count("add")
            super().add(*args)

    class Explosive(HostAdam):
        def adamw(self, *args):
            bomb.count("adamw")
            yield from super().adamw(*args)
            bomb.count("adamw's end")

    monkeypatch.setattr(_engine, "HostState", ExplosiveHalf)
    monkeypatch.setattr(_engine, "HostAdam", Explosive)
    return bomb


def go_until_failed(training):
    training.go(1)
    await_end(training)
    training.go(1)


def await_end(training):
    """Waits until the worker has failed."""
    training.engine._worker._thread.join(TIMEOUT_S)
    assert not training.engine._worker._thread.is_alive()


@pytest.mark.parametrize(
    ("settings", "before", "fuse", "words"),
    [
        (TOGETHER, 7, ("adamw", 2), r"leaf \['rows'\], window 2"),
        (BUSY, 1, ("adamw", 1), "the hand-over after window 1"),
        (CALM, 1, ("add", 1), "the mail of step 2, window 1"),
    ],
    ids=["update", "hand-over", "mail"],
)
def test_a_failure_of_the_worker_is_raised_with_its_place_and_stays(
    bomb, settings, before, fuse, words
):
    with started(settings) as training:
        training.go(before)
        training.settle()
        bomb.fuse = fuse
        with pytest.raises(RuntimeError, match=f"{words}: moment is nan") as caught:
            go_until_failed(training)
        assert isinstance(caught.value.__cause__, FloatingPointError)
        for call in (training.exchange, training.flush, training.exchange):
            with pytest.raises(RuntimeError, match="the host worker failed at .*: moment is nan"):
                call()
        training.engine.close()


def test_mail_that_cannot_be_read_is_raised():
    with started(CALM) as training:
        training.go(1)
        training.step()
        training.state.mail[1].delete()
        training.exchange()
        await_end(training)
        training.step()
        with pytest.raises(RuntimeError, match="the mail of step 2, window 1: .*deleted"):
            training.exchange()


def exchange_until_noticed(training):
    """What is wrong with a step's mail is raised by its exchange or by the call after."""
    training.exchange()
    training.settle()
    training.go(1)


def test_a_state_of_an_earlier_step_is_refused():
    with started(CALM) as training:
        training.step()
        params, state = training.params, training.state
        training.exchange()
        training.step()
        training.exchange()
        training.params, training.state = params, state
        with pytest.raises(RuntimeError, match="expected the (mail|state of a new)"):
            exchange_until_noticed(training)


# A sweep has the same seed, and other learning rates.
@pytest.mark.parametrize(("steps", "seed"), [(2, 1), (2, 0), (0, 1)])
def test_the_state_of_another_run_is_refused(steps, seed):
    with started(CALM) as mine, started(CALM, seed=seed) as other:
        if steps:
            mine.go(steps)
            other.go(steps)
        mine.params, mine.state = other.params, other.state
        mine.step()
        with pytest.raises(RuntimeError, match="Give each run an engine of its own"):
            exchange_until_noticed(mine)


def through_numpy(x):
    return jax.device_put(np.asarray(x), x.sharding)


@pytest.mark.parametrize("send_gradients", ["during_step", "per_window"])
@pytest.mark.parametrize("duplicate", [jnp.copy, through_numpy])
def test_flush_and_peek_take_a_copy_of_the_state(duplicate, send_gradients):
    with (
        started(CALM, send_gradients=send_gradients) as training,
        started(CALM, send_gradients=send_gradients) as untouched,
    ):
        for each in (training, untouched):
            each.go(6)
        before = training.state
        training.state = jax.tree.map(duplicate, before)
        peeked = [each.engine.peek(each.params, each.state) for each in (training, untouched)]
        runs.assert_same_bits(*peeked)
        for each in (training, untouched):
            each.flush()
        copied = jax.tree.map(duplicate, before)
        with pytest.raises(RuntimeError, match="that the last `flush` returned, got those that it"):
            training.engine.peek(training.params, copied)
        for each in (training, untouched):
            each.go(3)
            each.flush()
        runs.assert_same_bits(training.values(), untouched.values())


def assert_threads_left(count):
    """Soon: some are told to end and not waited for, as a garbage collector must not wait."""
    end = time.monotonic() + TIMEOUT_S
    while threading.active_count() > count and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= count  # less, if another test's last one ended


def test_close_during_work_ends_after_the_piece_it_is_at(gate):
    before = threading.active_count()
    with started(CALM) as training:
        training.go(7)
        training.settle()
        gate.shut()
        gate.log.clear()
        gate.await_next(lambda: training.go(1))
        closing = threading.Thread(target=training.engine.close)
        closing.start()
        gate.let_through()
        closing.join(TIMEOUT_S / 2)  # a worker that goes on stands at the gate for longer
        assert not closing.is_alive()
        assert gate.log.count("piece") == 1
        assert_threads_left(before)


def test_close_frees_the_host_memory_and_the_mail_that_is_kept(monkeypatch):
    views = runs.views_of_mail(monkeypatch)
    with started(CALM) as training:
        training.go(6)
        training.settle()
        leaves = training.engine._worker.leaves()
        views += [weakref.ref(x) for leaf in leaves for x in leaf.arrays]
        del leaves
        training.engine.close()
        gc.collect()
        assert views
        assert [x for x in views if x() is not None] == []


def test_an_engine_that_is_forgotten_ends_its_threads():
    before = threading.active_count()
    training = started(CALM, threads=2)
    training.go(5)
    assert threading.active_count() > before
    del training
    gc.collect()
    assert_threads_left(before)


def leave_open():
    """What a user's script may end with: engines that nobody closed."""
    leaf = runs.Leaf("w", (2048, 1024), -2, "float32")
    settings = Settings(topk_ratio=0.1, update_interval=1, select_interval=100)
    idle, at_work = (started(settings, (leaf,), threads=2) for _ in range(2))
    globals()["kept"] = idle, at_work
    at_work.go(3)
    (update,) = at_work.on_their_way
    assert not update.done()


@pytest.mark.slow
def test_the_interpreter_ends_with_engines_left_open_idle_and_at_work():
    processes.assert_ends_well(processes.start_process("exchange.test_engine", "leave_open"))


def describe(tree):
    return jax.tree.map(
        lambda x: (
            x.shape,
            x.dtype,
            x.weak_type,
            x.committed,
            type(x.sharding),
            x.sharding.memory_kind,
        ),
        tree,
    )


@pytest.fixture(scope="module")
def compiled():
    """A list that grows by one whenever XLA compiles anything."""
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **more: events.append(event) if "backend_compile" in event else None
    )
    return events


@pytest.mark.parametrize("donate", [False, True])
def test_every_array_keeps_shape_dtype_memory_and_sharding_and_nothing_compiles_twice(
    donate, compiled
):
    settings = dataclasses.replace(BUSY, max_grad_norm=20.0)
    with started(settings, donate=donate) as training:
        expected = describe((training.params, training.state))
        for t in range(1, 13):
            if t == 7:
                # Every kind of boundary has been met.
                assert compiled
                compiled.clear()
            training.step()
            assert describe((training.params, training.state)) == expected
            training.exchange()
            assert describe((training.params, training.state)) == expected
        assert compiled == []
        # jax 0.10.2 and 0.11.2: how often the step was compiled; there is no public name for it.
        assert training.program._cache_size() == 1
        training.flush()
        assert describe((training.params, training.state)) == expected
        training.go(1)
        assert training.program._cache_size() == 1


def test_steps_and_exchanges_move_nothing_between_memories_unasked():
    with started() as training:
        training.go(6)
        runs.gradients(FEW, 1)
        g = jax.device_put(runs.gradients(FEW, 7), jax.devices()[0])
        with jax.transfer_guard("disallow"):
            for _ in range(3):
                training.params, training.state = training.program(
                    training.params, training.state, g
                )
                training.exchange()


def test_stats_count_steps_windows_and_bytes():
    leaf = runs.Leaf("w", (4, 2), -2, "bfloat16")
    settings = Settings(topk_ratio=0.25, update_interval=2)
    with started(settings, (leaf,)) as training:
        # Masters, with what is uploaded in them, and moments; step counts; the channel.
        kept = 4 * 2 * 3 * 4 + 4 * 4 + 4
        assert training.engine.stats == zenflow_jax.EngineStats(host_bytes=kept)
        for t in range(1, 6):
            training.step(bad=t == 4)
            training.exchange()
        training.settle()
        stats = training.engine.stats
        assert training.selected()["w"].tolist() == [0]
    mail = 4 * 2 * 2 + 8 * 4 + 3 * 4  # the gradient; eight float32 and three int32 scalars
    row = 3 * 2 * 4 + 4  # of one channel, master and moments of float32, and a step count
    window = 4 * 2 * 2  # the parameter
    assert stats.host_bytes == kept  # mail is not among the arrays, and short windows need no sums
    timed = ("exchange_s", "work_s", "sum_s", "hand_over_s", "update_s", "upload_s", "mail_s")
    unknown = {name: 0.0 for name in ("wait_s", *timed)}
    assert dataclasses.replace(stats, host_bytes=0, **unknown) == zenflow_jax.EngineStats(
        steps=5,
        windows=2,
        window_lengths={2: 2},
        reselections=1,
        skipped_steps=1,
        bytes_to_host=5 * mail + row + 4,  # and the channel's number
        bytes_to_device=2 * window + row,
        pinned_bytes=4 * 2 * 2,  # the last step's gradient, in an open window
    )
    assert all(getattr(stats, name) > 0 for name in timed)
    assert stats.work_s >= stats.sum_s + stats.hand_over_s + stats.update_s
    assert stats.wait_s >= 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.steps = 7


def test_a_state_that_was_numpy_arrays_between_two_steps_loses_nothing():
    with started(BUSY, runs.ONE) as expected, started(BUSY, runs.ONE) as training:
        for t in range(6):
            if t in (0, 4):
                training.state = jax.device_get(training.state)
            training.go(1)
            expected.go(1)
            runs.assert_same_bits(training.values(), expected.values())
        training.flush()
        expected.flush()
        runs.assert_same_bits(training.values(), expected.values())


def test_mail_that_some_saver_left_on_the_device_is_in_host_memory_after_a_step():
    with started(BUSY, runs.ONE) as whole:
        expected = [values for _, values in whole.follow(Plan(4))]
    with started(BUSY, runs.ONE) as training:
        training.engine.close()
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")
        training.state = jax.device_put(training.state, here)
        training.engine = HostEngine(training.params, training.state, host_kernel="numpy")
        for (_, values), before in zip(training.follow(Plan(4)), expected, strict=True):
            runs.assert_same_bits(values, before)
            mail = jax.tree.leaves((training.state.mail, training.state.step_scalars))
            assert {x.sharding.memory_kind for x in mail} == {"pinned_host"}


def go_through(training, bad):
    for is_bad in bad:
        training.step(bad=is_bad)
        training.exchange()
    training.settle()


def test_three_skipped_steps_in_a_row_are_warned_of_and_then_thirty(caplog):
    def warned():
        found = [r.getMessage() for r in caplog.records if r.name == "zenflow_jax"]
        caplog.clear()
        return found

    with started(CALM) as training:
        go_through(training, [True, True, False, True, True])
        assert warned() == []
        assert training.engine.stats.skipped_in_a_row == 2
        go_through(training, [True])
        (message,) = warned()
        assert "skipped the last 3 steps, up to step 6" in message
        assert "Look for NaN or infinity" in message
        assert "`max_skipped`" in message
        go_through(training, [True] * 26)
        assert warned() == []
        go_through(training, [True])
        assert "the last 30 steps, up to step 33" in warned()[0]
        go_through(training, [False])
        stats = training.engine.stats
        assert (stats.skipped_steps, stats.skipped_in_a_row) == (32, 0)
        assert int(training.state.skipped_in_a_row) == 0


def test_too_many_skipped_steps_in_a_row_are_an_error_also_across_a_checkpoint():
    with started(CALM, max_skipped=3) as training:
        go_through(training, [True, True, False, True, True])
        saved = training.engine.state()
        params, state = training.params, training.state
    assert int(state.skipped_in_a_row) == 2
    with started(CALM) as again:
        again.engine.close()
        again.params, again.state, again.t = params, state, 5
        again.engine = HostEngine(
            params, state, host_kernel="numpy", max_skipped=3, engine_state=saved
        )
        again.step(bad=True)
        again.exchange()
        words = r"3 in a row .*`max_skipped` is 3.*the last of them step 6.*Look for NaN"
        with pytest.raises(RuntimeError, match=words) as caught:
            again.flush()
    assert isinstance(caught.value.__cause__, FloatingPointError)


def test_an_interrupted_exchange_is_not_gone_on_from(monkeypatch):
    with started(BUSY) as training:
        training.go(2)
        training.step()

        def interrupt(worker, future, after):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Worker, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                training.exchange()
        for call in (training.exchange, training.flush):
            with pytest.raises(RuntimeError, match="interrupted half-way"):
                call()


@pytest.mark.parametrize(
    ("rolling", "names"), [(True, ["rows"]), (False, ["columns", "rows"])], ids=str
)
def test_what_was_handed_over_does_not_stay_on_the_device(rolling, names):
    with started(dataclasses.replace(BUSY, rolling=rolling)) as training:
        training.go(2)
        training.step()
        before = training.engine.stats.reselections
        states = zip(FEW, training.state.leaves, strict=True)
        leaving = [weakref.ref(state.mu) for leaf, state in states if leaf.name in names]
        assert len(leaving) == len(names)
        training.exchange()  # selects again, in turn for one of the leaves
        del states
        training.settle()
        gc.collect()
        assert training.engine.stats.reselections == before + 1
        assert [x for x in leaving if x() is not None] == []


def test_an_engine_that_is_collected_on_a_thread_of_its_own_does_not_hang(monkeypatch):
    # The collector runs wherever something is allocated, on a kernel's thread too.
    forgotten, ended = threading.Event(), []

    class Collecting(HostState):
        def add(self, *args):
            assert forgotten.wait(TIMEOUT_S)
            gc.collect()
            super().add(*args)

    monkeypatch.setattr(_engine, "HostState", Collecting)

    def run():
        training = started(threads=2)
        training.step()
        training.exchange()
        training.engine.itself = training.engine  # a cycle, as in a trainer
        ended.append(training.engine._worker._thread)
        ended.append(weakref.ref(training.engine))

    gc.disable()
    try:
        run()
    finally:
        gc.enable()
    forgotten.set()
    ended[0].join(TIMEOUT_S)
    assert not ended[0].is_alive()
    assert ended[1]() is None


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
def test_buffers_for_mail_are_allocated_once(donate):
    with started(CALM, donate=donate) as training:
        blank = jax.tree.leaves(training.state.mail)
        training.go(6)
        after = jax.tree.leaves(training.state.mail)
        assert all(a is b for a, b in zip(after, blank, strict=True))


class Computing:
    """An array that the device never finishes."""

    def is_ready(self):
        return False


def test_a_caller_that_waits_for_an_update_does_not_wait_for_the_device():
    with Training(FEW, Settings(topk_ratio=0.3)) as training:
        update = Future()
        threading.Thread(target=update.set_result, args=("here",)).start()
        assert training.engine._worker.wait(update, [Computing()]) == "here"
