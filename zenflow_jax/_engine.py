"""`HostEngine`: the work between two steps, on the caller's thread.

The engine dispatches all device programs, in the same order in every run.
"""

import dataclasses
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from zenflow_jax._checkpoint import agreement, resume
from zenflow_jax._checkpoint.saving import EngineSnapshot
from zenflow_jax._device.checksums import checksum
from zenflow_jax._device.gpu_faults import check_gpus
from zenflow_jax._device.memory import read
from zenflow_jax._device.state import replace_state
from zenflow_jax._diagnostics.stats import EngineStats
from zenflow_jax._diagnostics.timeline import Span, recorded
from zenflow_jax._exchange import checks
from zenflow_jax._exchange.integrity import Integrity
from zenflow_jax._exchange.lifecycle import INTERRUPTED, Lifecycle
from zenflow_jax._exchange.mailbox import Mailbox
from zenflow_jax._exchange.parts import OffloadedLeaves, devices_of
from zenflow_jax._exchange.pinned import check_pinned_memory, pin_memory_for_mail
from zenflow_jax._exchange.progress import Progress, RunState
from zenflow_jax._exchange.tokens import Tokens
from zenflow_jax._exchange.updates import Updates
from zenflow_jax._exchange.worker import Worker
from zenflow_jax._spec.checks import check_one_of, is_compact


class HostEngine:
    """Updates the deferred channels on the host, in parallel with the device.

    Make an engine for each run, before its first step. Call `exchange` after every step, `flush`
    before you use the parameters elsewhere, and `close` at the end (or use a `with` block). Only
    one thread may call an engine.

    An engine needs 12 bytes of host memory per deferred parameter (6.1875 with compact moments) and
    pinned memory for a few steps' mail. A ready update waits on the device. `planning` has both.

    Args:
        params: The parameters that `opt_state` was made for: a tree of arrays, or an `nnx.State`.
            The tree may also contain other leaves: each call finds leaves by their paths.
        opt_state: The result of `tx.init(params)`, which contains one `ZenFlowState` at any depth.
        host_kernel: "numba", or "numpy", which is slower and reads like the formula.
        host_state: The host's format for moments: "float32" needs 8 bytes per parameter; "compact"
            needs 2.1875 but rounds each update, usually by less than 1%. A resumed run may switch.
        threads: Number of threads for host updates. By default all cores but one, left for the
            caller.
        engine_state: The result of `EngineRestore` or `state()`, saved together with `params` and
            `opt_state`. The engine copies this state and resumes the run, bit-identically.
        check: How to detect other code that changes parameters. "samples" periodically compares
            some values of each leaf. "all", for debugging, compares all values at each step from
            the second, which takes time and a second copy of the parameters. Neither detects
            changes in skipped steps, NaNs, or changes smaller than a twentieth of a selected
            float32 weight's step. If selected low-precision channels change between two steps, the
            next step silently undoes the change.

    Raises:
        ValueError: If an argument is out of range; if `opt_state` does not have exactly one
            ZenFlowState; if the state is not from step 0 and `engine_state` is not passed; if
            `engine_state` belongs to another run or has different options; if the parameters do not
            match the state or its placement; or if jax has too little pinned memory. The error is a
            `planning.UnfitRunError` if different settings or another checkpoint fix it.
        TypeError: If parameters or state are NumPy arrays instead of arrays on a device.

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
        >>> bool((params["w"] < 1).all())
        True
    """

    def __init__(
        self,
        params: PyTree,
        opt_state: PyTree,
        *,
        host_kernel: str = "numba",
        host_state: str = "float32",
        threads: int | None = None,
        engine_state: PyTree = None,
        check: str = "samples",
    ):
        check_one_of("check", check, ["samples", "all"])
        compact = is_compact(host_state)
        state, weights = checks.checked(params, opt_state, engine_state is None)
        self._devices = devices_of(weights)
        # Before the block, because all processes must run this program.
        params_sum = 0 if engine_state is None else checksum(weights)
        with agreement.failing_together(self._devices):
            check_gpus(self._devices)
            run = RunState.first(state)
            if engine_state is not None:
                run = resume.check_resumed(engine_state, state)
            self._offloaded = offloaded = OffloadedLeaves.of(state)
            check_pinned_memory(state, offloaded)
            pin_memory_for_mail(state, offloaded)
            self._worker = worker = Worker(
                state, weights, offloaded, host_kernel, threads, compact=compact
            )
            self._checker = checks.StateChecker(state, weights)
            self._progress = Progress(state.schedule, run)
            self._integrity = Integrity(state, everything=check == "all")
            self._updates = updates = Updates(worker, offloaded, state.leaves)
            if engine_state is not None:
                resume.resume_run(engine_state, run, state, params_sum, offloaded, worker, updates)
            self._tokens = Tokens(state, weights)
            self._mailbox = Mailbox(worker, state, self._tokens)
            self._lifecycle = life = Lifecycle(updates.pending)
            self._abstract = jax.eval_shape(lambda x: x, state)  # does not keep arrays alive
        self._tokens.run = agreement.agree(
            None, int(read(state.step)), int(read(state.token)), self._devices
        )
        # This must come last: a failed constructor must not leak a thread.
        worker.start()
        # A forgotten engine's thread ends on its own.
        weakref.finalize(self, _forgotten, worker, life)

    @property
    def stats(self) -> EngineStats:
        """Returns counts, seconds and bytes so far."""
        return dataclasses.replace(
            self._worker.stats,
            **self._progress.counts,
            seconds=self._worker.recorder.seconds.copy(),
        )

    @property
    def timeline(self) -> list[Span]:
        """Returns this process's last few hundred steps as spans, for `plot_timeline`.

        A span is a tuple (row, kind, step, start, end), with times of `time.perf_counter`.
        """
        return self._worker.recorder.timeline()

    @recorded("exchange")
    def exchange(self, params: PyTree, opt_state: PyTree) -> tuple[Any, Any]:
        """Sends mail and merges updates between two steps; selects channels when due.

        If no leaf is offloaded, it returns its arguments.

        Waits for due updates, for a host that is more than two steps behind and, briefly, when
        channels are selected or windows adapt. You may then use the parameters, but not the mail.

        Args:
            params: The step's new parameters. The tree may contain other leaves.
            opt_state: The step's new state, inside any wrapper.

        Returns:
            Both for the next step, with unchanged structure, shapes and placement.

        Raises:
            RuntimeError: If the engine is closed, has failed or was interrupted; if the state does
                not come from exactly one step on the last call's result; or if other code changed
                the parameters.
            ValueError, TypeError: If state or parameters differ from the constructor's.
        """
        self._check_usable()
        if not self._offloaded.specs:
            self._checker.state(opt_state)
            self._progress.run.step += 1
            return params, opt_state
        boundaries = self._progress.boundaries()
        closing = [group for group, boundary in enumerate(boundaries) if boundary.closes]
        arriving = [group for group, boundary in enumerate(boundaries) if boundary.arrives]
        at_once = [group for group in closing if boundaries[group].synchronous]
        first = self._progress.run.step == 0
        state = self._checker.state(opt_state)
        # Rejects unsuitable parameters before any change.
        taken = self._checker.params(params)
        offloaded = self._offloaded.pick(taken.weights)
        self._tokens.check_new_step(state)
        self._checker.check_in_place(state, taken.weights)
        if first:
            self._updates.load(offloaded)
        with self._lifecycle.change():
            step = self._progress.run.step + 1
            self._integrity.step_made(step, taken.weights, state.leaves, state.step_scalars)
            self._mailbox.send(state, step)
            weights = self._updates.collect(offloaded, arriving, state, keep_move=True)
            leaves, measured = state.leaves, {}
            for group in closing:
                if boundaries[group].selects:
                    leaves = self._updates.reselect(group, weights, leaves, state.step)
                else:
                    self._updates.close_window(group)
                    if state.schedule.auto_select:
                        measured[group] = self._updates.measure(group, leaves)
            weights = self._updates.collect(weights, at_once, state)
            if any(x is not y for x, y in zip(weights, offloaded, strict=True)):
                taken = taken.put(self._offloaded.places, weights)
                params = taken.tree
            self._progress.passed(boundaries, state.step_scalars, measured)
            self._integrity.note_parameters(taken.weights, leaves, if_due=bool(closing or first))
            opt_state = replace_state(opt_state, self._mailbox.refill(state, leaves))
            self._tokens.note(taken.weights)
            return params, opt_state

    @recorded("flush")
    def flush(self, params: PyTree, opt_state: PyTree) -> tuple[Any, Any]:
        """Merges pending updates, unless this would lose provisional steps.

        Call this after the last exchange, and continue only from its result. Open windows stay
        open, so a continued run has the same windows. The parameters contain the open windows'
        gradients only as provisional steps, and not at all with `provisional_share=None`; end such
        a run at the end of a window.

        Args:
            params: The parameters that the last `exchange` returned.
            opt_state: The state that it returned, or a copy. With `optax.MultiSteps`, the state may
                also come from later micro-batches without an update.

        Raises:
            RuntimeError, ValueError, TypeError: As for `exchange`, or if a step was not exchanged.
        """
        self._check_usable()
        state = self._checker.state(opt_state)
        if not self._offloaded.specs:
            return params, opt_state
        copied = self._tokens.check_between_steps(state)
        taken = self._checker.params(params)
        if copied:
            self._checker.check_in_place(state, taken.weights)
        # An update mid-window would overwrite the provisional steps since the window opened.
        at_once = state.schedule.provisional_share is None
        pending, open_steps = self._updates.pending, self._progress.run.open_steps
        arriving = [group for group in pending if at_once or not open_steps[group]]
        self._mailbox.drain()
        self._integrity.check(self._progress.run.step)
        with self._lifecycle.change(flushes=True):
            if arriving:
                offloaded = self._offloaded.pick(taken.weights)
                weights = self._updates.collect(offloaded, arriving, state)
                taken = taken.put(self._offloaded.places, weights)
                self._integrity.note_parameters(taken.weights, state.leaves, if_due=False)
                token = self._tokens.renew(state.token)
                opt_state = replace_state(opt_state, state._replace(token=token))
            self._tokens.note(taken.weights)
            return taken.tree, opt_state

    @recorded("state")
    def state(self) -> dict[str, Any]:
        """Copies the engine's whole state as of the last `exchange`, for a checkpoint.

        With orbax, `EngineSave` saves this state without a copy. Save the state together with the
        parameters and the optimizer state that `exchange` returned, and pass it to a new engine as
        `engine_state`. The call waits for the host's work.

        Returns:
            A tree of dicts, lists and NumPy arrays, with 20 bytes per offloaded parameter. Shapes
            match `abstract_engine_state(opt_state)`.

        Raises:
            RuntimeError: If the engine is closed, has failed, or was interrupted during a call.
            ValueError: If other processes have parts of the state.
        """
        return self._snapshot(0).tree()

    @recorded("state")
    def snapshot(self, copy_bytes: int | None = None) -> EngineSnapshot:
        """Returns the state at this moment, which `EngineSave` writes while the run continues.

        Write or close it, otherwise the run waits forever. `copy_bytes` is as in `EngineSave`.
        """
        return self._snapshot(copy_bytes)

    def _snapshot(self, copy_bytes: int | None) -> EngineSnapshot:
        pending, run = self._settle(), self._progress.before_next_step()
        run = dataclasses.replace(run, pending=pending, token=self._tokens.number)
        weights, where = self._tokens.weights, (self._offloaded, self._worker, self._devices)
        snapshot = EngineSnapshot(self._abstract, run, weights, *where, copy_bytes)
        self._lifecycle.saves.append(snapshot.written)
        return snapshot

    @recorded("state")
    def _settled(self, params: PyTree, opt_state: PyTree) -> object:
        """Waits for the host's masters; returns `noted`, replaced by each step, flush or load."""
        self._check_usable()
        self._checker.state(opt_state)
        if self._progress.run.step == 0:
            weights = self._checker.params(params).weights
            self._updates.load(self._offloaded.pick(weights))
            self._tokens.note(weights)
        self._settle()
        return self._tokens.noted

    def exchange_nnx(self, model: object, optimizer: object) -> None:
        """Calls `exchange` for flax nnx, and updates `model` and its `optimizer` in place."""
        _in_place(self.exchange, model, optimizer)

    def flush_nnx(self, model: object, optimizer: object) -> None:
        """Calls `flush` for flax nnx, and updates `model` and its `optimizer` in place."""
        _in_place(self.flush, model, optimizer)

    def close(self) -> None:
        """Ends the thread, frees memory and drops updates. Safe to call twice or during work.

        `logging` warns if pending updates reached neither the parameters nor a saved state.
        """
        self._lifecycle.warn()
        self._worker.stop()
        self._mailbox.close()
        self._updates.forget()

    def __enter__(self) -> "HostEngine":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ended = error is not None or self._worker.closed
        # Not for a `SystemExit`, with which all processes may leave together.
        if isinstance(error, Exception) and jax.process_count() > 1:
            logging.getLogger("zenflow_jax").error(
                f"Process {jax.process_index()} leaves the run: {error!r}. When it exits, jax ends "
                "the other processes after `shutdown_timeout_seconds` (docs/multi_host.md)."
            )
        lost = None if ended else self._lifecycle.lost
        self._lifecycle.told |= lost is not None  # an error replaces the warning
        self.close()
        if ended or self._worker.failure_raised:
            return
        self._worker.check()
        if lost:
            raise RuntimeError(lost)

    def _check_usable(self) -> None:
        if self._worker.closed:
            raise RuntimeError("This engine is closed. For a new run, make a new engine.")
        self._worker.check()
        if self._lifecycle.interrupted:
            raise RuntimeError(INTERRUPTED)
        # The device may still be running the last step, and reading its counts would wait.
        self._integrity.check(self._progress.run.step - 1)

    def _settle(self) -> list[int]:
        """Waits until the worker is idle and all comparisons are read; result as `Updates.wait`."""
        self._check_usable()
        self._integrity.check(self._progress.run.step)
        self._mailbox.drain()
        return self._updates.wait()


def _in_place(call: Callable[..., tuple[Any, Any]], model: Any, optimizer: Any) -> None:
    # Importing flax takes as long as importing this whole library.
    from flax import nnx

    params, opt_state = nnx.state(model, optimizer.wrt), optimizer.opt_state
    params, opt_state = call(nnx.as_pure(params), nnx.as_pure(opt_state))
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))


def _forgotten(worker: Worker, lifecycle: Lifecycle) -> None:
    """Ends an engine that was never closed, at garbage collection or interpreter exit."""
    lifecycle.warn(getattr(sys, "last_value", None))  # the exception that ended the program
    worker.request_stop()
