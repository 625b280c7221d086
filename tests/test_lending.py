"""What an engine lends is its state, in its own memory, and nobody has it when the loan is over."""

import functools
import threading

import jax
import numpy as np
import pytest

import zenflow_jax
from tests import runs
from tests.runs import FIRST, SECOND, Training
from tests.test_resume import PLAN, SETTINGS, end, go
from zenflow_jax._checkpoint import lending

HERE = functools.partial(Training, settings=SETTINGS, threads=1, host_kernel="numpy", donate=True)


def arrays(engine_state):
    return [x for x in jax.tree.leaves(engine_state) if isinstance(x, jax.Array)]


def memory(tree):
    """Where the wide arrays of it are."""
    return {x.__array_interface__["data"][0] for x in map(np.asarray, tree) if x.ndim > 1}


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [FIRST, SECOND], ids=["first", "second"])
def test_what_is_lent_is_the_state_and_the_run_goes_on_with_the_same_bits(leaves):
    with HERE(leaves) as training, HERE(leaves) as untouched:
        for t in range(1, PLAN.steps + 1):
            go(training, PLAN, t)
            go(untouched, PLAN, t)
            copy = training.engine.state()
            with training.engine.lend() as lent:
                assert jax.tree.structure(lent) == jax.tree.structure(copy)
                runs.assert_same_bits(
                    jax.tree.map(np.asarray, lent), jax.tree.map(np.asarray, copy)
                )
                for x, y in zip(arrays(lent), arrays(copy), strict=True):
                    assert x.sharding == y.sharding
        runs.assert_same_bits(end(training), end(untouched))


def test_lent_arrays_are_the_engines_own_and_copies_are_not():
    with HERE(FIRST) as training:
        training.go(7)  # in mid-window
        copies = arrays(training.engine.state())  # and now the worker is at rest
        host = training.engine._host
        own = memory(x for leaf in host.leaves for x in (leaf.master, leaf.mu, leaf.nu, leaf.total))
        assert memory(copies).isdisjoint(own)
        with training.engine.lend() as lent:
            assert memory(arrays(lent)) >= own
            assert not any(np.asarray(x).flags.writeable for x in arrays(lent))


def test_what_is_lent_resumes_another_engine_and_outlives_its_own():
    with HERE(FIRST) as training, HERE(FIRST) as untouched:
        go(training, PLAN, 11)
        with training.engine.lend() as lent:
            training.engine.close()
            training.engine = zenflow_jax.HostEngine(
                training.params, training.state, engine_state=lent, threads=1, host_kernel="numpy"
            )
        go(training, PLAN, PLAN.steps)
        go(untouched, PLAN, PLAN.steps)
        runs.assert_same_bits(end(training), end(untouched))


@pytest.mark.parametrize("call", ["exchange", "flush", "state", "master_params", "lend"])
def test_no_other_call_is_taken_while_arrays_are_lent(call):
    with HERE(FIRST) as training:
        training.go(5)
        training.step()
        engine, now = training.engine, (training.params, training.state)
        calls = {
            "exchange": lambda: engine.exchange(*now),
            "flush": lambda: engine.flush(*now),
            "state": engine.state,
            "master_params": lambda: zenflow_jax.master_params(*now, engine),
            "lend": lambda: engine.lend().__enter__(),
        }
        with engine.lend(), pytest.raises(RuntimeError, match="Leave the `with engine.lend"):
            calls[call]()
        training.exchange()


def test_lent_arrays_are_gone_afterwards():
    with HERE(FIRST) as training:
        training.go(5)
        with training.engine.lend() as lent:
            for x in arrays(lent):
                np.asarray(x).sum()  # a look at them is forgotten by then
                assert [shard.data.sum() for shard in x.addressable_shards]
        for x in arrays(lent):
            with pytest.raises(RuntimeError, match="deleted"):
                np.asarray(x)
        training.go(1)


def test_who_keeps_what_was_lent_is_told_until_it_is_let_go(monkeypatch):
    monkeypatch.setattr(lending, "GRACE_S", 0.0)
    with HERE(FIRST) as training:
        training.go(5)
        kept = []
        with pytest.raises(RuntimeError, match="got 2 that are not. Wait inside"):
            with training.engine.lend() as lent:
                kept += [np.asarray(leaf["master"]) for leaf in lent["leaves"][:2]]
        training.step()
        with pytest.raises(RuntimeError, match="out of use, got 2"):
            training.exchange()
        kept.clear()
        training.exchange()
        training.go(3)


def test_the_end_of_a_loan_waits_for_threads_that_are_about_to_let_go(monkeypatch):
    monkeypatch.setattr(lending, "GRACE_S", 60.0)
    with HERE(FIRST) as training:
        training.go(5)
        asked, kept = threading.Event(), []

        def look(_):
            asked.set()  # nobody asks before the block has ended

        def let_go():
            asked.wait()
            kept.clear()

        thread = threading.Thread(target=let_go)
        thread.start()
        monkeypatch.setattr(lending.time, "sleep", look)
        with training.engine.lend() as lent:
            kept += [np.asarray(x) for x in arrays(lent)]
        thread.join()
        training.go(1)


def test_an_error_inside_is_what_is_raised_and_the_engine_goes_on(monkeypatch):
    monkeypatch.setattr(lending, "GRACE_S", 0.0)
    with HERE(FIRST) as training:
        training.go(5)
        views = []

        def fail():
            with training.engine.lend() as lent:
                views.extend(np.asarray(x) for x in arrays(lent))
                raise OSError("the disk is full")

        with pytest.raises(OSError, match="disk is full"):
            fail()
        training.step()
        with pytest.raises(RuntimeError, match="out of use"):
            training.exchange()
        views.clear()
        training.exchange()
