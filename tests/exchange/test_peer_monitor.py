"""What a process of several does when it or another one fails, closes, or ends.

`test_several_processes.py` has a failure of a real engine.
"""

import gc
import sys
import threading
import time
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

POLL_S = 0.3  # process 0 outlives the others by three polls, which must be time enough
SOON_S = 0.5  # a grace that a test waits for
NEVER_S = 300.0  # and one that no test lives to see
TIMEOUT_S = 120.0


class Engine:
    """The part of an engine that a watch knows: its caller waits for `future`."""

    def __init__(self, name: str, grace_s: float, processes: Sequence[int] = (0, 1), **more: Any):
        self.future: Future = Future()
        self.watch = PeerMonitor(name, processes, poll_s=POLL_S, grace_s=grace_s, **more)
        self.watch.start(self.fail)
        weakref.finalize(self, self.watch.close)

    def fail(self, message: str) -> None:
        self.future.set_exception(RuntimeError(message))

    def raised(self, call: int) -> None:
        """Its caller gets a failure from that call, after so many others."""
        for _ in range(call):
            self.watch.passed()
        self.watch.raised()

    def fails(self) -> None:
        """Its worker fails, and its caller gets that from its second call."""
        self.watch.report("the moments ran away")
        self.raised(1)


def join(me: int, port: int, count: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", count, me, cluster_detection_method="deactivate"
    )
    # Made here, or the exit would wait for a process that never says which devices it has.
    assert jax.device_count() == 2


def collective() -> float:
    """A sum over both processes: returns once both have called it."""
    mesh = jax.make_mesh((2,), ("x",))
    x = jax.make_array_from_callback(
        (2,),
        jax.NamedSharding(mesh, jax.P("x")),
        lambda _: np.ones(1, np.float32),
    )
    total = jax.jit(jnp.sum, out_shardings=jax.NamedSharding(mesh, jax.P()))(x)
    return float(total)


def wait_until(condition: Any) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.02)


def watches() -> bool:
    return any(t.name == "zenflow-peers" for t in threading.enumerate())


def has_left(engine: Engine, process: int) -> bool:
    """Whether that process has left the engine, as the others see it."""
    watch = engine.watch
    news = watch._client.key_value_dir_get(watch._directory)
    return f"{watch._directory}{process}/left" in dict(news)


def go_on(me: int, port: int, count: int) -> None:
    """All that must not end a process, one after the other."""
    join(me, port, count)

    # All fail, and raise at the same point. Process 0 may hear of process 1 first, or not.
    engine = Engine("all fail", SOON_S)
    engine.watch.report(f"mistake of process {me}")
    engine.raised(7)
    engine.watch.close()
    wait_until(lambda: not watches())
    assert collective() == 2

    # One fails, and all raise at the same point.
    engine = Engine("one fails", SOON_S)
    if me == 1:
        engine.watch.report("a letter that UTF-8 lacks: \ud800, and many more" + "." * 5_000_000)
    else:
        with pytest.raises(RuntimeError, match="^process 1 failed: a letter"):
            engine.future.result()
    engine.raised(7)
    wait_until(lambda: not watches())
    assert collective() == 2

    # None fails, and one closes long before the other.
    engine = Engine("one closes first", SOON_S)
    if me == 0:
        wait_until(lambda: has_left(engine, 1))
        start = time.monotonic()
        wait_until(lambda: time.monotonic() > start + 2 * SOON_S)
    engine.watch.close()
    engine.watch.close()
    assert me == 0 or watches()
    wait_until(lambda: not watches())

    # An engine is forgotten, by all.
    Engine("forgotten", SOON_S)
    gc.collect()
    wait_until(lambda: not watches())

    # The interpreter closes what the program did not, at different times.
    left_open = Engine("left open", NEVER_S)
    assert collective() == 2
    if me == 0:
        wait_until(lambda: has_left(left_open, 1))
    sys.stdout.write("the last line\n")


@pytest.mark.slow
def test_a_program_goes_on_where_no_process_waits_for_another():
    for output in run_together("exchange.test_peer_monitor", "go_on", 2, 1):
        assert output.endswith("the last line\n"), output  # nothing of ours or JAX's


def test_one_process_has_no_thread_and_needs_no_service_and_several_need_jax_distributed():
    engine = Engine("engine", SOON_S, processes=[0])
    engine.fails()
    engine.watch.close()
    assert not watches()
    assert not engine.future.done()
    with pytest.raises(RuntimeError, match=r"Call `jax.distributed.initialize`"):
        PeerMonitor("engine", [0, 1])


class Store:
    """In the place of JAX's client: a dict, which can be out of order."""

    def __init__(self):
        self.entries: dict[str, str] = {}
        self.broken = False

    def key_value_set(self, key: str, text: str, allow_overwrite: bool) -> None:
        self._answer()
        self.entries[key] = text

    def key_value_dir_get(self, directory: str) -> list[tuple[str, str]]:
        self._answer()
        return [(k, v) for k, v in self.entries.items() if k.startswith(directory)]

    def _answer(self) -> None:
        if self.broken:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect to all addresses")


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr(peers, "_connect", lambda: store)
    return store


def test_a_watch_survives_a_service_that_is_away_and_ends_with_it_once_its_engine_is_closed(store):
    engine, other = Engine("engine", NEVER_S), Engine("other", NEVER_S)
    store.broken = True
    other.watch.close()
    wait_until(lambda: other.watch._at_rest.is_set())
    engine.watch.report("the moments ran away")
    wait_until(lambda: engine.watch._failed)
    assert not store.entries
    store.broken = False
    wait_until(lambda: store.entries)
    assert store.entries == {f"{engine.watch._directory}0/failed": "the moments ran away"}
    store.entries[f"{engine.watch._directory}1/left"] = CLOSED
    engine.watch.close()
    wait_until(lambda: not watches())


@pytest.mark.parametrize(
    ("left", "other"),
    [(False, None), (True, None), (True, "point 6"), (True, CLOSED), (True, "point 7")],
    ids=["none has left", "the other is stuck", "elsewhere", "closed", "both at one point"],
)
def test_a_process_is_stuck_unless_all_have_left_at_one_point(store, capfd, left, other):
    engine = Engine("engine", SOON_S, exit_if_stuck=False)
    if other is not None:
        store.entries[f"{engine.watch._directory}1/left"] = other
    engine.watch.report("the moments ran away")
    if left:
        engine.raised(7)
    wait_until(lambda: not watches())
    said = capfd.readouterr().err.split("zenflow_jax: ")[1:]
    words = ["left waiting", "most recent call first"] if other != "point 7" else []
    for text, word in zip(said, words, strict=True):
        assert text.startswith("process 0 failed: the moments ran away")
        assert "`exit_if_stuck=False`" in text
        assert word in text
