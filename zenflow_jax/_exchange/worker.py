"""The worker thread: takes in mail, runs host updates, and hands channels over.

`post` queues work in order. An update is cut into chunks, which run whenever nothing else can, so
that the worker can take in the next window's mail during the update. This does not change results,
because each window has its own gradient arrays. The thread does not run jitted programs or
collectives.
"""

import atexit
import concurrent.futures
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from zenflow_jax._device.memory import copy_to_host, nbytes, read, upload, view
from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._diagnostics.stats import EngineStats, warn_of_skipped_steps
from zenflow_jax._diagnostics.timeline import Recorder
from zenflow_jax._exchange.messages import Mail, Update
from zenflow_jax._exchange.parts import OffloadedLeaves, host_channels, host_part
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.state import ClosedWindow, HostLeaf, HostState
from zenflow_jax._spec.scalars import AdamScalars, StepScalars

# The interval at which a waiting caller checks whether the device still has work.
_POLL_S = 1e-3


class Worker:
    """Owns the thread and the host's arrays. `check` and open `done` futures raise its failures.

    Call `start` after everything that can fail in the owner, because a running thread keeps all
    host arrays. Before `start`, and while the thread is idle, callers may use `host` and `leaves`.
    """

    def __init__(
        self,
        state: ZenFlowState,
        weights: Sequence[jax.Array],
        offloaded: OffloadedLeaves,
        kernel: str,
        threads: int | None,
        *,
        compact: bool,
    ):
        adam = HostAdam(kernel, threads)
        weights, specs = offloaded.pick(weights), offloaded.specs
        channels = [leaf.channels for leaf in offloaded.pick(state.leaves)]
        leaves = [
            HostLeaf.new(
                part.spec,
                host_part(weights[part.leaf], part, specs[part.leaf]),
                host_channels(part.of(channels[part.leaf]), part),
                compact=compact,
            )
            for part in offloaded.parts
        ]
        self.host = HostState(leaves, adam, state.schedule, offloaded.pieces)
        self.host.before_write = self._before_write
        self.kernel = kernel
        self.unsaved: list[Any] = []  # a `Snapshot` for each save that may still be running
        # The worker's counts, replaced as a whole so that any thread can read them at any time.
        self.stats = EngineStats(
            skipped_steps=int(read(state.skipped)),
            skipped_in_a_row=int(read(state.skipped_in_a_row)),
            host_bytes=self.host.nbytes,
        )
        self.recorder = Recorder()
        self._offloaded = offloaded
        self._messages: deque[Mail | Update] = deque()  # unfinished, in order
        self._updates: deque[Iterator[None]] = deque()  # the remaining chunks of each, in order
        self._receiver = ThreadPoolExecutor(1, thread_name_prefix="zenflow-mail")
        self._condition = threading.Condition()
        self.closed = False  # whether the thread has been told to end
        # Why and at which error the thread ended, unless it was closed.
        self._failure: tuple[str, BaseException] | None = None
        self.failure_raised = False  # whether the caller knows
        self._where = "the first mail"  # the thread's current work, for messages
        self._step = 0  # whose mail was taken in last
        # A daemon, so that a forgotten engine cannot keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._run, name="zenflow-host", daemon=True)

    def start(self) -> None:
        self._thread.start()
        # The thread must end before its modules are torn down.
        stop = weakref.WeakMethod(self.stop)
        atexit.register(lambda: (alive := stop()) and alive())

    def post(self, message: Mail | Update) -> None:
        """Queues a message; the thread takes it when its arrays are in host memory."""
        if isinstance(message, Mail):
            try:
                times = self.recorder.dispatched(message.step)
                message.arrived = self._receiver.submit(self._receive, message, times)
            except RuntimeError:
                self.check()  # the thread's own failure is a better error
                raise
            message.arrived.add_done_callback(lambda _: self._wake())
        with self._condition:
            self._messages.append(message)
            self._condition.notify()
        # Checked after the append: the message fails, whether the failure came before or after it.
        self._break_promises()

    def check(self) -> None:
        """Raises the failure that ended the thread, if there was one."""
        if self._failure is None:
            return
        (reason, error), self.failure_raised = self._failure, True
        raise RuntimeError(
            f"{reason}. This engine has stopped. Resume from the last checkpoint."
        ) from error

    def leaves(self) -> list[HostLeaf]:
        """Returns each part's host arrays, which live as long as the list."""
        leaves = self.host.leaves
        if len(leaves) != len(self._offloaded.parts):
            self.check()
        return leaves

    def upload_part(self, i: int) -> list[jax.Array]:
        """Starts uploads of part `i`'s masters, which no update may change before they arrive."""
        array = self.leaves()[i].to_upload
        return [upload(array, device) for device in self._offloaded.parts[i].devices]

    def wait(self, future: Future, after: PyTree) -> Any:
        """Waits for the result of `future`, on the caller's thread.

        The wait counts as a wait for the host only once `after`, the last step's arrays, is ready.
        """
        if not future.done():
            begin = time.perf_counter()
            arrays = jax.tree.leaves(after)
            while not (future.done() or all(x.is_ready() for x in arrays)):
                concurrent.futures.wait([future], timeout=_POLL_S)
            start = time.perf_counter()
            with jax.profiler.TraceAnnotation("zenflow: wait for host"):
                concurrent.futures.wait([future])
            self.recorder.waited(begin, start, time.perf_counter())
        if future.exception() is not None:
            self.check()
        return future.result()

    def request_stop(self) -> None:
        """Tells the thread to end, without waiting: garbage collection may run on any thread."""
        self.closed = True
        self._wake()

    def stop(self) -> None:
        """Ends the thread after its current message or chunk. Safe to call twice."""
        self.request_stop()
        self._thread.join()
        self._break_promises()

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify()

    def _break_promises(self) -> None:
        if self._failure is None and not self.closed:
            return
        error = self._failure[1] if self._failure else RuntimeError("the engine was closed")
        with self._condition:
            broken = [f for message in self._messages for f in message.promises if not f.done()]
            self._messages.clear()
        for future in broken:
            future.set_exception(error)

    def _run(self) -> None:
        try:
            while True:
                self._turn()
        except _Stop:
            pass
        except BaseException as error:  # noqa: BLE001 - the caller must get every error
            reason = f"the host worker failed at {self._where}: {error}".rstrip(".")
            self._failure = reason, error
        finally:
            self._break_promises()
            self._updates.clear()
            self.recorder.works_at(None)
            self.host.close()
            self._receiver.shutdown(wait=False)

    def _before_write(self, i: int) -> None:
        """Waits, on any thread, until no save still needs the arrays of part `i`."""
        waits = [x for x in self.unsaved if not x.done]
        if not waits:
            return
        on_thread = threading.current_thread() is self._thread
        work = self.recorder.works_at("wait for save", self._step) if on_thread else None
        may_write = all(x.before_write(i, lambda: self.closed) for x in waits)
        if work is not None:
            self.recorder.works_at(*work)
        if not may_write:
            raise _Stop if on_thread else RuntimeError("the engine was closed")

    def _turn(self) -> None:
        """Takes in one message, or runs one chunk of an update."""
        with self._condition:
            while not (self.closed or self._next() or self._updates):
                self.recorder.works_at(None)
                self._condition.wait()
            if self.closed:
                raise _Stop
            message = self._next()
            if message is not None:
                message.begun = True
        if isinstance(message, Mail):
            with jax.profiler.TraceAnnotation("zenflow: take in mail"):
                self._take_in(message)
            self._finish(message, None)
            return
        if message is not None:
            self._updates.append(self._make_update(message))
        # A new update closes its window at once. Its other chunks wait for older updates.
        chunks = self._updates[0 if message is None else -1]
        with jax.profiler.TraceAnnotation("zenflow: host update"):
            ended = next(chunks, self) is self
        if ended:
            self._updates.popleft()

    def _next(self) -> Mail | Update | None:
        """Returns the next message, if its arrays have arrived."""
        first = next((message for message in self._messages if not message.begun), None)
        waits = first is None or (first.arrived is not None and not first.arrived.done())
        return None if waits else first

    def _finish(self, message: Mail | Update, result: object) -> None:
        self.recorder.works_at(None)  # before others read the seconds
        message.done.set_result(result)
        with self._condition:
            self._messages.remove(message)

    def _receive(self, mail: Mail, times: tuple[float, float]) -> tuple[list, list]:
        """Waits for each piece's gradient on its first device, and for the step scalars.

        Runs in a separate thread, so that the worker can continue an update in the meantime.
        """
        step_scalars = [x.addressable_data(0) for x in jax.tree.leaves(mail.step_scalars)]
        firsts = [self._offloaded.parts[numbers[0]] for numbers in self._offloaded.pieces]
        pieces = [part.of(mail.gradients[part.leaf]) for part in firsts]
        if mail.on_device:
            step_scalars, pieces = copy_to_host(step_scalars), copy_to_host(pieces)
        # Mail that the step itself sent is complete when the step ends; other mail arrives later.
        jax.block_until_ready((step_scalars, mail.step_scalars))
        ended = self.recorder.step_ended(mail.step, times)
        jax.block_until_ready(pieces)
        mail.arrived_at = self.recorder.add("mail", "copy", mail.step, ended)
        # Dropped only now, after the caller dropped them, because the last holder has to free them.
        mail.gradients.clear()
        return pieces, step_scalars

    def _take_in(self, mail: Mail) -> None:
        self._step = mail.step
        self._where = f"the mail of step {mail.step}, window {self.host.windows + 1}"
        self.recorder.works_at("take in", mail.step)
        self.recorder.add("mail", "unread", mail.step, mail.arrived_at)
        assert mail.arrived is not None
        gradients, step_scalars = mail.arrived.result()
        sent = StepScalars(*map(view, step_scalars)).unpack()
        step, factor = int(sent.step), float(sent.factor)
        mail.check(step, int(sent.token))
        self.host.scalars = AdamScalars(*map(float, sent.adam))
        if not np.isfinite(self.host.scalars).all():
            raise ValueError(f"A hyperparameter is not finite at step {step}: {self.host.scalars}.")
        arrived = nbytes((gradients, step_scalars))
        if sent.finite:
            pieces = zip(self._offloaded.pieces, map(view, gradients), strict=True)
            parts = self._offloaded.parts
            self.host.add([parts[i].cut_mail(g) for each, g in pieces for i in each], factor)
        gradients.clear()
        step_scalars.clear()
        before = self.stats.skipped_in_a_row
        self._count(
            skipped_steps=0 if sent.finite else 1,
            skipped_in_a_row=-before if sent.finite else 1,
            bytes_to_host=arrived,
        )
        if not sent.finite:
            warn_of_skipped_steps(before + 1, step)

    def _hand_over(self, update: Update, window: ClosedWindow) -> list[list[Any]]:
        """Hands channels over; returns the result for `Update.entered`."""
        group = self._offloaded.groups[update.group]
        # Skips leaves without selected channels: GPUs do not support empty arrays in host memory.
        leaving = [
            [] if old is None else [part.of(x) for x in (update.chosen[part.leaf], *old)]
            for part in group.parts
            for old in [update.leaving[part.leaf]]
        ]
        in_host_memory = copy_to_host(leaving)
        entering: list[list[Any]] = [[None] * len(part.devices) for part in group.parts]
        # Some leaves are copied while other leaves are being processed.
        for i, (moved, part) in enumerate(zip(in_host_memory, group.parts, strict=True)):
            if moved:
                chosen, *rows = moved
                turned, (*wide, steps) = group.specs[part.leaf].turned, map(view, rows)
                old, number = [*map(turned, wide), steps], group.part_numbers[i]
                new = self.host.hand_over(window, number, old, host_channels(chosen, part))
                wide = [turned(x.reshape(part.spec.selected_shape)) for x in new[:3]]
                arrays = (*wide, new[3].reshape(steps.shape))
                entering[i] = [upload(arrays, device) for device in part.devices]
        self._count(bytes_to_host=nbytes(in_host_memory), bytes_to_device=nbytes(entering))
        return entering

    def _make_update(self, update: Update) -> Iterator[None]:
        """Closes a window, hands channels over, and makes and uploads the update.

        Yields before each chunk of a few milliseconds, during which other work may come first.
        """
        update.merged_uploads.clear()
        step, uploads = self._step, []
        self.recorder.works_at("hand over" if update.chosen else "update", step)
        window = self.host.close_window(update.group)
        if update.chosen:
            self._where = f"the hand-over after window {window.number}"
            with jax.profiler.TraceAnnotation("zenflow: hand over"):
                update.entered.set_result(self._hand_over(update, window))
            # The caller now has the hand-over; the old arrays must not outlive it.
            update.leaving = update.chosen = ()
        yield
        self._where = f"the update of window {window.number}"
        self.recorder.works_at("update", step)
        first = 0.0  # start time of the first upload
        for i, finished in self.host.update(window):
            leaf = self.host.leaves[i]
            if not finished:
                yield
                self._where = f"the update of leaf {leaf.spec.name}, window {window.number}"
                self.recorder.works_at("update", step)
                continue
            first = first or time.perf_counter()
            uploads.append(self.upload_part(i))
        if first:
            self.recorder.works_at("wait for uploads", step)
            # The next update writes to the source arrays.
            with jax.profiler.TraceAnnotation("zenflow: wait for uploads"):
                jax.block_until_ready(uploads)
            self.recorder.add("upload", "upload", step, first)
        self._count(bytes_to_device=nbytes(uploads))
        self._finish(update, uploads)

    def _count(self, **more: int) -> None:
        """Adds to the stats, and updates the memory counts."""
        counts = {name: getattr(self.stats, name) + x for name, x in more.items()}
        memory = {"host_bytes": self.host.nbytes, "pinned_bytes": self.host.pinned_bytes}
        self.stats = replace(self.stats, **counts, **memory)


class _Stop(Exception):
    """Ends the thread of a closed engine."""
