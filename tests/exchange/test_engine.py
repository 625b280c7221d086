"""`HostEngine`: the states it refuses, the arrays it gives back, its counts, and skipped steps.

What the arithmetic gives is `test_equality.py`'s, the worker's timing `test_worker.py`'s.
"""

import dataclasses
import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zenflow_jax
from tests import comparisons, runs
from tests.exchange.test_ahead import compilations
from tests.exchange.test_worker import BUSY, CALM
from tests.runs import FEW, ONE, Plan, Settings, Training
from zenflow_jax._exchange.pinned import IN_FLIGHT
from zenflow_jax._exchange.worker import Worker
from zenflow_jax._host import state as host_state


@pytest.mark.parametrize(
    ("dtype", "transfer_dtype", "sending"),
    [
        ("float16", None, "per_window"),
        ("bfloat16", np.float32, "during_step"),
        ("bfloat16", None, "during_step"),  # rounded, as the reference does
    ],
)
def test_gradients_wider_than_their_leaves_reach_the_host_in_the_mails_dtype(
    dtype, transfer_dtype, sending
):
    # As after loss scaling: of float16 gradients of this size nothing would be left.
    leaves = (runs.Leaf("bias", (5,), None, dtype), runs.Leaf("rows", (12, 5), -2, dtype))

    def small(leaves, step, seed=0, bad=False):
        wide = tuple(leaf._replace(dtype="float32") for leaf in leaves)
        return {n: np.float32(1e-9) * g for n, g in runs.gradients(wide, step, seed, bad).items()}

    settings = Settings(
        topk_ratio=0.3,
        update_interval=2,
        select_interval=4,
        eps=1e-15,
        send_gradients=sending,
        transfer_dtype=transfer_dtype,
    )
    plan = Plan(7, flush_at=(7,))
    expected, _ = comparisons.reference(leaves, settings, plan, gradients=small)
    for offload in (False, True):
        with Training(leaves, settings, offload=offload, gradients=small) as training:
            comparisons.assert_agree(training.history(plan), expected)


def exchange_until_noticed(training):
    """What is wrong with a step's mail is raised by its exchange or by the call after."""
    training.exchange()
    training.settle()
    training.go(1)


def test_a_state_of_an_earlier_step_is_refused():
    with Training(FEW, CALM) as training:
        training.step()
        params, state = training.params, training.state
        training.exchange()
        training.go(1)
        training.params, training.state = params, state
        with pytest.raises(RuntimeError, match="expected the (mail|state of a new)"):
            exchange_until_noticed(training)


# A sweep has the same seed, and other learning rates.
@pytest.mark.parametrize(("steps", "seed"), [(2, 1), (2, 0), (0, 1)])
def test_the_state_of_another_run_is_refused(steps, seed):
    with Training(FEW, CALM) as ours, Training(FEW, CALM, seed=seed) as other:
        ours.go(steps)
        other.go(steps)
        ours.params, ours.state = other.params, other.state
        ours.step()
        with pytest.raises(RuntimeError, match="Give each run an engine of its own"):
            exchange_until_noticed(ours)


def test_an_interrupted_exchange_is_not_gone_on_from(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with Training(FEW, BUSY) as training:
        training.go(2)
        training.step()
        monkeypatch.setattr(Worker, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            training.exchange()
        for call in (training.exchange, training.flush):
            with pytest.raises(RuntimeError, match="interrupted half-way"):
                call()


def through_numpy(x):
    return jax.device_put(np.asarray(x), x.sharding)


@pytest.mark.parametrize("sending", ["during_step", "per_window"])
@pytest.mark.parametrize("duplicate", [jnp.copy, through_numpy])
def test_flush_and_peek_take_a_copy_of_the_state(duplicate, sending):
    settings = dataclasses.replace(CALM, send_gradients=sending)
    with Training(FEW, settings) as training, Training(FEW, settings) as untouched:
        both = training, untouched
        for each in both:
            each.go(6)
        before = training.state
        training.state = jax.tree.map(duplicate, before)
        comparisons.assert_same_bits(*(each.engine.peek(each.params, each.state) for each in both))
        for each in both:
            each.flush()
        with pytest.raises(RuntimeError, match="that the last `flush` returned, got those that it"):
            training.engine.peek(training.params, jax.tree.map(duplicate, before))
        for each in both:
            each.go(3)
            each.flush()
        comparisons.assert_same_bits(training.values(), untouched.values())


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


@pytest.mark.parametrize(
    ("donate", "sending"),
    [(False, "during_step"), (True, "during_step"), (True, "per_window")],
)
def test_every_array_keeps_shape_dtype_memory_and_sharding_and_nothing_compiles_twice(
    donate, sending
):
    settings = dataclasses.replace(BUSY, max_grad_norm=20.0, send_gradients=sending)
    with Training(FEW, settings, donate=donate) as training, compilations() as compiled:
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
    with Training(FEW, BUSY) as training:
        training.go(6)
        g = jax.device_put(runs.gradients(FEW, 7), jax.devices()[0])
        with jax.transfer_guard("disallow"):
            for _ in range(3):
                training.params, training.state = training.program(
                    training.params, training.state, g
                )
                training.exchange()


# Added up on the device: two windows' step scalars and sums, and what the step brings.
@pytest.mark.parametrize(("sending", "most"), [*IN_FLIGHT.items(), ("per_window", 2 * 4 + 3)])
def test_no_more_mail_is_unread_than_there_is_memory_for(sending, most):
    with Training(FEW, CALM, send_gradients=sending) as training:
        unread = []
        for _ in range(12):
            training.go(1)
            unread.append(len(training.unread))
        training.flush()
    assert max(unread) == most


def outcome(settings, look, **options):
    """The parameters after each step, where the settled run is looked at, and all moments."""
    with Training(FEW, settings, **options) as training:
        params = []
        for t, values in training.follow(Plan(20, bad=(5,), flush_at=(8,))):
            training.settle()
            look(t, training)
            params.append(values)
        return params, training.moments()


def test_how_many_mails_are_kept_does_not_change_a_bit(monkeypatch):
    settings = dataclasses.replace(BUSY, update_interval=8, select_interval=8)
    kept, outcomes = [], []
    for limit in (0, 3, 100):
        monkeypatch.setattr(host_state, "MAILS_KEPT", limit)
        numbers = []
        outcomes.append(
            outcome(settings, lambda t, run, to=numbers: to.append(run.host.mails_kept))
        )
        kept.append(max(numbers))
    assert kept[0] == 0 < kept[1] <= 3 < kept[2]
    for other in outcomes[1:]:
        comparisons.assert_same_bits(other, outcomes[0])


@pytest.mark.parametrize(
    ("rolling", "expected"),
    # The first offloaded leaf has 80 bytes, the next one 240. The update of the ninth step is of
    # both leaves, in turn of the second one alone.
    [(False, [320, 80, 0]), (True, [240, 0, 0])],
    ids=["together", "in turn"],
)
def test_how_much_is_prefetched_does_not_change_a_bit(rolling, expected):
    prefetched = []

    def look(t, training):
        if t == 9:
            (update,) = training.on_their_way
            prefetched.append(sum(x.nbytes for pieces in update.result() for x in pieces))

    settings = dataclasses.replace(BUSY, rolling=rolling)
    outcomes = [outcome(settings, look, prefetch_bytes=limit) for limit in (None, 100, 0)]
    for other in outcomes[1:]:
        comparisons.assert_same_bits(other, outcomes[0])
    assert prefetched == expected


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
def test_buffers_for_mail_are_allocated_once(donate):
    with Training(FEW, CALM, donate=donate) as training:
        blank = jax.tree.leaves(training.state.mail)
        training.go(6)
        after = jax.tree.leaves(training.state.mail)
        assert all(a is b for a, b in zip(after, blank, strict=True))


def test_what_was_handed_over_does_not_stay_on_the_device():
    with Training(FEW, BUSY) as training:
        training.go(2)
        training.step()
        leaving = weakref.ref(training.state.leaves[2].mu)
        reselections = training.engine.stats.reselections
        training.exchange()  # the turn of this leaf
        training.settle()
        gc.collect()
        assert training.engine.stats.reselections == reselections + 1
        assert leaving() is None


def test_stats_count_steps_windows_and_bytes():
    leaf = runs.Leaf("w", (4, 2), -2, "bfloat16")
    settings = Settings(topk_ratio=0.25, update_interval=2)
    with Training((leaf,), settings) as training:
        # Masters, with what is uploaded in them, and moments; step counts; the channel.
        kept = 4 * 2 * 3 * 4 + 4 * 4 + 4
        assert training.engine.stats == zenflow_jax.EngineStats(host_bytes=kept)
        training.go(5, Plan(5, bad=(4,)))
        training.settle()
        stats = training.engine.stats
        assert training.selected()["w"].tolist() == [0]
    mail = 4 * 2 * 2 + 8 * 4 + 3 * 4  # the gradient; eight float32 and three int32 scalars
    row = 3 * 2 * 4 + 4  # of one channel, master and moments of float32, and a step count
    window = 4 * 2 * 2  # the parameter
    unknown = {"exchange_s": 0.0, "wait_s": 0.0, "work_s": 0.0, "seconds": {}}
    assert dataclasses.replace(stats, **unknown) == zenflow_jax.EngineStats(
        steps=5,
        window_lengths={2: 2},
        reselections=1,
        skipped_steps=1,
        bytes_to_host=5 * mail + row + 4,  # and the channel's number
        bytes_to_device=2 * window + row,
        host_bytes=kept,  # mail is not among the arrays, and short windows need no sums
        pinned_bytes=4 * 2 * 2,  # the last step's gradient, in an open window
    )
    assert stats.windows == 2
    kinds = {"take in", "hand over", "update", "wait for uploads"}
    assert stats.seconds.keys() == {*kinds, "copy", "upload"}
    assert stats.work_s == pytest.approx(sum(stats.seconds[kind] for kind in kinds))
    assert stats.exchange_s > 0 <= stats.wait_s


def test_mail_that_some_saver_left_on_the_device_is_in_host_memory_after_a_step():
    with Training(ONE, BUSY) as expected, Training(ONE, BUSY) as training:
        on_device = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")
        training.state = jax.device_put(training.state, on_device)
        training.renew()
        for _ in range(4):
            training.go(1)
            expected.go(1)
            comparisons.assert_same_bits(training.values(), expected.values())
            mail = jax.tree.leaves((training.state.mail, training.state.step_scalars))
            assert {x.sharding.memory_kind for x in mail} == {"pinned_host"}


def go_through(training, bad):
    for is_bad in bad:
        training.step(bad=is_bad)
        training.exchange()
    training.settle()


def test_three_skipped_steps_in_a_row_are_warned_of_and_then_thirty(caplog):
    with Training(FEW, CALM) as training:
        for bad, words in (
            ([True, True, False, True, True], None),
            ([True], "skipped the last 3 steps, up to step 6.*Look for NaN or inf.*`max_skipped`"),
            ([True] * 26, None),
            ([True], "the last 30 steps, up to step 33"),
            ([False], None),
        ):
            caplog.clear()
            go_through(training, bad)
            messages = [r.getMessage() for r in caplog.records if r.name == "zenflow_jax"]
            assert len(messages) == (words is not None)
            assert words is None or re.search(words, messages[0])
        stats = training.engine.stats
        assert (stats.skipped_steps, stats.skipped_in_a_row) == (32, 0)
        assert int(training.state.skipped_in_a_row) == 0


def test_too_many_skipped_steps_in_a_row_are_an_error_also_across_a_checkpoint():
    with Training(FEW, CALM, max_skipped=3) as training:
        go_through(training, [True, True, False, True, True])
        assert int(training.state.skipped_in_a_row) == 2
        training.renew(engine_state=training.engine.state())
        training.step(bad=True)
        training.exchange()
        words = r"3 in a row .*`max_skipped` is 3.*the last of them step 6.*Look for NaN"
        with pytest.raises(RuntimeError, match=words) as caught:
            training.flush()
    assert isinstance(caught.value.__cause__, FloatingPointError)
