"""Messages from the calling thread to the worker, with futures for the results."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax

from zenflow_jax._spec.scalars import MISUSED, USED, StepScalars


@dataclass(eq=False, kw_only=True)
class _Message:
    done: Future = field(default_factory=Future)
    begun: bool = False  # whether the worker has started it
    arrived: Future | None = None  # resolves to the arrays in host memory; None without arrays

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
                "`params, opt_state = engine.exchange(params, opt_state)` after every step."
            )
        if token == MISUSED:
            raise RuntimeError(
                f"The gradients of streamed layers at step {step} are not those of `jax.grad`, so "
                "the parameters are now NaN. Use each layer once, in the scan (docs/gradients.md, "
                '"Scanned layers"), and resume from a checkpoint.'
            )
        if step == 0:  # scalars that no step wrote
            raise RuntimeError(
                f"The state has no mail from step {self.step}: `tx.update` did not run, or a "
                "wrapper kept the old state. Call `exchange` only after an update, and keep its "
                'state (docs/usage.md, "Changes that an engine rejects").'
            )
        if (step, token) != (self.step, self.token):
            raise RuntimeError(
                f"The mail is from step {step} of a state that this engine did not return, not "
                f"from step {self.step}. Continue with the last `exchange`'s or `flush`'s result."
            )


@dataclass(eq=False)
class Update(_Message):
    """A group's update, from the end of its window until the caller has merged it.

    `done` resolves to its uploads, for each part and device; if no step in the window counted, the
    list is empty. Channels may be handed over first: the worker owns the leaving arrays until
    `entered` resolves to the newly selected channels' arrays, (master, mu, nu, steps) or None, for
    each part and device.
    """

    group: int
    merged_uploads: list[Any] = field(default_factory=list)  # of earlier updates, to be freed
    leaving: Sequence[tuple[jax.Array, ...] | None] = ()  # for each leaf, as in `entered`
    chosen: Sequence[jax.Array] = ()  # the newly selected channels
    entered: Future = field(default_factory=Future)
    before: jax.Array | None = None  # channels selected in its window, if replaced since then

    @property
    def promises(self) -> list[Future]:
        return [self.done, self.entered]
