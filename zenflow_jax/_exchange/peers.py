"""Spreads one process's failure to the others, which may be waiting for it in a collective.

JAX notices a process that is dead, 100 s after its last heartbeat, but not a program that ends with
an error: that process waits at exit for the others, these wait for it in a collective, and after
300 s JAX aborts them all. A program that catches the error holds up the others for ever.
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
from typing import Any, NamedTuple

import jax

# A look costs the service half a millisecond, so that it has time for a thousand processes.
POLL_S = 1.0
GRACE_S = 30.0
# This process has the service. The moment that it ends, JAX aborts the others, with messages that
# hide the reason. So it ends last, by `LAST_BY` polls.
SERVICE = 0
LAST_BY = 3
# The point of a process that left by closing its engine; others left where they raised a failure.
CLOSED = "close"
# Characters of a message that are sent.
LONGEST = 4000


class _Limits(NamedTuple):
    poll_s: float  # between two looks at the others
    grace_s: float  # from a failure until a process that is stuck ends
    exit_if_stuck: bool


class PeerMonitor:
    """Spreads failures between the processes of one engine, through JAX's coordination service.

    A process *leaves* the engine when it raises a failure to its caller, or closes. Processes that
    have all left at the same point have dispatched the same programs, and none waits for another:
    the monitor then ends without a word. If that has not come about `grace_s` after a failure is
    known, each process ends itself with code 1, its message and its threads' stacks on stderr: some
    are stuck already, and the others would be in their next collective. Each announces this before.
    The interpreter's exit has no longer than that either.

    Call `start` first, then the others, from any thread and any number of times. They neither wait
    nor raise. `name` is the engine's own, the same in all of its `processes`.
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
        # Every process makes the same calls in the same order, so two that raise after as many have
        # dispatched the same programs.
        self._passed = 0
        if self._idle:
            return
        self._client, self._directory = _connect(), f"zenflow_jax/{name}/"
        self._me = jax.process_index()
        self._limits = _Limits(poll_s, grace_s, exit_if_stuck)
        # News (kind, text) of this process, for the thread. A `SimpleQueue`, because the garbage
        # collector may call `close` on a thread that is inside of `put` or `get`.
        self._news: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._at_rest = threading.Event()  # the thread makes no more requests
        # The rest is the thread's.
        self._failed: dict[int, str] = {}  # the message of each process that has failed
        self._left: dict[int, str] = {}  # the point at which each process has left
        self._known = {"failed": self._failed, "left": self._left}
        self._told: set[str] = set()
        self._exits = False
        self._thread = threading.Thread(target=self._run, name="zenflow-peers", daemon=True)

    @property
    def _idle(self) -> bool:
        return len(self._processes) < 2  # one process has all the devices

    def start(self, on_failure: Callable[[str], None]) -> None:
        """Starts the thread; it calls a bound method, held weakly, when another process fails."""
        if self._idle:
            return
        self._on_failure = weakref.WeakMethod(on_failure)
        atexit.register(self._at_exit)
        self._thread.start()

    def report(self, message: str) -> None:
        """Notes that this process's worker has failed."""
        self._put("failed", message)

    def passed(self) -> None:
        """Notes that the caller's thread has passed a point at which it could have raised."""
        self._passed += 1

    def raised(self) -> None:
        """Notes that the caller's thread raises a failure, this process's or another's."""
        self._put("left", f"point {self._passed}")

    def close(self) -> None:
        """Notes that the engine was closed, or forgotten."""
        self._put("left", CLOSED)

    def _put(self, kind: str, text: str) -> None:
        if not self._idle:
            # Only text that the service takes.
            self._news.put((kind, text[:LONGEST].encode(errors="replace").decode()))

    def _at_exit(self) -> None:
        """Waits for all to leave, as JAX's own exit does, which comes later.

        The interpreter must not end while the thread is inside of a request: C++ would abort.
        """
        if self._thread.is_alive():  # not so in a fork
            self.close()
            self._put("exit", "")
            self._at_rest.wait()

    def _run(self) -> None:
        try:
            self._watch()
        finally:
            self._at_rest.set()
            if not self._exits:
                atexit.unregister(self._at_exit)

    def _watch(self) -> None:
        end = exit_end = math.inf
        announced = False
        while not self._together():
            if self._failed and not announced:
                # Not in the first round: most often all processes are about to raise it.
                self._announce()
                announced = True
            # At exit the main thread waits for this one.
            self._hear(self._limits.poll_s / 10 if self._exits else self._limits.poll_s)
            try:
                self._tell()
                self._look()
            except jax.errors.JaxRuntimeError:
                # The service is gone, or has no time. If it does not come back, JAX ends the
                # processes, unless this process shut it down, which it may do once it has left.
                if self._me in self._left and not self._failed:
                    return
            now = time.monotonic()
            if self._failed and end == math.inf:
                last_by = LAST_BY * self._limits.poll_s if self._me == SERVICE else 0
                end = now + self._limits.grace_s + last_by
                self._pass_on()
            if self._exits and self._failed:
                # The exit goes on, and gets stuck or not: this thread does not outlive it.
                if not announced:
                    # The error that this process has raised, if any, may not say why.
                    self._announce()
                self._at_rest.set()
                time.sleep(max(0.0, end - now))
                now = end
            if now >= end:
                self._end()
                return
            if self._exits:
                exit_end = min(exit_end, now + self._limits.grace_s)
            if now >= exit_end:
                return  # the others are slow, and JAX's exit has its own patience

    def _together(self) -> bool:
        """Whether all have left at the same point, and the others know it of this process."""
        points = set(self._left.values())
        return "left" in self._told and self._left.keys() == self._processes and len(points) == 1

    def _hear(self, seconds: float) -> None:
        """Takes in the news of this process; waits for some, `seconds` at most."""
        try:
            kind, text = self._news.get(timeout=seconds)
            while True:
                if kind == "exit":
                    self._exits = True
                else:
                    self._known[kind].setdefault(self._me, text)
                kind, text = self._news.get_nowait()
        except queue.Empty:
            pass

    def _tell(self) -> None:
        for kind, known in self._known.items():
            if (text := known.get(self._me)) is not None and kind not in self._told:
                # Overwrites, because a request that failed may have arrived.
                self._client.key_value_set(f"{self._directory}{self._me}/{kind}", text, True)
                self._told.add(kind)

    def _look(self) -> None:
        for key, text in self._client.key_value_dir_get(self._directory):
            process, kind = key.removeprefix(self._directory).split("/")
            self._known[kind].setdefault(int(process), text)

    def _pass_on(self) -> None:
        on_failure = self._on_failure()
        if not (on_failure is None or self._me in self._failed or self._me in self._left):
            on_failure(self._what())

    def _what(self) -> str:
        process, message = min(self._failed.items())
        return f"process {process} failed: {message}"

    def _announce(self) -> None:
        comes = (
            "will be ended with code 1, by `os._exit`, which cleans nothing up"
            if self._limits.exit_if_stuck
            else "will be left waiting, as `exit_if_stuck=False` says"
        )
        _say(
            f"{self._what()}\n"
            f"Process {self._me} {comes}, unless all processes have left the engine at the same "
            f"point {self._limits.grace_s:g} s from now: by raising this failure, or by `close`.\n"
        )

    def _end(self) -> None:
        """Ends the process, or says why it is stuck."""
        ends = "ends itself with code 1"
        if not self._limits.exit_if_stuck:
            ends = "is not ended, as `exit_if_stuck=False` says, but"
        _say(
            f"{self._what()}\n"
            f"Process {self._me} {ends}: {self._limits.grace_s:g} s later the processes have not "
            f"all left the engine at the same point (these have left: {self._left}), and whoever "
            "goes on waits in a collective that others never join. End what is left of them and "
            "start them all again, from the last checkpoint. The threads of this one now:\n"
        )
        faulthandler.dump_traceback(2)
        if self._limits.exit_if_stuck:
            os._exit(1)


def _say(text: str) -> None:
    # Not through `sys.stderr`: a stuck thread may hold its lock. Nobody may be reading.
    with contextlib.suppress(OSError):
        os.write(2, f"zenflow_jax: {text}".encode())


def _connect() -> Any:
    # JAX has no public key-value store, nor any other way between processes that goes around the
    # devices. Checked on jax 0.10.0, 0.10.2 and 0.11.2. Imported here, so that a run of one process
    # does not depend on it.
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "expected an initialized `jax.distributed`, because the parameters lie on devices of "
            "several processes, got none. Call `jax.distributed.initialize` before anything else "
            "of jax."
        )
    return client
