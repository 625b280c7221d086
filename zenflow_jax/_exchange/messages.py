"""Messages from the calling thread to the worker, with futures for the results."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax

from zenflow_jax._device.memory import copy_to_host
from zenflow_jax._diagnostics.timeline import Recorder
from zenflow_jax._exchange.parts import OffloadedLeaves
from zenflow_jax._spec.scalars import MISUSED, USED, StepScalars


@dataclass(eq=False, kw_only=True)
class _Message:
    done: Future = field(default_factory=Future)
    begun: bool = False  # whether the worker has started it
    arrived: Future | None = None  # resolves to the arrays in host memory; None without arrays

    def arrays(self) -> Any:
        assert self.arrived is not None, "the message has no arrays"
        return self.arrived.result()

    @property
    def promises(self) -> list[Future]:
        return [self.done]


@dataclass(eq=False)
class Mail(_Message):
    """One step's mail, owned by the worker. `done` resolves when the worker has processed it."""

    step: int  # the expected step
    token: int  # the expected token
    gradients: list[jax.Array]  # one array for each leaf
    step_scalars: StepScalars
    on_device: bool  # whether gradients and scalars are still on the device
    arrived_at: float = 0.0

    def check(self, step: int, token: int) -> None:
        """Rejects mail with a different step or token."""
        if token == USED:
            raise RuntimeError(
                f"Step {step} followed another step without an `exchange`, so mail is lost. Call "
                "`params, opt_state = engine.exchange(params, opt_state)` after every step, and "
                "pass its results to the next step. A loop of steps must be in Python, not in "
                "`lax.scan`."
            )
        if token == MISUSED:
            raise RuntimeError(
                f"The gradients of streamed layers at step {step} are not the gradients from "
                "`jax.grad`, so the parameters are now NaN: some code scaled or summed them, used "
                "a layer twice or never, stopped its gradient (`lax.stop_gradient` in the scan's "
                "body), or read the weights outside the scan. Fix the model "
                '(docs/gradients.md, "Scanned layers"), and resume from a checkpoint.'
            )
        if step == 0:  # scalars that no step wrote
            raise RuntimeError(
                f"The state has no mail from step {self.step}, because `update` did not write it: "
                "a wrapper withheld it (`optax.MultiSteps`, `optax.apply_if_finite`, a `lax.cond` "
                "around `tx.update`), a dynamic loss scale kept the old state (`jnp.where(finite, "
                "new, old)`), or the state is fresh from `tx.init`. With `MultiSteps`, call "
                "`exchange` only if `multi_steps.has_updated(opt_state)`. Omit `apply_if_finite`, "
                "and always use the new state: zenflow skips steps that are not finite."
            )
        if (step, token) != (self.step, self.token):
            raise RuntimeError(
                f"The mail is from step {step} of a state that this engine did not return; the "
                f"run's next step is {self.step}. Make an engine for each run, and pass the state "
                "that `exchange` returned to the next step."
            )


@dataclass(eq=False)
class Close(_Message):
    """Closes a group's open window. `done` resolves to its update, for each part and device.

    Parts that are not prefetched have no update. If no step in the window counted, the list is
    empty. Channels may be handed over first: the worker owns the leaving arrays until `entered`
    resolves to the newly selected channels' arrays, (master, mu, nu, steps) or None, for each part
    and device.
    """

    group: int
    merged_uploads: list[Any]  # merged uploads, to be freed
    leaving: Sequence[tuple[jax.Array, ...] | None] = ()  # for each leaf, as in `entered`
    chosen: Sequence[jax.Array] = ()  # the newly selected channels
    entered: Future = field(default_factory=Future)

    @property
    def promises(self) -> list[Future]:
        return [self.done, self.entered]


class Receiver:
    """Waits for messages' arrays, so that the worker can continue an update in the meantime."""

    def __init__(self, offloaded: OffloadedLeaves, recorder: Recorder):
        self._offloaded, self._recorder = offloaded, recorder
        self._mail = ThreadPoolExecutor(1, thread_name_prefix="zenflow-mail")

    def receive(self, item: Mail, arrived: Callable[[], None]) -> None:
        """Starts waiting for a message's arrays; calls `arrived` when they are in host memory."""
        times = self._recorder.dispatched(item.step)
        item.arrived = self._mail.submit(self._receive_mail, item, times)
        item.arrived.add_done_callback(lambda _: arrived())

    def close(self) -> None:
        """Stops accepting messages; does not wait."""
        self._mail.shutdown(wait=False)

    def _receive_mail(self, item: Mail, times: tuple[float, float]) -> tuple[list, list]:
        """Waits for each piece's gradient on its first device, and for the step scalars."""
        step_scalars = [x.addressable_data(0) for x in jax.tree.leaves(item.step_scalars)]
        pieces = [part.of(item.gradients[part.leaf]) for part in self._offloaded.firsts]
        if item.on_device:
            step_scalars, pieces = copy_to_host(step_scalars), copy_to_host(pieces)
        # Mail that the step itself sent is complete when the step ends; other mail arrives later.
        jax.block_until_ready((step_scalars, item.step_scalars))
        ended = self._recorder.step_ended(item.step, times)
        jax.block_until_ready(pieces)
        item.arrived_at = self._recorder.add("mail", "copy", item.step, ended)
        # Dropped only now, after the caller dropped them, because the last holder has to free them.
        item.gradients.clear()
        return pieces, step_scalars
