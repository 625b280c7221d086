"""`HostEngine`: rejected states, returned arrays, counts, and skipped steps.

`test_agreement.py` covers the arithmetic, `test_worker.py` the worker's timing.
"""

import dataclasses
import gc
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import zenflow_jax
from tests import comparisons, runs
from tests.comparisons import describe
from tests.compilations import compilations, times_compiled
from tests.runs import BUSY, CALM, FEW, Plan, Settings, Training


def test_gradients_wider_than_their_leaves_reach_the_host_in_the_mail_dtype():
    leaves = (runs.Leaf("bias", (5,), None, "bfloat16"), runs.Leaf("rows", (12, 5), -2, "bfloat16"))

    def small(leaves, step, seed=0, bad=False):
        wide = tuple(leaf._replace(dtype="float32") for leaf in leaves)
        return {n: np.float32(1e-9) * g for n, g in runs.gradients(wide, step, seed, bad).items()}

    settings = Settings(
        topk_ratio=0.3,
        update_interval=2,
        select_interval=4,
        eps=1e-15,
        transfer_dtype=np.float32,
    )
    plan = Plan(7, flush_at=(7,))
    with Training(leaves, settings, gradients=small) as training:
        comparisons.assert_agrees(training, plan)


def exchange_until_noticed(run):
    run.exchange()
    run.settle()
    run.go(1)


def of_an_earlier_step(run):
    run.go(1)
    before = run.params, run.state
    run.go(2)
    return before


def of_another_run(steps, seed):
    def both(run):
        with Training(FEW, CALM, seed=seed) as other:
            run.go(steps)
            other.go(steps)
            return other.params, other.state

    return both


@pytest.mark.parametrize(
    "state_of",
    # Runs in a sweep have the same seed, but different learning rates.
    [of_an_earlier_step, of_another_run(2, 0), of_another_run(0, 1)],
    ids=["earlier", "sweep", "first step"],
)
def test_a_state_from_another_step_or_run_is_rejected(state_of):
    with Training(FEW, CALM) as run:
        run.params, run.state = state_of(run)
        run.step()
        # Errors in a step's mail are raised by its exchange or the next call.
        words = "The mail is from|state of a new step|differ from this engine's run"
        with pytest.raises(RuntimeError, match=words):
            exchange_until_noticed(run)


@pytest.mark.parametrize("donate", [False, True])
def test_arrays_keep_their_placement_and_nothing_compiles_twice_or_moves_implicitly(donate):
    settings = dataclasses.replace(BUSY, max_grad_norm=20.0)
    with Training(FEW, settings, donate=donate) as training, compilations() as compiled:
        expected = describe((training.params, training.state))
        for t in range(1, 13):
            if t == 7:
                # Every kind of boundary has occurred.
                assert compiled
                compiled.clear()
            g = jax.device_put(runs.gradients(FEW, t), jax.devices()[0])
            with jax.transfer_guard("allow" if t < 7 else "disallow"):
                both = training.program(training.params, training.state, g)
                assert describe(both) == expected
                training.params, training.state = training.engine.exchange(*both)
            assert describe((training.params, training.state)) == expected
        assert compiled == []
        training.flush()
        assert describe((training.params, training.state)) == expected
        training.program(training.params, training.state, g)
        assert times_compiled(training.program) == 1


@pytest.mark.parametrize(("sending", "most"), [("during_step", 2), ("after_step", 1)])
def test_unread_mail_never_exceeds_the_memory_for_it(sending, most):
    with Training(FEW, CALM, send_gradients=sending) as training:
        unread = []
        for _ in range(12):
            training.go(1)
            unread.append(len(training.unread))
        training.flush()
    assert max(unread) == most


def test_consecutive_skipped_steps_are_counted_and_reported_even_across_a_checkpoint(caplog):
    with Training(FEW, CALM) as run:
        run.go(8, Plan(8, bad=(1, 2, 3, 5, 6, 7, 8)))
        run.renew(engine_state=run.engine.state())
        assert (run.engine.stats.skipped_steps, run.engine.stats.skipped_in_a_row) == (7, 4)
        run.go(1, Plan(9, bad=(9,)))
        run.settle()
        assert (run.engine.stats.skipped_steps, run.engine.stats.skipped_in_a_row) == (8, 5)
    told = [x for x in caplog.messages if "zenflow skipped the last" in x]
    assert [re.findall("last 3 steps, up to step .", x) for x in told] == [
        ["last 3 steps, up to step 3"],
        ["last 3 steps, up to step 7"],
    ]


def close_after_a_failed_save(engine):
    with pytest.raises(FileNotFoundError):
        engine.snapshot().write(Path("a folder that does not exist"))
    engine.close()


@pytest.mark.parametrize(
    ("end", "warnings"),
    [
        (close_after_a_failed_save, 1),
        (zenflow_jax.HostEngine.close, 1),
        (lambda engine: None, 1),  # garbage collection ends it
        (zenflow_jax.HostEngine.state, 0),
    ],
    ids=["failed", "close", "collected", "saved"],
)
def test_an_engine_that_ends_without_a_flush_warns_once_about_lost_updates(
    caplog, monkeypatch, end, warnings
):
    monkeypatch.delattr(sys, "last_value", raising=False)  # left by an earlier test
    run = Training(FEW, CALM)
    run.go(CALM.update_interval)
    end(run.engine)
    del run
    gc.collect()
    told = [r for r in caplog.records if "never reached the parameters" in r.getMessage()]
    assert len(told) == warnings
