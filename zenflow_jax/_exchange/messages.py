"""What the calling thread and the worker tell each other."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import jax

from zenflow_jax._device.step_scalars import StepScalars


@dataclass(eq=False)
class Mail:
    """One step's mail, taken in when it is `done`. Its buffers are the worker's from now on."""

    step: int  # the step that it must be of
    token: int  # the token that it must carry
    gradients: list[jax.Array]  # of each leaf; none where the device adds them up
    step_scalars: StepScalars
    on_device: bool  # both are still there
    done: Future = field(default_factory=Future)
    arrived: Future = field(default_factory=Future)  # gives what `_receive` says
    begun: bool = False

    @property
    def is_here(self) -> bool:
        return self.arrived.done()

    @property
    def promises(self) -> list[Future]:
        """What the caller may be waiting for."""
        return [self.done]


@dataclass(eq=False)
class Sums:
    """What the device added up in the window that closes next; the worker's from now on."""

    gradients: list[jax.Array]  # of each leaf, on the device
    last: Mail | None  # of the window's last step, if this engine has seen one
    done: Future = field(default_factory=Future)
    arrived: Future = field(default_factory=Future)
    begun: bool = False

    @property
    def is_here(self) -> bool:
        return self.arrived.done()

    @property
    def promises(self) -> list[Future]:
        return [self.done]


@dataclass(eq=False)
class HandOver:
    """Channels change hands where a window closes, before its update begins.

    The device arrays belong to the worker until `done`, which gives for each part and each of its
    devices the arrays of the channels that are selected from now on: (master, mu, nu, steps), None
    for a leaf without any.
    """

    leaving: Sequence[tuple[jax.Array, jax.Array, jax.Array, jax.Array] | None]
    chosen: Sequence[jax.Array]
    done: Future = field(default_factory=Future)


@dataclass(eq=False)
class Close:
    """The open window closes. `done` gives, for each part and each of its devices, the update.

    Nothing for a part that is not prefetched; for no part, if no step of the window counted.
    """

    hand_over: HandOver | None = None
    done: Future = field(default_factory=Future)
    begun: bool = False
    is_here: bool = True  # there is nothing to wait for

    @property
    def promises(self) -> list[Future]:
        return [self.done] if self.hand_over is None else [self.done, self.hand_over.done]


# Of the update that has not reached the parameters: there is none; there is; it is about nothing,
# because no step of its window counted.
NONE, PENDING, EMPTY = 0, 1, 2
