"""Windows that fit the host: `update_interval="fit"` and `FitWindow`.

What a run does once its windows are chosen is held to the reference. What it chooses is held to the
host's work, with a clock that the test sets.
"""

import dataclasses
import logging
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zenflow_jax
from tests import runs
from tests.runs import FIRST, ONE, SCANNED, SECOND, Plan, Settings, Training
from tests.test_engine_save import assert_saved
from tests.test_resume import copied, end, go, resumed, saved
from zenflow_jax import AutoSelect, FitWindow
from zenflow_jax._checkpoint.stream import read_engine_state
from zenflow_jax._checkpoint.tree import options_of
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.state import HostState
from zenflow_jax._plan.leaf import LeafSpec
from zenflow_jax._plan.rules import INTERVALS
from zenflow_jax._plan.schedule import Schedule
from zenflow_jax._planner import fit as fit_module

CALM = Settings(topk_ratio=0.3, update_interval=FitWindow(2, after=16))
CHANGES = {
    "to eight steps, stacks in other ranges": (
        SCANNED,
        dict(update_interval=FitWindow(8, after=16), select_interval=16, full_warm_up_rounds=1),
        Plan(36, bad=(3, 18, 25), flush_at=(7, 21)),
        {},
    ),
    "to one step, selecting when others matter more": (
        FIRST,
        dict(update_interval=FitWindow(1, after=16), select_interval=AutoSelect(0.9, 3)),
        Plan(24, bad=(16, 20)),
        {},
    ),
    "to two, all at once, added up on the device": (
        SECOND,
        dict(update_interval=FitWindow(2, after=16), rolling=False, send_gradients="per_window"),
        Plan(24, flush_at=(16, 19)),
        {},
    ),
    "to sixteen, in turn, added up on the device": (
        SCANNED,
        dict(update_interval=FitWindow(16, after=16), send_gradients="per_window"),
        Plan(42, bad=(17, 30)),
        {},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CHANGES)
def test_a_run_with_windows_that_change_equals_the_reference(case):
    leaves, options, plan, engine = CHANGES[case]
    settings = Settings(topk_ratio=0.3, **options)
    theirs, slow = runs.reference(leaves, settings, plan)
    with Training(leaves, settings, **engine) as training:
        runs.assert_agree(training.history(plan), theirs)
        assert training.engine.stats.update_interval == settings.update_interval.interval
        assert training.engine.stats.reselections == slow.reselections
        # Its own program alone: what changes is no part of the step.
        assert training.program._cache_size() == 1


def measured(monkeypatch, busy):
    """The host needs these shares of its time, whatever the machine is doing."""
    monkeypatch.setattr(fit_module.WindowFit, "busy", lambda *_, **__: dict(busy))


SLOW = {1: 3.3, 2: 1.7, 4: 0.9, 8: 0.6, 16: 0.4}
FAST = {1: 0.6, 2: 0.4, 4: 0.3, 8: 0.2, 16: 0.1}
NEVER = {1: 30.0, 2: 20.0, 4: 9.0, 8: 6.0, 16: 4.0}
LONGER_IS_WORSE = {1: 3.0, 2: 2.0, 4: 1.1, 8: 0.9, 16: 1.0}
RIGHT = {1: 1.2, 2: 0.81, 4: 0.8, 8: 0.7, 16: 0.6}


@pytest.mark.parametrize(
    ("busy", "chosen"),
    [(SLOW, 8), (FAST, 1), (NEVER, 16), (LONGER_IS_WORSE, 8), (RIGHT, 4)],
    ids=["a slow host", "a fast host", "too slow for any", "closest", "as the run begins"],
)
def test_a_run_that_measured_is_repeated_bit_for_bit_by_its_number(
    monkeypatch, caplog, busy, chosen
):
    caplog.set_level(logging.INFO, "zenflow_jax")
    fits = dataclasses.replace(CALM, update_interval=FitWindow(after=16))
    named = FitWindow(chosen, after=16) if chosen != 4 else 4
    with Training(ONE, dataclasses.replace(CALM, update_interval=named)) as training:
        training.go(20)
        training.flush()
        expected = jax.tree.map(np.asarray, training.params)
    measured(monkeypatch, busy)
    with Training(ONE, fits) as training:
        training.go(16)
        assert training.state.schedule_state == (chosen, 16)
        assert training.engine.stats.update_interval == chosen
        training.go(4)
        training.flush()
        runs.assert_same_bits(jax.tree.map(np.asarray, training.params), expected)
    (told,) = (record.getMessage() for record in caplog.records)
    assert f"from step 17 on, {chosen} steps in a window" in told
    assert f"`update_interval=FitWindow({chosen}, 16)` repeats" in told


def test_windows_that_jax_has_no_pinned_memory_for_are_not_chosen(monkeypatch):
    measured(monkeypatch, SLOW)
    fits = dataclasses.replace(CALM, update_interval=FitWindow(after=16))
    with Training(ONE, fits) as training:

        def check(state):
            if state.schedule.window > 4:
                raise ValueError

        monkeypatch.setattr(training.engine, "_check_pinned", check)
        training.go(16)
        assert training.engine.stats.update_interval == 4


def test_named_windows_that_jax_has_no_pinned_memory_for_are_refused_before_the_run(monkeypatch):
    def check(engine, state):
        if state.schedule.window > 4:
            raise ValueError("no room")

    monkeypatch.setattr(zenflow_jax.HostEngine, "_check_pinned", check)
    named = dataclasses.replace(CALM, update_interval=FitWindow(8, after=16))
    with pytest.raises(ValueError, match="no room"):
        Training(ONE, named)


@pytest.mark.parametrize("at", [4, 16], ids=["before it measures", "before it chooses"])
def test_an_exchange_that_is_interrupted_while_it_waits_to_fit_is_not_gone_on_from(monkeypatch, at):
    fits = dataclasses.replace(CALM, update_interval=FitWindow(after=16))
    with Training(ONE, fits) as training:
        training.go(at - 1)
        training.step()

        def interrupt(engine):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(zenflow_jax.HostEngine, "_settle", interrupt)
            with pytest.raises(KeyboardInterrupt):
                training.exchange()
        for call in (training.exchange, training.flush):
            with pytest.raises(RuntimeError, match="interrupted half-way"):
                call()


def spans(first, last, seconds, *, slow=()):
    """Steps of which each takes so long, but some a hundred times as long."""
    for step in range(first, last + 1):
        length = seconds * (100 if step in slow else 1)
        yield zenflow_jax.Span("device", "dispatch", 0.0, length / 4, step)
        yield zenflow_jax.Span("device", "step", length / 4, length, step)
        yield zenflow_jax.Span("host", "update", 0.0, 1e3, step)


def test_what_the_host_needs_follows_from_what_was_measured_and_the_bytes_of_windows():
    tx = runs.transformation(SCANNED, Settings(update_interval=FitWindow()), offload=True)
    given = jax.eval_shape(tx.init, runs.initial(SCANNED))
    fit = fit_module.WindowFit(FitWindow(), warm_up=3, begun=0)
    assert (fit.last, fit.after) == (35, 32)
    assert [step for step in range(40) if fit.begins_after(step)] == [19]
    fit.begin(fit_module.Worked(7.0, 1))
    state = fit_module.with_interval(given, 4)
    # Steps before count for nothing, and an evaluation in between for little.
    steps = [*spans(1, 19, 50.0), *spans(20, 35, 2.0, slow=(21, 30))]
    work = fit_module.host_work(state)
    # The host worked a quarter of the time.
    now = fit_module.Worked(7.0 + 16 * 2.0 / 4, 1)
    busy = fit.busy(given, steps, now, compact=False)
    assert busy[4] == pytest.approx(work.busiest / work.mean / 4 / work.steps)
    once = fit_module.host_work(fit_module.with_interval(given, 1))
    assert busy[1] == pytest.approx(once.busiest / work.mean / 4)
    # Of twelve steps' work in the same time it would need the more for each.
    now = now._replace(skipped=5)
    fewer = fit.busy(given, steps, now, compact=False)
    assert fewer == pytest.approx({interval: 16 / 12 * share for interval, share in busy.items()})


@pytest.mark.parametrize(
    ("rule", "begun", "first", "last"),
    [
        (FitWindow(), 0, 16, 32),
        (FitWindow(after=16), 0, 4, 16),
        (FitWindow(), 12, 16, 32),
        (FitWindow(), 16, 20, 32),
        # Too few steps are left to measure, or none.
        (FitWindow(), 17, 21, 48),
        (FitWindow(), 32, 36, 48),
        (FitWindow(), 40, 44, 64),
        # What is named needs none.
        (FitWindow(8), 31, None, 32),
        (FitWindow(8), 32, None, 48),
    ],
)
def test_a_run_that_is_resumed_measures_long_enough(rule, begun, first, last):
    fit = fit_module.WindowFit(rule, warm_up=0, begun=begun)
    assert fit.last == last == fit.after
    assert [s for s in range(100) if fit.begins_after(s)] == ([] if first is None else [first])


def test_a_real_run_chooses_by_its_own_clock():
    fits = dataclasses.replace(CALM, update_interval=FitWindow(after=16))
    with Training(ONE, fits) as training:
        training.go(15)
        assert training.state.schedule_state == (0, 0)
        training.go(1)
        interval, after = map(int, training.state.schedule_state)
        assert after == 16
        assert interval in (1, 2, 4, 8, 16)
        training.go(1)
        assert training.engine.stats.update_interval == interval


def test_a_run_that_skips_what_it_would_measure_chooses_later(monkeypatch):
    measured(monkeypatch, SLOW)
    fits = dataclasses.replace(CALM, update_interval=FitWindow(after=16))
    with Training(ONE, fits) as training:
        for t in range(1, 33):
            assert training.state.schedule_state == (0, 0)
            training.step(bad=t in range(5, 10) or t in range(20, 24))
            training.exchange()
        # Of steps 5 to 16 five were skipped, of the sixteen after them four.
        assert training.state.schedule_state == (8, 32)


def test_a_run_that_has_nothing_on_its_host_chooses_and_ends_like_any_other():
    fits = dataclasses.replace(CALM, topk_ratio=1.0, update_interval=FitWindow(after=16))
    with Training(ONE, fits) as training:
        training.go(18)
        training.flush()
        assert training.engine.stats.update_interval == 1
        assert zenflow_jax.hiding(training.state, training.engine.stats, 1.0).busy == 0


def test_what_is_being_saved_when_windows_change_is_of_its_step(tmp_path):
    settings = dataclasses.replace(CALM, update_interval=FitWindow(8, after=16))
    with Training(SCANNED, settings, threads=1, host_kernel="numpy") as training:
        training.go(11)
        expected = copied(training.engine.state())
        stream = training.engine._stream(10**6)
        # With nothing to update before windows change, nobody has copied the arrays until then.
        for t in range(12, 28):
            training.step(bad=t <= 16)
            training.exchange()
        stream.write(tmp_path)
        assert_saved(tmp_path, expected)


@pytest.mark.parametrize(("then", "now"), [(4, 8), (8, 4), (4, 2)])
# Beside a range in float32, and what is small, but that compact moments are encoded in blocks.
@pytest.mark.parametrize(("compact", "blocks"), [(False, 0.5), (True, 3)], ids=str)
def test_a_leaf_cut_in_other_ranges_has_the_same_bits_and_is_moved_a_range_at_a_time(
    then, now, compact, blocks
):
    whole = LeafSpec("w", (16, 64, 128), np.dtype(jnp.bfloat16), axis=1, k=8, decay=True)
    old_specs, specs = (
        dataclasses.replace(whole, groups=tuple(range(count))).ranges for count in (then, now)
    )
    random = np.random.default_rng(0)
    adam = HostAdam("numpy", 1)
    host = HostState(
        old_specs,
        [random.standard_normal(spec.shape).astype(spec.dtype) for spec in old_specs],
        [np.tile(np.arange(8, dtype=np.int32), (spec.shape[0], 1)) for spec in old_specs],
        adam,
        Schedule(then, 16, 0, then, 1, None),
        [range(then)],
        compact=compact,
    )
    for leaf in host.leaves:
        leaf.master.rest[...] = random.integers(-30000, 30000, leaf.master.shape)
        for moment in (leaf.mu, leaf.nu):
            moment.write(np.square(random.standard_normal(moment.shape, np.float32)))
        leaf.steps[...] = random.integers(1, 9, leaf.steps.shape)

    def joined(name):
        found = (getattr(leaf, name) for leaf in host.leaves)
        return np.concatenate([x if name == "steps" else x.as_float32() for x in found])

    before = [joined(name) for name in ("master", "mu", "nu", "steps")]
    bytes_before = host.nbytes
    tracemalloc.start()
    host.regroup(host.leaves, specs, [range(now)], Schedule(now, 16, 0, now, 1, None))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [leaf.spec for leaf in host.leaves] == list(specs)
    for name, expected in zip(("master", "mu", "nu", "steps"), before, strict=True):
        np.testing.assert_array_equal(joined(name), expected)
    assert peak < bytes_before + (1 / now + blocks) * 4 * before[0].size


def test_what_changes_parameters_is_seen_where_windows_change():
    settings = dataclasses.replace(CALM, update_interval=FitWindow(1, after=16))
    with Training(ONE, settings) as training:
        training.go(16)
        training.params = jax.tree.map(lambda x: x + 1, training.params)
        with pytest.raises(RuntimeError, match="nothing but zenflow changes"):
            training.go(4)


def test_a_run_goes_on_with_the_windows_that_it_has_chosen_and_no_others(monkeypatch):
    measured(monkeypatch, SLOW)
    fits = dataclasses.replace(CALM, update_interval=FitWindow(after=16))
    with Training(ONE, fits, threads=1) as training:
        training.go(17)
        params, state, engine_state = saved(training)

    def go_on_with(window):
        settings = dataclasses.replace(CALM, update_interval=window)
        other = runs.transformation(ONE, settings, offload=True).init(params)
        # The arrays that were saved, in a state with these settings.
        found = None if window == 4 else state.schedule_state
        mine = dataclasses.replace(state, schedule=other.schedule, schedule_state=found)
        return zenflow_jax.HostEngine(params, mine, engine_state=engine_state)

    with pytest.raises(ValueError, match=r"FitWindow\(8, 16\), got FitWindow\(2, 16\)"):
        go_on_with(FitWindow(2, after=16))
    with pytest.raises(ValueError, match='`update_interval` as in the saved run, "fit", got 4'):
        go_on_with(4)
    for window in (FitWindow(8, after=16), "fit"):
        engine = go_on_with(window)
        assert engine.stats.update_interval == 8
        assert engine._fit is None  # it chooses once
        engine.close()


def test_a_checkpoint_says_the_groups_of_all_windows_that_may_be_chosen():
    # Where a mesh divides the layers of a stack, another choice would find other groups.
    def options(window):
        tx = runs.transformation(SCANNED, Settings(update_interval=window), offload=True)
        return options_of(jax.eval_shape(tx.init, runs.initial(SCANNED)))

    found, expected = options(FitWindow()), [options(interval) for interval in INTERVALS]
    for name in ("groups", "leaves"):
        np.testing.assert_array_equal(found[name], np.concatenate([x[name] for x in expected]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host_state", "kernel"), [("float32", "numba"), ("compact", "numpy")], ids=str
)
def test_a_run_resumed_around_its_choice_ends_with_the_same_bits(
    monkeypatch, tmp_path, host_state, kernel
):
    measured(monkeypatch, SLOW)
    fits = Settings(topk_ratio=0.3, update_interval="fit", weight_decay=0.1)
    plan = Plan(43, bad=(8, 35), flush_at=(13, 41))
    options = {"host_state": host_state, "host_kernel": kernel}
    kept = (16, 32, 33, 38)  # before, at, and after the choice, with updates under way
    with Training(SCANNED, fits, threads=1, donate=True, **options) as whole:
        checkpoints = []
        for t in kept:
            go(whole, plan, t)
            checkpoints.append(saved(whole))
            (tmp_path / str(t)).mkdir()
            whole.engine._stream(0).write(tmp_path / str(t))
        go(whole, plan, plan.steps)
        expected = end(whole)
        abstract = zenflow_jax.abstract_engine_state(whole.tx.init(whole.params))
        for t, tree in zip(kept, checkpoints, strict=True):
            shapes = (jax.tree.map(lambda x: (x.shape, x.dtype), y) for y in (tree[2], abstract))
            assert next(shapes) == next(shapes)
            for engine_state in (tree[2], read_engine_state(tmp_path / str(t))):
                again = resumed(whole, (*copied(tree[:2]), engine_state), **options)
                again.t = t
                with again:
                    if t >= 32:
                        assert again.engine.stats.update_interval == 8
                    go(again, plan, plan.steps)
                    runs.assert_same_bits(end(again), expected)
