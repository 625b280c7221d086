"""The worker thread: takes in mail, makes host updates, hands channels over.

`post` queues work in order. A host update is cut into pieces and runs whenever nothing else can:
between two pieces the thread takes in mail of the next window, so that the caller never waits for
an update that still has time. That order changes no result, because a window's gradients and the
next one's are different arrays.

The thread never runs a jitted computation or a collective. It reads arrays in host memory, does
NumPy, and copies arrays to single devices.
"""

import concurrent.futures
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from zenflow_jax._device.memory import copy_to_host, upload, view
from zenflow_jax._device.step_scalars import USED, StepScalars
from zenflow_jax._diagnostics.skipped import tell_of_skipped
from zenflow_jax._diagnostics.stats import WorkerStats
from zenflow_jax._diagnostics.timeline import Recorder
from zenflow_jax._exchange.messages import Close, HandOver, Mail, Sums
from zenflow_jax._exchange.parts import OffloadedLeaves, Part, host_channels
from zenflow_jax._exchange.peers import PeerMonitor
from zenflow_jax._exchange.snapshot import Snapshot
from zenflow_jax._host.state import ClosedWindow, HostLeaf, HostState, SelectedRows
from zenflow_jax._plan.leaf import LeafSpec
from zenflow_jax._plan.scalars import AdamScalars

# About how many bytes one call uploads.
_BYTES_PER_UPLOAD = 8 * 2**20
# After so long in one wait for a save the run says what it waits for: it looks dead else.
_SAVE_IS_LATE_S = 60.0
_logger = logging.getLogger("zenflow_jax")
# How often a caller that waits looks whether the device still has work.
_LOOK_S = 1e-3


class Worker:
    """Owns the thread. `check` and every open `done` carry failures to the caller.

    Call `start` before waiting for anything, but only when nothing that its owner needs can fail
    any more: a running thread keeps all host arrays.

    Args:
        host: The arrays that the thread works on; nobody else touches them from now on.
        offloaded: The leaves whose arrays `host` has, and where their uploads go.
        peers: Tells the other processes of this worker's failure, and this worker of theirs.
        skipped: Steps skipped before.
        skipped_in_a_row: Steps skipped before, since the last one that counted.
        max_skipped: This many skipped steps in a row end the thread; None for any number.
    """

    def __init__(
        self,
        host: HostState,
        offloaded: OffloadedLeaves,
        peers: PeerMonitor,
        skipped: int = 0,
        skipped_in_a_row: int = 0,
        max_skipped: int | None = None,
    ):
        # Replaced as a whole, so that anybody can read it at any time.
        self.stats = WorkerStats(
            skipped_steps=skipped, skipped_in_a_row=skipped_in_a_row, host_bytes=host.nbytes
        )
        self._max_skipped = max_skipped
        self.wait_s = 0.0  # the caller's; see `wait`
        self.recorder = Recorder()
        self._host = host
        self._offloaded = offloaded
        self._parts = offloaded.parts
        self._messages: deque[Mail | Sums | Close] = deque()  # not done yet, in order
        self._condition = threading.Condition()
        self._closed = False
        self._failure: BaseException | None = None
        self._reason = ""  # the failure in words, set before it
        self._other: str | None = None  # another process's failure, which becomes this one's
        self._peers = peers
        # The caller's. Every process makes the same calls in the same order: two that raise a
        # failure after the same number of points have dispatched the same programs.
        self._passed = 0
        self._updates: deque[_Update] = deque()  # begun, in order
        self._window = host.windows + 1  # the open window, for messages
        self._where = "the first mail"  # what the thread does, for messages
        self._snapshots: list[Snapshot] = []  # which somebody may still be saving
        host.before_write = self._before_write
        # This one waits for the device, so that the worker can go on with an update.
        self._receiver = ThreadPoolExecutor(1, thread_name_prefix="zenflow-mail")
        # Another one, so that scalars of the next window need not wait behind a window's sums.
        self._sums_receiver = ThreadPoolExecutor(1, thread_name_prefix="zenflow-sums")
        # A daemon, so that a forgotten engine cannot keep the interpreter from ending.
        self._thread = threading.Thread(target=self._run, name="zenflow-host", daemon=True)

    def start(self) -> None:
        """Begins to work."""
        self._thread.start()
        self._peers.start(self.fail)

    def post(self, item: Mail | Sums | Close) -> None:
        if not isinstance(item, Close):
            try:
                if isinstance(item, Mail):
                    given = self.recorder.given()
                    item.arrived = self._receiver.submit(self._receive, item, given)
                else:
                    item.arrived = self._sums_receiver.submit(self._receive_sums, item)
            except RuntimeError:
                self.check()  # why the thread ended says more than that it did
                raise
            item.arrived.add_done_callback(lambda _: self._wake())
        with self._condition:
            self._messages.append(item)
            self._condition.notify()
        # After the append, so that a failure on either side of it reaches the item.
        self._break_promises()

    @property
    def failed(self) -> bool:
        return self._failure is not None

    @property
    def reason(self) -> str:
        """The failure in words; empty if there is none."""
        return self._reason

    def check(self) -> None:
        """Raises what ended the thread, if anything did."""
        if self._failure is None:
            self._passed += 1
        else:
            self._peers.raised(f"point {self._passed}")
            raise RuntimeError(
                f"{self._reason}. "
                "Deferred channels are not up to date and this engine takes no more work; go on "
                "from the last checkpoint."
            ) from self._failure

    def leaves(self) -> list[HostLeaf]:
        """The host's arrays of each part; for the caller, while the thread has nothing to do.

        The list keeps the arrays alive. Another process may fail at any moment: the thread then
        ends, and lets go of the arrays without writing to them.

        Raises:
            RuntimeError: If that has happened already.
        """
        leaves = self._host.leaves
        if len(leaves) != len(self._parts):
            self.check()
        return leaves

    def hold(self, snapshot: Snapshot) -> None:
        """Writes no leaf of a snapshot from now on that is not saved or copied; as `leaves`."""
        self._snapshots = [*(x for x in self._snapshots if not x.done), snapshot]

    def wait(self, future: Future, after: Any) -> Any:
        """The result of `future`, on the caller's thread.

        Until `after` (arrays of the last step) is computed, the device has work. Only the rest
        counts as waiting for the host. It does not wait for `after` itself: the caller can dispatch
        the next step before the device has done this one.
        """
        if not future.done():
            begin = time.perf_counter()
            arrays = jax.tree.leaves(after)
            while not (future.done() or all(x.is_ready() for x in arrays)):
                concurrent.futures.wait([future], timeout=_LOOK_S)
            start = time.perf_counter()
            with jax.profiler.TraceAnnotation("zenflow: wait for host"):
                concurrent.futures.wait([future])
            self.waited(begin, start)
        if future.exception() is not None:
            self.check()
        self._passed += 1
        return future.result()

    def waited(self, begin: float, device_done: float) -> None:
        """The caller has waited until now: since `begin`, for the host since `device_done`."""
        end = time.perf_counter()
        self.wait_s += end - device_done
        self.recorder.waited(begin, device_done, end)

    def fail(self, message: str) -> None:
        """Ends the thread with another process's failure, after the piece that it is at.

        The monitor's thread calls this. The worker's own thread breaks all promises.
        """
        with self._condition:
            self._other = message
            self._condition.notify()

    def ask_to_stop(self) -> None:
        """Asks the thread to end after the piece that it is at, without waiting for it.

        For the garbage collector, which may be on any thread, even on one that the worker needs.
        """
        with self._condition:
            self._closed = True
            self._condition.notify()

    def stop(self) -> None:
        """Ends the thread after the piece it is at. Safe twice."""
        self.ask_to_stop()
        self._thread.join()
        self._break_promises()

    def _receive(
        self, item: Mail, given: tuple[float, float]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Each piece's gradient on its first device, and the step scalars, once in host memory."""
        step_scalars = [x.addressable_data(0) for x in jax.tree.leaves(item.step_scalars)]
        pieces = []
        if item.gradients:
            pieces = [part.of(item.gradients[part.leaf]) for part in self._offloaded.firsts]
        if item.on_device:
            step_scalars, pieces = copy_to_host(step_scalars), copy_to_host(pieces)
        jax.block_until_ready((step_scalars, item.step_scalars))
        self.recorder.step_ended(item.step, given)
        jax.block_until_ready(pieces)
        self.recorder.mail_arrived(item.step)
        # Only now, when the caller has dropped them: whoever is last has to free them.
        item.gradients.clear()
        return pieces, step_scalars

    def _receive_sums(self, item: Sums) -> list[jax.Array]:
        """Each part's sum on its first device, once in host memory."""
        parts = self._offloaded.groups[item.group].parts
        pieces = copy_to_host([part.of(item.gradients[part.leaf]) for part in parts])
        if item.last is not None:
            item.last.arrived.result()  # the step is over, so the copy begins
        start = time.perf_counter()
        jax.block_until_ready(pieces)
        item.gradients.clear()
        if item.last is not None:
            self.recorder.sums_arrived(item.last.step, start)
        return pieces

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify()

    def _break_promises(self) -> None:
        if self._failure is None and not self._closed:
            return
        error = self._failure or RuntimeError("the engine was closed")
        with self._condition:
            broken = [f for message in self._messages for f in message.promises if not f.done()]
            self._messages.clear()
        for future in broken:
            future.set_exception(error)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except _ClosedInWait:
            pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller must hear of it
            if self._other is None:
                self._reason = f"the host worker failed at {self._where}: {error}".rstrip(".")
                self._peers.report(self._reason)
            else:
                self._reason = self._other
            self._failure = error
        finally:
            self._break_promises()
            self._updates.clear()
            self.recorder.works_at(None)
            self._host.close()
            self._receiver.shutdown(wait=False)
            self._sums_receiver.shutdown(wait=False)

    def _turn(self) -> bool:
        """Does one thing; False when closed."""
        with self._condition:
            while not (self._closed or self._other or self._next() or self._updates):
                self.recorder.works_at(None)
                self._condition.wait()
            if self._closed:
                return False
            if self._other is not None:
                raise RuntimeError(self._other)
            item = self._next()
            if item is not None:
                item.begun = True
        if item is None:
            self._go_on()
        elif isinstance(item, Close):
            self._begin(item)
        else:
            with jax.profiler.TraceAnnotation("zenflow: take in mail"):
                if isinstance(item, Mail):
                    self.recorder.works_at("take in", item.step)
                    self._take_in(item)
                else:
                    self.recorder.works_at("take in sums", self._window)
                    self._take_in_sums(item)
            self._finish(item, None)
        return True

    def _next(self) -> Mail | Sums | Close | None:
        """The next message, if its arrays have arrived."""
        first = next((message for message in self._messages if not message.begun), None)
        return first if first is not None and first.is_here else None

    def _finish(self, message: Mail | Sums | Close, result: Any) -> None:
        message.done.set_result(result)
        with self._condition:
            self._messages.remove(message)

    def _take_in(self, mail: Mail) -> None:
        self._where = f"the mail of step {mail.step}, window {self._window}"
        gradients, step_scalars = mail.arrived.result()
        sent = StepScalars(*map(view, step_scalars)).unpack()
        step, factor = int(sent.step), float(sent.factor)
        _check_token(mail, step, int(sent.token))
        scalars = AdamScalars(*map(float, sent.adam))
        if not np.isfinite(scalars).all():
            raise ValueError(
                f"expected finite hyperparameters at step {step}, got {scalars}. Check the "
                "learning rate schedule and whatever else is computed."
            )
        self._host.note(scalars)
        read = _nbytes((gradients, step_scalars))
        if sent.finite and gradients:
            pieces = [view(g) for g in gradients]
            self._host.add([part.of_mail(pieces[part.piece]) for part in self._parts], factor)
        elif sent.finite:
            self._host.count()
        gradients.clear()
        step_scalars.clear()
        before = self.stats.skipped_in_a_row
        self._count(
            skipped_steps=0 if sent.finite else 1,
            skipped_in_a_row=-before if sent.finite else 1,
            bytes_to_host=read,
        )
        self._measure()
        if not sent.finite:
            tell_of_skipped(before + 1, step, self._max_skipped)

    def _take_in_sums(self, item: Sums) -> None:
        self._where = f"the sums of window {self._window}"
        sums = item.arrived.result()
        read = _nbytes(sums)
        self._host.take_sums([view(x) for x in sums], item.group)
        sums.clear()
        self._count(bytes_to_host=read)
        self._measure()

    def _begin(self, close: Close) -> None:
        close.used_up.clear()
        self.recorder.works_at("hand over" if close.hand_over else "update", self._window)
        window = self._host.close_window(close.group)
        self._window = window.number + 1
        if close.hand_over is not None:
            self._where = f"the hand-over after window {window.number}"
            with jax.profiler.TraceAnnotation("zenflow: hand over"):
                entering = self._hand_over(close.hand_over, window, close.group)
            close.hand_over.done.set_result(entering)
            # The caller has the hand-over now; the old arrays must not outlive it.
            close.hand_over = None
        where = f"the update of window {window.number}"
        self._updates.append(_Update(window.number, self._make_update(close, window), where))

    def _hand_over(self, item: HandOver, window: ClosedWindow, group: int) -> list[Any]:
        parts = self._offloaded.groups[group].parts
        # Nothing of a leaf without selected channels: GPUs have no empty arrays in host memory.
        leaving = [
            [] if old is None else [part.of(x) for x in (item.chosen[part.leaf], *old)]
            for part in parts
            for old in [item.leaving[part.leaf]]
        ]
        here = copy_to_host(leaving)
        entering: list[list[Any]] = [[None] * len(part.devices) for part in parts]
        ready = _Uploads(parts, entering)
        # Some leaves cross while others are worked on.
        for i, (moved, part) in enumerate(zip(here, parts, strict=True)):
            if not moved:
                continue
            chosen, *rows = moved
            new = self._host.hand_over(
                window, window.leaves[i], _as_rows(rows, part.spec), host_channels(chosen, part)
            )
            ready.add(i, _as_on_device(new, part.spec))
        ready.send()
        self._count(bytes_to_host=_nbytes(here), bytes_to_device=_nbytes(entering))
        return entering

    def _make_update(self, close: Close, window: ClosedWindow) -> Iterator[str]:
        group = self._offloaded.groups[close.group]
        uploads: list[list[Any]] = []
        ready = _Uploads(group.parts, uploads)
        first = 0.0  # when the first upload began

        def finished(i: int, leaf: HostLeaf) -> None:
            nonlocal first
            early = self._offloaded.prefetched[i]
            uploads.append([None] * len(self._parts[i].devices) if early else [])
            if early:
                first = first or time.perf_counter()
                ready.add(len(uploads) - 1, leaf.to_upload)

        for name in self._host.update(window, finished):
            yield f"the update of leaf {name}, window {window.number}"
        ready.send()
        if first:
            self.recorder.works_at("wait for uploads", window.number)
            # The next update writes to the arrays that they come from.
            with jax.profiler.TraceAnnotation("zenflow: wait for uploads"):
                jax.block_until_ready(uploads)
            self.recorder.uploaded(window.number, first)
        self._count(bytes_to_device=_nbytes(uploads))
        self._measure()
        self._finish(close, uploads)

    def _go_on(self) -> None:
        update = self._updates[0]
        self.recorder.works_at("update", update.window)
        # Set for each piece: mail may have come in between.
        self._where = update.where
        with jax.profiler.TraceAnnotation("zenflow: host update"):
            piece = next(update.pieces, None)
        if piece is None:
            self._updates.popleft()
        else:
            update.where = piece

    def _before_write(self, i: int) -> None:
        for snapshot in self._snapshots:
            if not snapshot.done:
                self._wait_for_save(snapshot, i)

    def _wait_for_save(self, snapshot: Snapshot, i: int) -> None:
        mine = threading.current_thread() is self._thread
        late = time.monotonic() + _SAVE_IS_LATE_S

        def ended() -> bool:
            nonlocal late
            if time.monotonic() >= late:
                late = math.inf
                _logger.warning(
                    "the run has waited %.0f s for a checkpoint to have written leaf %s. It goes "
                    "on when that is done or has failed. If the disk is slow, give "
                    "`EngineSave(engine, copy_bytes=...)` more memory; if it is stuck, see to it.",
                    _SAVE_IS_LATE_S,
                    self._parts[i].spec.name,
                )
            return self._closed or self._other is not None

        with self.recorder.meanwhile("wait for save") if mine else contextlib.nullcontext():
            if snapshot.before_write(i, ended):
                return
        if self._other is not None:
            raise RuntimeError(self._other)
        raise _ClosedInWait

    def _measure(self) -> None:
        host = self._host
        self.stats = replace(self.stats, host_bytes=host.nbytes, pinned_bytes=host.pinned_bytes)

    def _count(self, **more: Any) -> None:
        self.stats = replace(
            self.stats, **{name: getattr(self.stats, name) + x for name, x in more.items()}
        )


class _ClosedInWait(Exception):
    """The thread was asked to end while it waited for a save."""


@dataclass
class _Update:
    """An update that has begun."""

    window: int  # its number
    pieces: Iterator[str]  # gives where the next piece is, for messages
    where: str


class _Uploads:
    """Uploads arrays of some parts to each of their devices.

    Small ones cross together: a call costs as much as some megabytes.

    Args:
        parts: The parts.
        arrived: For each part, a list with a place for each of its devices; filled.
    """

    def __init__(self, parts: Sequence[Part], arrived: list[list[Any]]):
        self._parts = parts
        self._arrived = arrived
        self._ready: dict[int, Any] = {}
        self._size = 0

    def add(self, i: int, arrays: Any) -> None:
        """Uploads a tree of NumPy arrays of part `i`, now or together with some that follow."""
        self._ready[i] = arrays
        self._size += _nbytes(arrays)
        if self._size > _BYTES_PER_UPLOAD:
            self.send()

    def send(self) -> None:
        """Uploads what is left."""
        devices = {device for i in self._ready for device in self._parts[i].devices}
        for device in sorted(devices, key=lambda device: device.id):
            mine = {i: x for i, x in self._ready.items() if device in self._parts[i].devices}
            for i, x in upload(mine, device).items():
                self._arrived[i][self._parts[i].devices.index(device)] = x
        self._ready, self._size = {}, 0


def _check_token(mail: Mail, step: int, token: int) -> None:
    if token == USED:
        raise RuntimeError(
            f"two steps were made without `exchange` between them (at step {step}), so the first "
            "one's mail is lost and deferred channels would not learn. Call `params, opt_state = "
            "engine.exchange(params, opt_state)` after every step, and give the next step what it "
            "returned."
        )
    if step == 0:  # scalars that no step has written
        raise RuntimeError(
            f"expected the mail of step {mail.step}, got a state that `update` had no part in: a "
            "wrapper withheld it (`optax.MultiSteps`, `optax.apply_if_finite`, a `lax.cond` around "
            "`tx.update`), or the state is one that `tx.init` has just made. Make every step "
            "update: sum micro-batches inside the step, or call `exchange` only where "
            "`multi_steps.has_updated(opt_state)`; steps that are not finite are skipped without "
            "`apply_if_finite`. Give each run an engine of its own."
        )
    if (step, token) != (mail.step, mail.token):
        raise RuntimeError(
            f"expected the mail of this run's step {mail.step}, got step {step} of a state that "
            "this engine did not return. Give each run an engine of its own, and each step the "
            "state that the last `exchange` returned."
        )


def _as_rows(arrays: Sequence[jax.Array], spec: LeafSpec) -> SelectedRows:
    shape = spec.view4(spec.k)
    master, mu, nu, steps = map(view, arrays)
    return SelectedRows(
        master.reshape(shape),
        mu.reshape(shape),
        nu.reshape(shape),
        steps.reshape(shape[::2]),
    )


def _as_on_device(rows: SelectedRows, spec: LeafSpec) -> tuple[np.ndarray, ...]:
    wide = (x.reshape(spec.selected_shape) for x in (rows.master, rows.mu, rows.nu))
    return (*wide, rows.steps.reshape(*spec.stack, spec.k))


def _nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))
