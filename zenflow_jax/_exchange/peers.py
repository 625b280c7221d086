"""Propagates one process's failure to the other processes, which may be waiting in a collective.

JAX detects a dead process 100 s after its last heartbeat, but not a program that ends with an
error: that process waits for the others at exit, they wait for it in a collective, and after 300 s
JAX aborts them all. A program that catches the error blocks the others forever.
"""

import atexit
import contextlib
import faulthandler
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any

import jax

# A poll costs the service half a millisecond, so it can serve a thousand processes.
POLL_S = 1.0
GRACE_S = 30.0
# Rank 0 runs the service. When rank 0 ends, JAX aborts the others with messages that hide the
# reason, so rank 0 ends last, after `EXTRA_POLLS_OF_SERVICE` more polls.
SERVICE = 0
EXTRA_POLLS_OF_SERVICE = 3
# The point at which a process leaves if it closes its engine. A process that raises an error leaves
# at the point where it does so.
CLOSED = "close"
# Longer messages are truncated to this many characters.
MAX_MESSAGE_LENGTH = 4000


class PeerMonitor:
    """Propagates failures between an engine's processes, through JAX's coordination service.

    A process *leaves* the engine when it raises an error to its caller because of a failure, or
    closes. If all processes left at the same point, they dispatched the same programs, and none
    waits for another: the monitor then ends silently. Otherwise, `grace_s` after a failure is
    known, each process writes the message and its threads' stacks to stderr, and exits with code 1:
    some processes are already stuck, and the others would get stuck in their next collective. Each
    process announces this in advance. The same time limit applies to the interpreter's exit. Polls
    are `poll_s` apart.

    Call `start` first, then the other methods, from any thread and any number of times. The other
    methods neither wait nor raise. `name` identifies the engine in all its `processes`.
    """

    def __init__(
        self,
        name: str,
        processes: Collection[int],
        *,
        poll_s: float = POLL_S,
        grace_s: float = GRACE_S,
        exit_if_stuck: bool = True,
    ):
        self._processes = frozenset(processes)
        # Every process makes the same calls in the same order, so processes that raise after the
        # same number of calls have dispatched the same programs.
        self._passed = 0
        if self._idle:
            return
        self._client, self._directory = _connect(), f"zenflow_jax/{name}/"
        self._me = jax.process_index()
        self._poll_s, self._grace_s, self._exit_if_stuck = poll_s, grace_s, exit_if_stuck
        # This process's events (kind, text), for the thread. A `SimpleQueue`, because the garbage
        # collector may call `close` on a thread that is inside `put` or `get`.
        self._events: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._done = threading.Event()  # set once the thread will make no more requests
        # The attributes below are used only by the thread.
        self._failed: dict[int, str] = {}  # each failed process's message
        self._left: dict[int, str] = {}  # the point at which each process left
        self._known = {"failed": self._failed, "left": self._left}
        self._published: set[str] = set()
        self._exits = False
        self._thread = threading.Thread(target=self._run, name="zenflow-peers", daemon=True)

    @property
    def _idle(self) -> bool:
        return len(self._processes) < 2

    def start(self, on_failure: Callable[[str], None]) -> None:
        """Starts the thread, which calls a bound method, held weakly, if another process fails."""
        if self._idle:
            return
        self._on_failure = weakref.WeakMethod(on_failure)
        atexit.register(self._at_exit)
        self._thread.start()

    def report(self, message: str) -> None:
        """Records that this process's worker has failed."""
        self._put("failed", message)

    def passed(self) -> None:
        """Records that the caller's thread has passed a point at which it could have raised."""
        self._passed += 1

    def raised(self) -> None:
        """Records that the caller's thread raises an error because a process has failed."""
        self._put("left", f"point {self._passed}")

    def close(self) -> None:
        """Records that the engine was closed, or garbage-collected."""
        self._put("left", CLOSED)

    def _put(self, kind: str, text: str) -> None:
        if not self._idle:
            # Only text that the service accepts.
            self._events.put((kind, text[:MAX_MESSAGE_LENGTH].encode(errors="replace").decode()))

    def _at_exit(self) -> None:
        """Waits for all processes to leave, as JAX's own exit handler does later.

        The interpreter must not end while the thread is inside a request: C++ would abort.
        """
        if self._thread.is_alive():  # not in a forked process
            self.close()
            self._put("exit", "")
            self._done.wait()

    def _run(self) -> None:
        try:
            self._watch()
        finally:
            self._done.set()
            if not self._exits:
                atexit.unregister(self._at_exit)

    def _watch(self) -> None:
        end = exit_end = math.inf
        announced = False
        while not self._all_left():
            if self._failed and not announced:
                # Not in the first round, because usually every process is about to raise it.
                self._announce()
                announced = True
            # At exit, the main thread waits for this thread.
            self._drain_events(self._poll_s / 10 if self._exits else self._poll_s)
            try:
                self._publish()
                self._poll()
            except jax.errors.JaxRuntimeError:
                # The service is down or overloaded. If it does not recover, JAX ends the processes,
                # unless this process itself shut the service down, as it may do after leaving.
                if self._me in self._left and not self._failed:
                    return
            now = time.monotonic()
            if self._failed and end == math.inf:
                extra_s = EXTRA_POLLS_OF_SERVICE * self._poll_s if self._me == SERVICE else 0
                end = now + self._grace_s + extra_s
                self._notify_worker()
            if self._exits and self._failed:
                # The exit continues, and may get stuck; this thread does not outlive it.
                if not announced:
                    # This process's own error may not give the reason.
                    self._announce()
                self._done.set()
                time.sleep(max(0.0, end - now))
                now = end
            if now >= end:
                self._end()
                return
            if self._exits:
                exit_end = min(exit_end, now + self._grace_s)
            if now >= exit_end:
                return  # the others are slow, and JAX's exit has its own timeout

    def _all_left(self) -> bool:
        """Returns whether all processes left at the same point, and this process announced it."""
        points = set(self._left.values())
        return (
            "left" in self._published and self._left.keys() == self._processes and len(points) == 1
        )

    def _drain_events(self, seconds: float) -> None:
        """Records this process's new events; waits at most `seconds` for the first."""
        try:
            kind, text = self._events.get(timeout=seconds)
            while True:
                if kind == "exit":
                    self._exits = True
                else:
                    self._known[kind].setdefault(self._me, text)
                kind, text = self._events.get_nowait()
        except queue.Empty:
            pass

    def _publish(self) -> None:
        for kind, known in self._known.items():
            if (text := known.get(self._me)) is not None and kind not in self._published:
                # Overwrites, because a request that failed may still have arrived.
                self._client.key_value_set(f"{self._directory}{self._me}/{kind}", text, True)
                self._published.add(kind)

    def _poll(self) -> None:
        for key, text in self._client.key_value_dir_get(self._directory):
            process, kind = key.removeprefix(self._directory).split("/")
            self._known[kind].setdefault(int(process), text)

    def _notify_worker(self) -> None:
        on_failure = self._on_failure()
        if not (on_failure is None or self._me in self._failed or self._me in self._left):
            on_failure(self._describe_failure())

    def _describe_failure(self) -> str:
        process, message = min(self._failed.items())
        return f"process {process} failed: {message}"

    def _announce(self) -> None:
        outcome = (
            "will exit with code 1 through `os._exit`, without cleanup"
            if self._exit_if_stuck
            else "will keep waiting, because of `exit_if_stuck=False`"
        )
        _write_stderr(
            f"{self._describe_failure()}\nProcess {self._me} {outcome} in {self._grace_s:g} s, "
            "unless all processes leave the engine at the same point by then, either by raising "
            "this error or by calling `close`.\n"
        )

    def _end(self) -> None:
        """Ends the process, or reports why it is stuck."""
        outcome = "exits with code 1"
        if not self._exit_if_stuck:
            outcome = "keeps running, because of `exit_if_stuck=False`"
        _write_stderr(
            f"{self._describe_failure()}\nProcess {self._me} {outcome}. After {self._grace_s:g} s, "
            "the processes have not all left the engine at the same point (left so far: "
            f"{self._left}), and a process that continues would wait in a collective forever. End "
            "the remaining processes, and restart all from the last checkpoint. This process's "
            "threads:\n"
        )
        faulthandler.dump_traceback(2)
        if self._exit_if_stuck:
            os._exit(1)


def _write_stderr(text: str) -> None:
    # Bypasses `sys.stderr`, because a stuck thread may hold its lock. The pipe may have no reader.
    with contextlib.suppress(OSError):
        os.write(2, f"zenflow_jax: {text}".encode())


def _connect() -> Any:
    # JAX has no public key-value store or other channel between processes that bypasses the
    # devices. Checked on jax 0.10.0, 0.10.2 and 0.11.2. Imported here, so that single-process runs
    # do not depend on it.
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "The parameters are on several processes' devices, but `jax.distributed` is not "
            "initialized. Call `jax.distributed.initialize` before any other jax function."
        )
    return client
