"""`HostEngine`: what the caller does between two steps.

This file keeps the books on the caller's thread: which window is open, who has which buffers, when
to wait. It dispatches all device programs, in the same order in every run. `_exchange/worker.py`
does the host's work; `_exchange/updates.py` has what crosses where a window closes.
"""

import atexit
import contextlib
import dataclasses
import functools
import os
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from zenflow_jax._checkpoint.layout import check_engine_layout
from zenflow_jax._checkpoint.resume import (
    Resumed,
    check_resumed,
    resume,
)
from zenflow_jax._checkpoint.same_run import Given, agree
from zenflow_jax._checkpoint.stream import EngineStream
from zenflow_jax._checkpoint.tree import (
    Counts,
    EngineTree,
)
from zenflow_jax._device.checks import check_placement
from zenflow_jax._device.leaves import Places, as_pure, match_leaves
from zenflow_jax._device.memory import read
from zenflow_jax._device.placing import put_back
from zenflow_jax._device.samples import checksums, differing, fingerprints
from zenflow_jax._device.state import (
    ZenFlowState,
    find_state,
    replace_state,
)
from zenflow_jax._device.step_scalars import USED
from zenflow_jax._diagnostics.stats import EngineStats
from zenflow_jax._diagnostics.timeline import Timeline
from zenflow_jax._exchange.ahead import Ahead
from zenflow_jax._exchange.caller_tree import CallerTree
from zenflow_jax._exchange.changes import Doubts
from zenflow_jax._exchange.checks import (
    check_budget,
    check_devices,
    check_fresh,
    check_host_state,
    check_max_skipped,
    check_not_flattened,
    check_not_numpy,
    check_one_run,
    check_pinned,
)
from zenflow_jax._exchange.emitted import Emitted
from zenflow_jax._exchange.expected import Expected
from zenflow_jax._exchange.mailbox import Mailbox, buffers
from zenflow_jax._exchange.parts import (
    OffloadedLeaves,
    as_before,
    host_channels,
    host_part,
    mail_bytes,
    selected_bytes,
)
from zenflow_jax._exchange.peers import PeerMonitor
from zenflow_jax._exchange.progress import Progress
from zenflow_jax._exchange.updates import Updates
from zenflow_jax._exchange.worker import Worker
from zenflow_jax._exchange.wrappers import check_wrappers
from zenflow_jax._host.adam import HostAdam, compile_loops
from zenflow_jax._host.state import HostState
from zenflow_jax._plan.rules import longest

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Model = TypeVar("_Model")

_GO_ON = (
    "Training goes on from the last checkpoint that has the engine's state: "
    "`HostEngine(params, opt_state, engine_state=...)`."
)


def _recorded(kind: str) -> Callable[[_Method], _Method]:
    """Has the calls of a method of the engine in its timeline."""

    def around(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: "HostEngine", *args: Any, **more: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(self, *args, **more)
            finally:
                self._worker.recorder.called(kind, self._progress.step, start)

        return call

    return around


class HostEngine:
    """Updates the deferred channels on the host, beside the device.

    Make one for each run, before its first step. Call `exchange` after every step, and `flush`
    before you use the parameters for anything else. End it with `close`, or use `with`. Only one
    thread may call it.

    Host memory: 12 bytes per deferred parameter in NumPy arrays (float32 master and moments; with
    compact moments 6.1875). What is uploaded of a bfloat16 leaf is half of its masters, of a
    float16 leaf 2 bytes more. A master of a bfloat16 leaf that lies exactly halfway between two
    parameters may move by its last bit; what it is rounded to stays. Mail stays in pinned memory
    until its window's update: at most about 3.5 mails with windows of four steps that leaves close
    in turn, eight where all close at once, two where the device adds up. Where more would pile up,
    the engine adds them up, into sums of 4 to 8 bytes per parameter. A hand-over takes 12 pinned
    bytes for each selected parameter of a group. Device memory: an update that is ready waits there
    until it is due, in the leaf's dtype; of one group, or of all leaves. On a GPU jax caps its pool
    of pinned memory at 64 GiB; a run that needs more is refused by an error that says how to set
    `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`.

    Args:
        params: The parameters that `opt_state` was made for: a tree of arrays, or an `nnx.State`.
            It may have more leaves, such as frozen ones, statistics or keys. The engine finds
            leaves by their paths, at each call.
        opt_state: What `tx.init(params)` returned, with one `ZenFlowState` anywhere in it.
        host_kernel: "numba", or the portable "numpy".
        host_state: How the host keeps both moments of deferred channels. "float32": 8 bytes per
            parameter. "compact": 2.1875, in codes of 8 bits with a unit for each 32 neighbours in a
            channel; so a bfloat16 leaf takes 6.1875 in all. Selected channels stay float32 on the
            device. It changes the run a little: each host update rounds moments, most of them by
            less than 1 per cent. It takes more of the host's time where cores wait little for
            memory. The same bits for any kernel and number of threads. A run may go on with the
            other, too.
        threads: Cores that host updates use. By default all but one, which the caller keeps.
        prefetch_bytes: Bytes on each device that a ready update may take before its boundary. None:
            the whole update, once the leaf's dtype per parameter. The engine uploads the rest at
            the boundary, when the step's own memory is free, and the loop waits for it.
        max_skipped: After so many skipped steps in a row (their gradients were not finite) the next
            call raises. None: never; `logging` warns of three in a row.
        engine_state: What `EngineRestore` or `state()` gave, saved together with `params` and
            `opt_state`. The engine copies it, and goes on from there with the same bits.
        exit_if_stuck: When one of several processes fails, the others raise that at their next
            call. A process that waits in a collective, which the failed one never joins, makes no
            next call; neither an exception nor a signal handler reaches it, and jax ends it after
            minutes, without the reason, or never. So the engine ends it 30 s after the failure, by
            `os._exit(1)`, and writes the reason to stderr at the failure and at the end. False
            leaves it waiting: for a program that has more to do than this run, and that somebody
            else ends.

    Raises:
        ValueError: If an argument is out of range; if the state is not one ZenFlowState with
            `offload=True`; if the state has taken steps and `engine_state` is not given; if
            `engine_state` is another run's, or has other options; or if the parameters are not
            those of the state, or lie elsewhere.
        TypeError: If parameters or state are NumPy arrays, which lie on no device.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, zenflow_jax
        >>> params = jax.device_put({"w": jnp.ones((8, 4))}, jax.devices()[0])
        >>> tx = zenflow_jax.zenflow(1e-2, topk_ratio=0.25, update_interval=2)
        >>> opt_state = tx.init(params)
        >>> @jax.jit
        ... def train_step(params, opt_state):
        ...     gradients = jax.grad(lambda p: jnp.sum(p["w"] ** 2))(params)
        ...     updates, opt_state = tx.update(gradients, opt_state, params)
        ...     return optax.apply_updates(params, updates), opt_state
        >>> with zenflow_jax.HostEngine(params, opt_state) as engine:
        ...     for _ in range(5):
        ...         params, opt_state = train_step(params, opt_state)
        ...         params, opt_state = engine.exchange(params, opt_state)
        ...     params, opt_state = engine.flush(params, opt_state)
        >>> engine.stats.windows
        3
        >>> bool((params["w"] < 1).all())
        True
    """

    def __init__(
        self,
        params: Any,
        opt_state: Any,
        *,
        host_kernel: str = "numba",
        host_state: str = "float32",
        threads: int | None = None,
        prefetch_bytes: int | None = None,
        max_skipped: int | None = None,
        engine_state: Any = None,
        exit_if_stuck: bool = True,
    ):
        check_budget(prefetch_bytes)
        check_max_skipped(max_skipped)
        compact = check_host_state(host_state)
        params, opt_state = as_pure(params), as_pure(opt_state)
        state = find_state(opt_state)
        check_wrappers(opt_state, state)
        check_not_flattened(params, state)
        check_not_numpy(state)
        check_one_run(state)
        if engine_state is None:
            check_fresh(state)
        else:
            check_engine_layout(engine_state)
            check_resumed(engine_state, state)
        found, _, places = match_leaves(params, state)
        weights = [found[i] for i in places]
        specs = [leaf.spec for leaf in state.leaves]
        check_placement(weights, specs)
        check_devices(weights, state)
        # Something may have placed all of it anew since `init`, as trainers do before they compile.
        state, self._put_back = put_back(state, weights)
        self._places = Places(specs)
        self._offloaded = offloaded = OffloadedLeaves.of(state, prefetch_bytes)
        parts = offloaded.parts
        mine, states = offloaded.pick(weights), offloaded.pick(state.leaves)
        self._check_pinned(state)
        adam = HostAdam(host_kernel, threads)
        host = HostState(
            [part.spec for part in parts],
            # One at a time: the host copy of one part is enough to have beside the masters.
            (host_part(mine[part.leaf], part) for part in parts),
            (host_channels(part.of(states[part.leaf].channels), part) for part in parts),
            adam,
            state.schedule,
            offloaded.pieces,
            compact=compact,
        )
        devices = {d for s in {weight.sharding for weight in weights} for d in s.device_set}
        moment = int(read(state.step)), int(read(state.token))
        resumed = None
        if engine_state is not None:
            now = fingerprints(weights, specs)  # in all processes, whatever they have read
            try:
                resumed = resume(engine_state, host, offloaded, now, state)
            except (OSError, ValueError) as error:
                # The other processes may have read what this one cannot, and wait for it.
                with contextlib.suppress(ValueError):
                    agree(str(error), *moment, devices)
                raise
        number = agree(None if resumed is None else resumed.refusal, *moment, devices)
        self._given = Given(devices)
        self._given.note(weights)
        self._processes = sorted({d.process_index for d in devices})
        self._peers = PeerMonitor(f"run {number}", self._processes, exit_if_stuck=exit_if_stuck)
        # Of what the masters were taken from. What was saved before the first step may be older
        # than the parameters beside it.
        self._made_with = checksums(mine, states) if resumed is None else None
        self._loads = 0  # how often the masters have followed parameters
        self._host, self._host_kernel = host, host_kernel
        skipped = 0 if resumed is None else resumed.counts.skipped
        in_a_row = int(read(state.skipped_in_a_row))
        self._worker = Worker(host, offloaded, self._peers, skipped, in_a_row, max_skipped)
        self._window_lengths: Counter[int] = Counter()
        self._doubts = Doubts()
        self._schedule = state.schedule
        self._specs = tuple(specs)
        self._expected = Expected(state, weights)
        self._tree = EngineTree(state, offloaded)
        self._ahead = Ahead()
        self._mailbox = Mailbox(self._worker, state, number, self._ahead)
        self._progress = Progress(self._schedule, len(offloaded.places))
        self._open_steps = [0] * self._schedule.groups
        self._updates = Updates(self._worker, host, offloaded, self._ahead)
        self._emitted = Emitted(self._specs, self._schedule, self._ahead)
        if resumed is not None:
            self._updates.note_parameters(mine, state.leaves)
            self._resume(resumed, mine)
        self._closed = False
        self._interrupted = False
        self._put_back_in_run = False
        # When nothing else can fail: who has no engine cannot end its thread.
        self._worker.start()
        self._compile_ahead(state, weights)
        # A forgotten engine's thread ends by itself; one that is there at interpreter exit is
        # waited for, before the modules go that it works with.
        weakref.finalize(self, self._worker.ask_to_stop)
        weakref.finalize(self, self._peers.close)
        self._at_exit = partial(_stop, weakref.ref(self._worker))
        atexit.register(self._at_exit)

    def _compile_ahead(self, state: ZenFlowState, weights: Sequence[jax.Array]) -> None:
        """Begins to compile what boundaries need.

        Args:
            state: The state before the first step.
            weights: The parameter of each of its leaves.
        """
        weakref.finalize(self, self._ahead.close)
        mine, measures = self._offloaded.pick(weights), self._schedule.needs_kept_share
        self._updates.prepare(mine, state, measures=measures)
        self._emitted.prepare(weights, state.leaves, state.step_scalars)
        window, specs = longest(self._schedule.window), [x.spec for x in self._offloaded.parts]
        loops = partial(compile_loops, self._host_kernel, specs, window, compact=self._host.compact)
        self._ahead.run(loops)

    def _check_pinned(self, state: ZenFlowState) -> None:
        """Refuses windows that need more pinned memory than jax gives."""
        parts = self._offloaded.parts
        check_pinned(
            mail_bytes(parts, every_device=state.send_gradients.in_step),
            buffers(state),
            selected_bytes(parts),
            next((device.platform for part in parts for device in part.devices), "cpu"),
            os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"),
        )

    @property
    def stats(self) -> EngineStats:
        """What was done so far: counts, seconds and bytes."""
        worker = dataclasses.asdict(self._worker.stats)
        worker["bytes_to_device"] += self._updates.late_bytes
        return EngineStats(
            steps=self._progress.step,
            windows=self._window_lengths.total(),
            window_lengths=dict(sorted(self._window_lengths.items())),
            reselections=self._progress.reselections,
            kept_share=self._progress.kept_share,
            put_back=self._put_back,
            wait_s=self._worker.wait_s,
            **self._worker.recorder.seconds(),
            **worker,
        )

    @property
    def timeline(self) -> Timeline:
        """What the last few hundred steps were made of, on one time axis; of this process.

        The engine always records it, so you can look at a stall that has already happened, with
        `plot_timeline` or `save_trace`.
        """
        return self._worker.recorder.timeline()

    @_recorded("exchange")
    def exchange(self, params: Any, opt_state: Any) -> tuple[Any, Any]:
        """Sends mail out and brings updates in, between two steps; selects channels where due.

        It waits where an update is due that the host has not finished; where the host is more than
        two mails behind; and, briefly, where channels are selected: for the step, and for the
        hand-over of the channels that change sides. Where windows adapt, it also waits for the step
        before the one just made (after a `flush` for that one). Do not use the arrays of
        `opt_state` that hold mail again; you may use the parameters.

        Args:
            params: The parameters after the step, or a tree with more leaves that has them at the
                same paths, as at construction. Each call may pass another such tree.
            opt_state: The optimizer state after the step, in any wrapper, as at construction.

        Returns:
            Parameters and state for the next step, of the same structure, shapes and placement.
            Leaves that the state does not know come back as they were.

        Raises:
            RuntimeError: If the engine is closed or has failed; if no step was made since the last
                exchange, or more than one (the call after it notices, when the mail is read); if
                the step was made from what was passed to `flush`, not from what `flush` returned;
                if the state is another run's; if a former call was interrupted; if `max_skipped`
                steps in a row were skipped; if something else than zenflow changed the parameters
                (the engine compares samples at each boundary, and raises two calls later, so as
                not to wait).
            ValueError: If the state or the parameters lack leaves of the run, or have them in other
                shapes, dtypes or places.
            TypeError: If they are no jax arrays.
        """
        self._check_open()
        boundaries = self._progress.boundaries()
        closing = [group for group, boundary in enumerate(boundaries) if boundary.closes]
        arriving = [group for group, boundary in enumerate(boundaries) if boundary.arrives]
        first = self._progress.step == 0
        concerned = self._all_groups if first else sorted({*closing, *arriving})
        state = self._expected.state(opt_state, concerned)
        self._check_flushed(state)
        if self._mailbox.holds(state):
            raise RuntimeError(
                "expected the state of a new step, got the one that this engine returned last. "
                "Call `exchange` once after each step, with what the step returned."
            )
        # Refuses what does not fit before anything is done.
        taken = self._take(params)
        self._expected.check_params(taken.weights, concerned)
        state = self._in_place(state, taken.weights, concerned)
        if first:
            self._follow(state, taken.weights)
            self._updates.note_parameters(taken.offloaded, state.leaves)
        with self._all_or_nothing():
            emitted = self._emitted.compare(taken.weights, state.leaves, state.step_scalars)
            self._open_steps = [steps + 1 for steps in self._open_steps]
            self._mailbox.send(state, self._progress.step + 1)
            leaves = state.leaves
            for group in closing:
                state = self._mailbox.send_sums(state, group)
            weights = self._updates.collect(taken.offloaded, arriving, state)
            measured = {}
            for group in closing:
                if boundaries[group].selects:
                    weights, leaves = self._updates.reselect(group, weights, leaves, state.step)
                else:
                    self._updates.close_window(group)
                    if self._schedule.needs_kept_share:
                        measured[group] = self._updates.measure(group, leaves)
                self._count_window(group)
            at_once = [group for group in closing if boundaries[group].synchronous]
            weights = self._updates.collect(weights, at_once, state)
            if closing or arriving:
                taken = taken.with_offloaded(weights)
                params = taken.tree
            self._progress.passed(boundaries, state.step_scalars.statistics, measured)
            self._note_changes(emitted)
            if closing or first:
                self._emitted.note_parameters(taken.weights, leaves)
            new = self._mailbox.refill(state, leaves)
            opt_state = replace_state(opt_state, new)
            self._given.note(taken.weights)
        return params, opt_state

    @_recorded("flush")
    def flush(self, params: Any, opt_state: Any) -> tuple[Any, Any]:
        """Brings every deferred update into the parameters, closing an open window early.

        Call it after the last exchange, or where you want a window to end early. Training may go on
        only from what it returns. The schedule does not move: the next window has fewer steps. To
        look at the parameters and train on as if nothing had happened, use `peek`.

        Args:
            params: The parameters that the last `exchange` returned.
            opt_state: The state that it returned, or a copy. Behind `optax.MultiSteps` both may
                also be what micro-batches without an update have made of these.

        Returns:
            Parameters and state, of the same structure, shapes and placement.

        Raises:
            RuntimeError: If the engine is closed or has failed, a step was made that was not
                exchanged, or a former call was interrupted.
            ValueError: If the state or the parameters have other leaves than at construction.
            TypeError: If they are no jax arrays.
        """
        state, taken = self._between_steps(params, opt_state, "flush")
        if not self._behind:
            self._mailbox.drain()
            self._doubts.check(self._progress.step)
            self._given.note(taken.weights)
            return params, opt_state
        with self._all_or_nothing():
            self._emitted.forget()
            groups = self._all_groups
            weights = self._updates.collect(taken.offloaded, groups, state)
            for group in groups:
                if self._open_steps[group]:
                    state = self._mailbox.send_sums(state, group)
                    self._updates.close_window(group)
                    self._count_window(group)
            weights = self._updates.collect(weights, groups, state)
            self._mailbox.drain()
            self._note_changes(None)
            self._doubts.check(self._progress.step)
            taken = taken.with_offloaded(weights)
            self._given.note(taken.weights)
            return taken.tree, replace_state(opt_state, self._mailbox.renew(state))

    @_recorded("state")
    def peek(self, params: Any, opt_state: Any) -> Any:
        """The parameters as they are best known now, for an evaluation in mid-run.

        They have the updates of all windows that have closed, also the one that is under way, which
        `params` get only at the next boundary: `peek` waits for it. Deferred channels lack the
        gradients of the open window, which have made no update yet; where a window has just closed,
        nothing is missing. The result is the cast of what `master_params` returns.

        Go on training from `params` and `opt_state`, to the same bits as without this call (`flush`
        would end the open window). In a run of several processes all must call it.

        Args:
            params: The parameters that the last `exchange` or `flush` returned.
            opt_state: The state that it returned.

        Returns:
            A tree like `params`, placed like it, of arrays that share nothing with it: they take
            once more the memory of the parameters on the device, and outlive a step that donates.

        Raises:
            RuntimeError: If the engine is closed or has failed, a step was made that was not
                exchanged, or a former call was interrupted.
            ValueError: If the state or the parameters have other leaves than at construction.
            TypeError: If they are no jax arrays.
        """
        state, taken = self._between_steps(params, opt_state, "peek")
        weights = taken.offloaded
        if self._progress.step:  # until then parameters may be loaded, and masters follow
            weights = self._updates.peek(weights, state)
        given = {id(x) for x in taken.leaves}

        def of_its_own(x: Any) -> Any:
            return as_before(_copy(x), x) if id(x) in given and isinstance(x, jax.Array) else x

        return jax.tree.map(of_its_own, taken.with_offloaded(weights).tree)

    @_recorded("state")
    def state(self) -> dict[str, Any]:
        """All that the engine knows, for a checkpoint: a copy, as of the last `exchange`.

        With orbax, `EngineSave` saves the same without a copy. Save it together with the parameters
        and the optimizer state that `exchange` returned, and pass it to a new engine as
        `engine_state`. The call waits for the host work that is under way, an update included; the
        run goes on as without it. In a run of several processes all must call it.

        Returns:
            A tree of dicts, lists and arrays. The large arrays lie in host memory (on a GPU
            pinned), take 16 bytes per offloaded parameter for as long as they live, and never
            change. Shapes and placements are those of `abstract_engine_state(opt_state)`.

        Raises:
            RuntimeError: If the engine is closed or has failed, or a former call was interrupted.
        """
        pending = self._settle_for_checkpoint()
        try:
            self._host.add_up()  # mail is in no checkpoint
        except RuntimeError:
            self._worker.check()  # it failed meanwhile, and the kernels' threads are gone
            raise
        leaves = self._worker.leaves()  # not before: what is gone is not added up
        return self._tree.build(leaves, self._counts(pending), self._updates.before)

    @_recorded("state")
    def _stream(self, copy_bytes: int | None) -> EngineStream:
        """What `state` gives, to be written while the run goes on; for `EngineSave`.

        The run waits for whoever has it: it must be written or closed.
        """
        pending = self._settle_for_checkpoint()
        stream = self._tree.stream(
            self._worker.leaves(),
            self._counts(pending),
            self._updates.before,
            order=self._progress.next_to_close(),
            processes=self._processes,
            copy_bytes=copy_bytes,
            adam=HostAdam(self._host_kernel, 1),
        )
        self._worker.hold(stream.snapshot)
        return stream

    def _settle_for_checkpoint(self) -> list[int]:
        self._check_open()
        # A checkpoint of parameters that something else has changed would be of no run.
        self._doubts.check(self._progress.step)
        return self._settle()

    def _counts(self, pending: Sequence[int]) -> Counts:
        """All that is counted, while the worker has nothing to do."""
        host, stats = self._host, self._worker.stats
        return Counts(
            step=self._progress.step,
            open_steps=self._open_steps,
            counted=[window.counted for window in host.open],
            windows=host.windows,
            pending=pending,
            token=self._mailbox.token,
            skipped=stats.skipped_steps,
            reselections=self._progress.reselections,
            window_lengths=self._window_lengths,
            scalars=host.scalars,
            schedule_state=self._progress.schedule_state,
            shares=self._progress.shares,
            # Before the first step others may be loaded.
            fingerprints=self._given.fingerprints(self._specs)
            if self._progress.step
            else np.zeros(len(self._specs), np.uint32),
        )

    def _follow(self, state: ZenFlowState, weights: Sequence[jax.Array]) -> None:
        """Until a step is made the parameters are right: loaded after the engine, they still are.

        No step moves a deferred channel before its first window closes, so what the first one left
        of the parameters is what they were before it.
        """
        self._check_open()
        if self._progress.step:
            return
        mine = self._offloaded.pick(weights)
        now = checksums(mine, self._offloaded.pick(state.leaves))
        loaded = range(len(mine)) if self._made_with is None else differing(now, self._made_with)
        for i, part in enumerate(self._offloaded.parts):
            if part.leaf in loaded:
                self._host.take_master(i, host_part(mine[part.leaf], part))
        self._made_with = now
        self._loads += bool(loaded)

    @_recorded("state")
    def _masters(self, opt_state: Any) -> Callable[[int], jax.Array]:
        """Gives the host's masters of an offloaded leaf by its number, for `_master.py`."""
        state = self._check(opt_state)
        self._doubts.check(self._progress.step)
        self._settle()
        now = self._progress.step, self._mailbox.token, self._loads

        def masters(number: int) -> jax.Array:
            self._check_open()
            if now != (self._progress.step, self._mailbox.token, self._loads):
                raise RuntimeError(
                    f"expected the masters of step {now[0]}, got to step {self._progress.step} or "
                    "to other parameters before all of them were asked for. Make no step, call no "
                    "`flush`, and go through those of one tree of parameters at a time."
                )
            return self._updates.masters(number, state)

        return masters

    def exchange_nnx(self, model: Any, optimizer: Any) -> None:
        """`exchange` for flax nnx: updates `model` and `optimizer` in place.

        Args:
            model: The module that `optimizer` trains.
            optimizer: An `nnx.Optimizer` whose `tx` contains `zenflow`.

        Raises:
            RuntimeError, ValueError: As `exchange`.
            TypeError: If they are something else.
        """
        self._of_nnx(self.exchange, model, optimizer)

    def flush_nnx(self, model: Any, optimizer: Any) -> None:
        """`flush` for flax nnx: updates `model` and `optimizer` in place. Errors as `flush`."""
        self._of_nnx(self.flush, model, optimizer)

    def peek_nnx(self, model: _Model, optimizer: Any) -> _Model:
        """`peek` for flax nnx: another model, with the parameters as they are best known now.

        What is not trained (batch statistics, counts, keys) is as in `model`, and copied as well,
        so that neither model changes the other.

        Args:
            model: The module that `optimizer` trains.
            optimizer: An `nnx.Optimizer` whose `tx` contains `zenflow`.

        Returns:
            A model of the same class and configuration, for evaluation.

        Raises:
            RuntimeError, ValueError, TypeError: As `peek`.
        """
        return nnx_pair().copy_with(model, optimizer, self.peek)

    def close(self) -> None:
        """Ends the thread and frees the host memory. Safe twice, and during work.

        Updates that have not been flushed are dropped.
        """
        self._closed = True
        self._worker.stop()
        self._peers.close()
        self._mailbox.close()
        self._ahead.close()
        self._updates.forget()
        atexit.unregister(self._at_exit)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses `copy.copy`, `copy.deepcopy` and `pickle`, which all ask here."""
        raise TypeError(
            "an engine, or a step that is attached to one, cannot be copied or pickled: a run has "
            "one engine. Save `engine.state()`, and go on from it with another one: "
            "`HostEngine(params, opt_state, engine_state=...)`."
        )

    def __enter__(self) -> "HostEngine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        # After a failure, or a `close` of the user's, `flush` would be no remedy.
        failed = self._closed or self._interrupted or self._worker.failed or self._doubts.known
        dropped = not failed and self._behind
        lost = None if error is None or self._closed else self._what_is_lost(error)
        self.close()
        if error is not None:
            # Theirs goes on as it is; this is shown below it.
            if lost is not None:
                error.add_note(f"zenflow_jax: {lost} {_GO_ON}")
        elif dropped:
            raise RuntimeError(
                "the engine was left with updates that never reached the parameters. Call `params, "
                "opt_state = engine.flush(params, opt_state)` before the `with` block ends."
            )

    @property
    def _behind(self) -> bool:
        """Whether there are gradients or updates that have not reached the parameters."""
        return any(self._open_steps) or self._updates.some_pending

    def _what_is_lost(self, error: BaseException) -> str | None:
        """What an exception leaves behind that goes through the `with` block; None for nothing."""
        step = self._progress.step
        reason = self._worker.reason
        if self._doubts.known:
            return None if self._doubts.known in str(error) else self._doubts.known
        if reason:
            # Most often it is what is raised here.
            return None if reason in str(error) else f"the engine has failed as well: {reason}."
        if self._interrupted:
            return (
                f"the engine was interrupted in a call after step {step}, so that parameters, "
                "state and host no longer belong together."
            )
        if not self._behind:
            return None
        return (
            f"the engine was closed after step {step} with updates that never reached the "
            "parameters; they are dropped. The parameters are whole, but lack them."
        )

    def _resume(self, resumed: Resumed, weights: Sequence[jax.Array]) -> None:
        """Goes on where another engine was."""
        counts = resumed.counts
        self._progress.resume(
            counts.step, counts.reselections, counts.schedule_state, counts.shares
        )
        self._open_steps = list(counts.open_steps)
        self._window_lengths.update(counts.window_lengths)
        self._updates.resume(counts.pending, resumed.before, weights)

    def _settle(self) -> list[int]:
        """Waits until the worker has nothing to do; what there is of each group's update."""
        self._mailbox.drain()
        return self._updates.wait()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                "expected an open engine, got one after `close`. Close it after the "
                "last `flush`; make a new run's engine with `HostEngine(params, tx.init(params))`."
            )
        self._worker.check()
        if self._interrupted:
            raise RuntimeError(
                "expected an engine whose last call came to its end, got one that was interrupted "
                "half-way: parameters, state and host no longer belong together. Go on from the "
                "last checkpoint."
            )
        # Not those of the step that the device may be at: who reads them waits for it.
        self._doubts.check(self._progress.step - 1)

    def _check(self, opt_state: Any) -> ZenFlowState:
        self._check_open()
        return self._expected.state(opt_state)

    @property
    def _all_groups(self) -> list[int]:
        return list(range(self._schedule.groups))

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Around what must not be left half done and gone on from."""
        self._interrupted = True
        yield
        self._interrupted = False

    def _take(self, params: Any) -> CallerTree:
        leaves, treedef, places = self._places(params)
        return CallerTree(leaves, treedef, places, self._offloaded)

    def _note_changes(self, emitted: tuple[list[int], jax.Array] | None) -> None:
        """Takes over what has been found of the parameters that came in."""
        if emitted is not None:
            which, counts = emitted
            self._doubts.add(self._progress.step, [self._specs[i].name for i in which], counts)
        for which, counts in self._updates.changed:
            names = [self._offloaded.specs[i].name for i in which]
            self._doubts.add(self._progress.step, names, counts)
        self._updates.changed = []

    def _in_place(
        self, state: ZenFlowState, weights: Sequence[jax.Array], groups: Sequence[int]
    ) -> ZenFlowState:
        """A step's state with all arrays where they belong; they are put back once in a run."""
        reason = self._expected.misplaced(state, groups)
        if reason is None:
            return state
        if self._put_back_in_run:
            raise ValueError(reason)
        self._put_back_in_run = True
        state, moved = put_back(state, weights)
        self._put_back += moved
        return state

    def _check_flushed(self, state: ZenFlowState) -> None:
        if self._mailbox.replaced(state):
            raise RuntimeError(
                "expected parameters and state that the last `flush` returned, got those that it "
                "was called with, or a step made from them: they lack the updates that it has "
                "brought. Go on with `params, opt_state = engine.flush(params, opt_state)`; to "
                "look at the parameters without ending the open window, use `eval_params = "
                "engine.peek(params, opt_state)`."
            )

    def _between_steps(
        self, params: Any, opt_state: Any, name: str
    ) -> tuple[ZenFlowState, CallerTree]:
        """Both arguments of a call, if they are what the last `exchange` or `flush` returned."""
        state = self._check(opt_state)
        self._check_flushed(state)
        copied = not self._mailbox.holds(state)
        # Between two micro-batches of `optax.MultiSteps` there is no mail to be taken, either.
        if copied and not self._mailbox.passed_on(state):
            stepped = int(read(state.token)) == USED
            raise RuntimeError(
                "expected the state that the last `exchange` returned, got "
                + (
                    "one whose step's mail has not been taken. Call `exchange` first, then "
                    f"`{name}`."
                    if stepped
                    else f"one of another step or run. Call `{name}` with the one it returned."
                )
            )
        taken = self._take(params)
        self._expected.check_params(taken.weights, self._all_groups)
        if copied:
            state = self._in_place(state, taken.weights, self._all_groups)
        return state, taken

    def _count_window(self, group: int) -> None:
        self._window_lengths[self._open_steps[group]] += 1
        self._open_steps[group] = 0

    def _of_nnx(self, call: Any, model: Any, optimizer: Any) -> None:
        pair = nnx_pair()
        pair.update(model, optimizer, *call(*pair.arrays(model, optimizer)))


def nnx_pair() -> Any:
    """What there is for a pair of flax nnx; imported for who has one."""
    from zenflow_jax._exchange import nnx_pair

    return nnx_pair


# Under jit an argument that comes back as it is would be the same array.
_copy = jax.jit(jnp.copy)


def _stop(worker: weakref.ref[Worker]) -> None:
    alive = worker()
    if alive is not None:
        alive.stop()
