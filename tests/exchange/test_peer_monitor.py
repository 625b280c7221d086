"""Processes that share an engine, one of which fails, closes it, or ends.

`test_several_processes.py` tests the failure of a real engine.
"""

import gc
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.processes import run_together
from zenflow_jax._exchange import peers
from zenflow_jax._exchange.peers import CLOSED, PeerMonitor

POLL_S = 0.3  # process 0 outlives the others by three polls, which must suffice
SOON_S = 0.5  # a grace period that a test waits for
NEVER_S = 300.0  # a grace period that outlasts every test
TIMEOUT_S = 120.0


class Engine:
    """The part of an engine that a monitor needs; its caller waits for `future`."""

    def __init__(self, name: str, grace_s: float, processes: Sequence[int] = (0, 1), **more: Any):
        self.future: Future = Future()
        self.watch = PeerMonitor(name, processes, poll_s=POLL_S, grace_s=grace_s, **more)
        self.watch.start(self.fail)
        weakref.finalize(self, self.watch.close)

    def fail(self, message: str) -> None:
        self.future.set_exception(RuntimeError(message))

    def raised(self, call: int) -> None:
        """Raises the failure from call number `call`, after the earlier calls have passed."""
        for _ in range(call):
            self.watch.passed()
        self.watch.raised()


def join(me: int, port: int, count: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", count, me, cluster_detection_method="deactivate"
    )
    # Created here, because the exit would wait for a process that never reports its devices.
    assert jax.device_count() == 2


def collective() -> float:
    """Sums over both processes; returns once both have called it."""
    mesh = jax.make_mesh((2,), ("x",))
    x = jax.make_array_from_callback(
        (2,), jax.NamedSharding(mesh, jax.P("x")), lambda _: np.ones(1, np.float32)
    )
    total = jax.jit(jnp.sum, out_shardings=jax.NamedSharding(mesh, jax.P()))(x)
    return float(total)


def watches() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "zenflow-peers"]


def join_watches() -> None:
    for thread in watches():
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def await_leave(engine: Engine, process: int) -> None:
    """Waits until the others see that this process has left the engine."""
    watch = engine.watch
    key = f"{watch._directory}{process}/left"
    watch._client.blocking_key_value_get(key, int(1000 * TIMEOUT_S))


def go_on(me: int, port: int, count: int) -> None:
    """Runs, in turn, all cases in which no process may be killed."""
    join(me, port, count)

    # All fail, and raise at the same point. Process 0 may or may not hear of process 1 first.
    engine = Engine("all fail", SOON_S)
    engine.watch.report(f"mistake of process {me}")
    engine.raised(7)
    engine.watch.close()
    join_watches()
    assert collective() == 2

    # One process fails, and all raise at the same point.
    engine = Engine("one fails", SOON_S)
    if me == 1:
        engine.watch.report("a letter that UTF-8 lacks: \ud800, and many more" + "." * 5_000_000)
    else:
        with pytest.raises(RuntimeError, match="^process 1 failed: a letter"):
            engine.future.result()
    engine.raised(7)
    join_watches()
    assert collective() == 2

    # No process fails, but one closes first, and the other must not wait for it.
    engine = Engine("one closes first", 0.0)
    if me == 0:
        await_leave(engine, 1)
    engine.watch.close()
    engine.watch.close()
    assert me == 0 or watches()
    join_watches()

    # One process ends while the other still runs: its exit must not wait for it.
    engine = Engine("one ends", 0.0)
    client = engine.watch._client
    if me == 1:
        engine.watch._at_exit()
        client.key_value_set("ended", "")
    else:
        client.blocking_key_value_get("ended", int(1000 * TIMEOUT_S))
        engine.watch.close()
    join_watches()

    # All processes drop an engine.
    Engine("forgotten", SOON_S)
    gc.collect()
    join_watches()

    # The interpreter closes engines that the program left open, at different times.
    left_open = Engine("left open", NEVER_S)
    assert collective() == 2
    if me == 0:
        await_leave(left_open, 1)
    sys.stdout.write("the last line\n")


@pytest.mark.slow
def test_a_program_continues_if_no_process_waits_for_another():
    for output in run_together("exchange.test_peer_monitor", "go_on", 2, 1):
        assert output.endswith("the last line\n"), output  # no message from JAX or this library


def test_one_process_needs_no_thread_or_service_and_several_need_jax_distributed():
    engine = Engine("engine", SOON_S, processes=[0])
    engine.watch.report("the moments ran away")
    engine.raised(1)
    engine.watch.close()
    assert not watches()
    assert not engine.future.done()
    with pytest.raises(RuntimeError, match=r"Call `jax.distributed.initialize`"):
        PeerMonitor("engine", [0, 1])


class Store:
    """Replaces JAX's client: keeps process 0's messages, possibly out of order."""

    def __init__(self):
        self.told: list[tuple[str, str]] = []
        self.other_left: str | None = None  # the point at which process 1 left
        self.broken = False
        self.refused, self.written = threading.Event(), threading.Event()

    def key_value_set(self, key: str, text: str, allow_overwrite: bool) -> None:
        if self.broken:
            self.refused.set()
        self._answer()
        self.told.append((key.rpartition("/")[2], text))
        self.written.set()

    def key_value_dir_get(self, directory: str) -> list[tuple[str, str]]:
        self._answer()
        return [] if self.other_left is None else [(f"{directory}1/left", self.other_left)]

    def _answer(self) -> None:
        if self.broken:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect to all addresses")


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr(peers, "_connect", lambda: store)
    return store


def test_a_monitor_survives_an_unavailable_service_and_ends_after_its_engine_is_closed(store):
    store.broken = True
    Engine("closed", NEVER_S).watch.close()
    join_watches()
    store.refused.clear()
    engine = Engine("engine", NEVER_S)
    engine.watch.report("the moments ran away")
    assert store.refused.wait(TIMEOUT_S)
    store.broken = False
    assert store.written.wait(TIMEOUT_S)
    assert store.told == [("failed", "the moments ran away")]
    store.other_left = CLOSED
    engine.watch.close()
    join_watches()


@pytest.mark.parametrize(
    ("left", "other"),
    [(False, None), (True, None), (True, "point 6"), (True, CLOSED), (True, "point 7")],
    ids=["none has left", "the other is stuck", "elsewhere", "closed", "both at one point"],
)
def test_a_process_is_stuck_unless_all_have_left_at_the_same_point(store, capfd, left, other):
    engine = Engine("engine", SOON_S, exit_if_stuck=False)
    store.other_left = other
    engine.watch.report("the moments ran away")
    if left:
        engine.raised(7)
    join_watches()
    said = capfd.readouterr().err.split("zenflow_jax: ")[1:]
    words = ["keep waiting", "most recent call first"] if other != "point 7" else []
    for text, word in zip(said, words, strict=True):
        assert text.startswith("process 0 failed: the moments ran away")
        assert "`exit_if_stuck=False`" in text
        assert word in text
