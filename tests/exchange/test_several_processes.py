"""Runs with two processes, over gloo on 127.0.0.1, equal the reference in each process."""

import dataclasses
import gc
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

import zenflow_jax
from tests import comparisons, meshes, processes, resuming
from tests.exchange.hooks import hooked
from tests.meshes import ADAPTIVE, LEAVES, STALE
from tests.runs import Plan, Training
from zenflow_jax._exchange import worker

HERE = "exchange.test_several_processes"  # for processes that run functions of this module

# Windows and selections follow sums over all processes.
DECIDED = dataclasses.replace(ADAPTIVE, send_gradients="after_step")
PLAN = Plan(10, bad=(6,), flush_at=(8,))


def work(me: int, port: int, count: int, *calls: Any) -> None:
    """Runs one of the processes: joins the others and calls the functions below, in turn."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # As in docs/multi_host.md, but shorter.
    timeouts = {"heartbeat_timeout_seconds": 30, "shutdown_timeout_seconds": 5}
    jax.distributed.initialize(f"127.0.0.1:{port}", count, me, **timeouts)
    for function, *args in calls:
        print(function, flush=True)  # noqa: T201 - if a process fails, this is its last output
        globals()[function](me, count, *args)


def on_all(axes: dict[str, int], placement: str) -> dict[str, NamedSharding]:
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto)
    return meshes.shardings(mesh, placement)


def train(me: int, count: int) -> None:
    """Runs with channels divided over processes, compared with the reference."""
    shardings = on_all({"fsdp": count, "tensor": jax.local_device_count()}, "both")
    shards = meshes.pieces(LEAVES, shardings)
    with Training(LEAVES, DECIDED, shardings=shardings, donate=True) as training:
        expected, slow = comparisons.reference(training, PLAN, shards)
        assert len(set(np.diff(slow.turns[0].boundaries))) > 1
        ours = []
        for t, values in training.follow(PLAN):
            ours.append(values)
            for name, channels in training.selected().items():
                np.testing.assert_array_equal(channels, expected.selected[t - 1][name])
        comparisons.assert_close(ours, expected.params)


def pass_on(me: int, count: int, before: str, until: int, after: str) -> None:
    """Resumes from a checkpoint, if there is one, and writes a new checkpoint."""
    plan = Plan(until, bad=(12,))
    shardings = on_all({"data": jax.device_count()}, "replicated")
    with Training(LEAVES, STALE, shardings=shardings, donate=True) as training:
        if before:
            if count > 1:
                check_failed_start(training, me, count, None)
                check_disagreement(training, me, count)
            saved = resuming.resume_by_orbax(training, Path(before))
            if count > 1:
                check_failed_start(training, me, count, saved)
                check_refusal(training, me, count, saved)
                check_gone(training, me, count)
        resuming.go(training, plan, until)
        if after:
            resuming.save_by_orbax(training, Path(after))
        expected, _ = comparisons.reference(training, plan)
        comparisons.assert_close([training.values()], expected.params[-1:])
        # Processes that hold the same copies each do only a share of the work.
        training.settle()
        updated = sum(leaf.master.size for leaf in training.host.leaves)
        assert updated * count == sum(math.prod(x.shape) for x in LEAVES if x.axis is not None)


def check_failed_start(training: Training, me: int, count: int, saved: Any) -> None:
    """Checks that all processes raise an error if the last process cannot make its engine."""

    def explode(*args, **options):
        raise MemoryError("no room for the masters")

    last = me == count - 1
    error, words = ValueError, f"Process {count - 1} rejected"
    with pytest.MonkeyPatch.context() as monkeypatch:
        if last:
            error, words = MemoryError, "no room for the masters"
            monkeypatch.setattr(worker, "HostState", explode)
        with pytest.raises(error, match=words):
            zenflow_jax.HostEngine(training.params, training.state, engine_state=saved)


def check_disagreement(training: Training, me: int, count: int) -> None:
    """Checks that all processes reject a state if the last process has another run's state."""
    token = plus({"": training.state.token}, int(me == count - 1))[""]
    with pytest.raises(ValueError, match="the same checkpoint in every process"):
        zenflow_jax.HostEngine(training.params, training.state._replace(token=token))


def check_refusal(training: Training, me: int, count: int, saved: Any) -> None:
    """Checks that all processes reject a checkpoint that the last process cannot resume from."""
    with pytest.raises(ValueError, match="Other processes have parts"):
        training.engine.state()
    last = me == count - 1
    params = plus(training.params, int(last))
    words = "`params` differ from those" if last else f"Process {count - 1} rejected"
    with pytest.raises(ValueError, match=words):
        zenflow_jax.HostEngine(params, training.state, engine_state=saved)
    tokens = multihost_utils.process_allgather(np.int32(training.engine._tokens.number))
    assert np.unique(tokens).size == 1


def check_gone(training: Training, me: int, count: int) -> None:
    """Checks that no process compares parameters that are deleted in the last process."""
    if me == count - 1:
        training.params = plus(training.params, 0)
        gc.collect()
    snapshot = training.engine.snapshot()
    snapshot.close()
    assert b'"params": 0,' in bytes(snapshot._run)


def plus(params: dict[str, jax.Array], number: int) -> dict[str, jax.Array]:
    """Returns arrays with this process's part of `params`, plus a number."""
    return {
        name: jax.make_array_from_single_device_arrays(
            x.shape, x.sharding, [s.data + s.data.dtype.type(number) for s in x.addressable_shards]
        )
        for name, x in params.items()
    }


def fail(me: int, count: int, failing: int, kill: bool) -> None:
    """Trains until a process fails or is killed, which JAX's time-outs must end in all others."""

    def explode():
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("the memory is gone")

    shardings = on_all({"data": jax.device_count()}, "replicated")
    with pytest.MonkeyPatch.context() as monkeypatch:
        if me == failing:
            hooked(monkeypatch).mail = explode
        with Training(LEAVES, STALE, shardings=shardings, donate=True) as training:
            training.go(100_000)


# In the same processes, because starting them takes most of the time.
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("failing", "kill"), [(0, False), (1, True)])
def test_runs_in_two_processes_equal_the_reference_resume_in_one_or_two_and_fail_together(
    tmp_path, failing, kill
):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    # Each time, an update is in flight, and the open window contains a step.
    pass_on(0, 1, "", 5, first)
    calls = ("train",), ("pass_on", first, 9, second), ("fail", failing, kill)
    outputs = processes.run_together(HERE, "work", 2, 2, *calls[failing:], code=None)
    pass_on(0, 1, second, 13, "")
    for me, output in enumerate(outputs):
        begun = re.findall(r"^(?:train|pass_on|fail)$", output, re.MULTILINE)
        assert begun == ["train", "pass_on", "fail"][failing:], output[-5000:]
        reason = "JAX distributed service detected fatal errors"
        if me == failing:
            reason = "" if kill else "the memory is gone"
        assert reason in output.partition("\nfail\n")[2], output[-5000:]
