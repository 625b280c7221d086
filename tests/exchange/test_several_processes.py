"""Runs of two and of four processes, over gloo on 127.0.0.1, equal the reference in each.

Tests that want processes alike stand side by side: they run in the same ones.
"""

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

import zenflow_jax
from tests import elastic, meshes, processes, runs
from tests.meshes import ADAPTIVE, LEAVES, STALE
from tests.runs import Plan, Settings, Training
from zenflow_jax import _engine
from zenflow_jax._host.state import HostState

HERE = "exchange.test_several_processes"  # for processes that run functions of this module

LATE = dataclasses.replace(STALE, send_gradients="after_step")
SUMMED = dataclasses.replace(STALE, send_gradients="per_window")
EVERY = Settings(topk_ratio=0.2, update_interval=1, select_interval=2, staleness=0)
PLAN = Plan(10, bad=(6,), flush_at=(8,))
IN_WINDOW = 5  # with an update under way


def join(me: int, port: int, count: int) -> None:
    if jax.distributed.is_initialized():  # by the test before
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, me)


def on_all(axes: dict[str, int], placement: str) -> dict[str, jax.sharding.NamedSharding]:
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto)
    return meshes.shardings(mesh, placement)


def train(me: int, port: int, count: int, *names: str) -> None:
    """One of the processes: runs on different placements, each held to the reference."""
    join(me, port, count)
    here = jax.local_device_count()
    cases = {
        "replicated": ({"data": count * here}, "replicated", STALE, None),
        "divided": ({"fsdp": count, "tensor": here}, "both", LATE, IN_WINDOW),
        "summed": ({"fsdp": count, "tensor": here}, "both", SUMMED, None),
    }
    for axes, placement, settings, look_at in map(cases.__getitem__, names):
        shardings = on_all(axes, placement)
        shards = meshes.pieces(LEAVES, shardings)
        expected, _ = runs.reference(LEAVES, settings, PLAN, shards=shards)
        more = {"shardings": shardings, "donate": True, **elastic.ENGINE}
        with Training(LEAVES, settings, **more) as training:
            ours = []
            for t, values in training.follow(PLAN):
                ours.append(values)
                if t == look_at:
                    check_peek(training)
                for name, channels in training.selected().items():
                    np.testing.assert_array_equal(channels, expected.selected[t - 1][name])
            runs.assert_close(ours, expected.params)


def rounded(me: int, port: int, count: int) -> None:
    """One of the processes: with moments in 8 bits, of channels that nothing divides."""
    join(me, port, count)
    shardings = on_all({"fsdp": jax.device_count()}, "channels")
    shards = meshes.pieces(LEAVES, shardings)
    more = {"shardings": shardings, "host_state": "compact", **elastic.ENGINE}
    with Training(LEAVES, STALE, **more) as training:
        *_, (_, ours) = training.follow(PLAN)
    apart = []
    for host_state in ("compact", "float32"):
        expected, _ = runs.reference(LEAVES, STALE, PLAN, shards=shards, host_state=host_state)
        pairs = [(x, expected.params[-1][name]) for name, x in ours.items()]
        apart.append(np.mean(np.concatenate([(abs(x - y) > runs.ATOL).ravel() for x, y in pairs])))
    assert apart[0] <= runs.ANOTHER_CODE < apart[1], apart


def every(me: int, port: int, count: int) -> None:
    """One of the processes: windows of one step, held to `optax.adamw`."""
    join(me, port, count)
    shardings = on_all({"fsdp": count, "tensor": jax.local_device_count()}, "both")
    with Training(LEAVES, EVERY, shardings=shardings, **elastic.ENGINE) as training:
        ours = [values for _, values in training.follow(Plan(6))]
        theirs = runs.adamw(LEAVES, None, EVERY.weight_decay, 6, 0, shardings)
        runs.assert_close(ours, theirs)


def check_peek(training: Training) -> None:
    seen = training.engine.peek(training.params, training.state)
    masters = zenflow_jax.master_params(training.params, training.state, training.engine)
    ahead = False
    for name, p in training.params.items():
        assert seen[name].sharding == p.sharding
        value = runs.fetch(seen[name])
        np.testing.assert_array_equal(value, runs.fetch(masters[name]).astype(p.dtype))
        ahead |= bool(np.any(value != runs.fetch(p)))
    assert ahead


def share(me: int, port: int, count: int) -> None:
    """One of the processes: where all have copies, each does its part of the work only."""
    join(me, port, count)
    shardings = on_all({"data": jax.device_count()}, "replicated")
    done = []
    for partition in (True, False):
        options = {"shardings": shardings, "partition": partition, "donate": True, **elastic.ENGINE}
        with Training(LEAVES, STALE, **options) as training:
            training.go(9)
            training.settle()
            updated = sum(leaf.master.size for leaf in training.engine._worker.leaves())
            stats = training.engine.stats
            done.append((updated, stats.bytes_to_host - 9 * 44, stats.bytes_to_device))
    ours, alone = np.array(done)
    assert ours[0] * count == alone[0]
    # All but the channels' numbers and step counts, which every process has.
    assert np.all(ours[1:] < 1.1 * alone[1:] / count)


def adapt(me: int, port: int, count: int) -> None:
    """One of the processes: the last of them is slow, on either thread, at steps that vary."""
    join(me, port, count)
    rng = np.random.default_rng(me)

    class Slow(HostState):
        def add(self, *args):
            time.sleep(0.1 * rng.random())
            super().add(*args)

    late = me == count - 1
    with pytest.MonkeyPatch.context() as monkeypatch:
        if late:
            monkeypatch.setattr(_engine, "HostState", Slow)
        adapt_beside(late, rng)


def adapt_beside(late: bool, rng: np.random.Generator) -> None:
    plan = Plan(24, bad=(9,))
    shardings = on_all({"fsdp": jax.device_count()}, "channels")
    shards = meshes.pieces(LEAVES, shardings)
    expected, slow = runs.reference(LEAVES, ADAPTIVE, plan, shards=shards)
    with Training(LEAVES, ADAPTIVE, shardings=shardings, **elastic.ENGINE) as training:
        ends, windows = [], 0
        for t, _ in enumerate(expected.params, start=1):
            training.step(bad=t in plan.bad)
            if late and rng.random() < 0.3:
                time.sleep(0.2)
            training.exchange()
            if training.engine.stats.windows > windows:
                windows = training.engine.stats.windows
                ends.append(t)
            np.testing.assert_equal(training.selected(), expected.selected[t - 1])
        assert [ends] == slow.boundaries
        assert len(training.engine.stats.window_lengths) > 2
        runs.assert_close([training.values()], expected.params[-1:])


def pass_on(me: int, port: int, count: int, before: str, until: int, after: str) -> None:
    """One of the processes: goes on from one checkpoint, if there is one, and writes another."""
    if count > 1:
        join(me, port, count)
    shardings = on_all({"data": jax.device_count()}, "replicated")
    with elastic.HERE(shardings=shardings) as training:
        if before:
            elastic.resume(training, Path(before))
            if count > 1:
                check_refusal(training, me, count)
                check_gone(training, me, count)
        elastic.follow(training, until)
        if after:
            elastic.save(training, Path(after))
        plan = elastic.PLAN._replace(steps=until)
        expected, _ = runs.reference(LEAVES, STALE, plan)
        runs.assert_close([training.values()], expected.params[-1:])


def check_refusal(training: Training, me: int, count: int) -> None:
    """What the last process cannot go on with is refused by all of them."""
    last = me == count - 1
    params = plus(training.params, int(last))
    words = r"got other values of \['bias'\], " if last else f"process {count - 1} has refused"
    with pytest.raises(ValueError, match=words):
        zenflow_jax.HostEngine(params, training.state, engine_state=training.engine.state())
    tokens = multihost_utils.process_allgather(np.int32(training.engine._mailbox.token))
    assert np.unique(tokens).size == 1


def check_gone(training: Training, me: int, count: int) -> None:
    """What is gone in the last process has no fingerprint in any of them."""
    if me == count - 1:
        training.params = plus(training.params, 0)
        gc.collect()
    assert not training.engine.state()["counts"]["fingerprints"].any()


def plus(params: dict[str, jax.Array], number: int) -> dict[str, jax.Array]:
    """Other arrays, of which this process has what it has of `params`, plus a number."""
    return {
        name: jax.make_array_from_single_device_arrays(
            x.shape, x.sharding, [s.data + s.data.dtype.type(number) for s in x.addressable_shards]
        )
        for name, x in params.items()
    }


def fail(me: int, port: int, count: int) -> None:
    """One of the processes: the worker of the last one fails, the others wait for it."""
    join(me, port, count)
    _engine.PeerMonitor = functools.partial(_engine.PeerMonitor, poll_s=0.2, grace_s=2.0)

    class Broken(HostState):
        def add(self, *args):
            raise OSError("the memory is gone")

    if me == count - 1:
        _engine.HostState = Broken
    shardings = on_all({"data": jax.device_count()}, "replicated")
    with elastic.HERE(shardings=shardings) as training:
        training.go(1000)


@pytest.fixture(scope="module")
def together() -> Iterator[Callable[..., list[processes.Outcome]]]:
    """What becomes of so many processes in a function; they stay for a test that wants as many."""
    groups: list[processes.Group] = []

    def call(function: str, count: int, devices: int, *args: Any) -> list[processes.Outcome]:
        if groups and not (groups[0].size == (count, devices) and groups[0].alive):
            groups.pop().close()
        if not groups:
            groups.append(processes.Group(count, devices))
        return groups[0].run(HERE, function, *args)

    yield call
    for group in groups:
        group.close()


# How many there are decides who has which part; the rest is held by two of two devices alone.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "devices", "names"),
    [(4, 1, ["replicated", "summed"]), (2, 2, ["replicated", "divided", "summed"])],
)
def test_several_processes_equal_the_reference(together, count, devices, names):
    for code, output in together("train", count, devices, *names):
        assert code is None, output[-5000:]


@pytest.mark.slow
def test_compact_moments_of_two_processes_are_those_of_the_reference(together):
    for code, output in together("rounded", 2, 2):
        assert code is None, output[-5000:]


@pytest.mark.slow
def test_several_processes_equal_optax_adamw(together):
    for code, output in together("every", 2, 2):
        assert code is None, output[-5000:]


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_another_number_of_processes(together, tmp_path):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    # Each time as `elastic.SAVED_AT` is.

    def alone(devices: int, before: str, until: int, after: str) -> None:
        args = (0, 0, 1, before, until, after)
        processes.assert_ends_well(processes.start_process(HERE, "pass_on", *args, devices=devices))

    alone(4, "", 5, first)
    for code, output in together("pass_on", 2, 2, first, 9, second):
        assert code is None, output[-5000:]
    alone(1, second, 13, "")


@pytest.mark.slow
def test_each_process_does_its_part_of_the_work(together):
    for code, output in together("share", 2, 2):
        assert code is None, output[-5000:]


@pytest.mark.slow
def test_all_processes_close_the_same_windows_however_slow_one_is(together):
    for code, output in together("adapt", 2, 2):
        assert code is None, output[-5000:]


# The last of its kind: it ends the processes.
@pytest.mark.slow
def test_a_worker_that_fails_ends_all_processes_with_its_message(together):
    for code, output in together("fail", 2, 2):
        assert code not in (0, None)
        assert "the memory is gone" in output, output[-5000:]
