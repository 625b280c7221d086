"""Messages from the calling thread to the worker, with futures for its answers."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax

from zenflow_jax._device.step_scalars import StepScalars


@dataclass(eq=False)
class Mail:
    """One step's mail. The worker owns its buffers from now on; `done` when it has taken it in."""

    step: int  # the step from which it must come
    token: int  # the token that it must carry
    gradients: list[jax.Array]  # one for each leaf; none where the device adds them up
    step_scalars: StepScalars
    on_device: bool  # gradients and scalars are still on the device
    done: Future = field(default_factory=Future)
    arrived: Future = field(default_factory=Future)  # gives what `_receive` returns
    begun: bool = False  # the worker has taken it up

    @property
    def is_here(self) -> bool:
        return self.arrived.done()

    @property
    def promises(self) -> list[Future]:
        """The futures that the caller may wait for."""
        return [self.done]


@dataclass(eq=False)
class Sums:
    """The device's sums of a group's window, which closes next; the worker's from now on."""

    group: int
    gradients: list[jax.Array]  # one for each leaf of the group, on the device
    last: Mail | None  # mail of the window's last step, if this engine has seen one
    done: Future = field(default_factory=Future)
    arrived: Future = field(default_factory=Future)
    begun: bool = False  # the worker has taken it up

    @property
    def is_here(self) -> bool:
        return self.arrived.done()

    @property
    def promises(self) -> list[Future]:
        return [self.done]


@dataclass(eq=False)
class HandOver:
    """Channels change hands where a window closes, before its update begins.

    The worker owns the device arrays until `done`. That gives the arrays of the newly selected
    channels, for each part of the group and each of its devices: (master, mu, nu, steps), None for
    a leaf without any.
    """

    leaving: Sequence[tuple[jax.Array, jax.Array, jax.Array, jax.Array] | None]
    chosen: Sequence[jax.Array]
    done: Future = field(default_factory=Future)


@dataclass(eq=False)
class Close:
    """A group's open window closes. `done` gives its update, for each part and each of its devices.

    A part that is not prefetched has none. If no step of the window counted, the list is empty.
    """

    group: int
    hand_over: HandOver | None = None
    used_up: list[Any] = field(default_factory=list)  # uploads that are merged, to be freed
    done: Future = field(default_factory=Future)
    begun: bool = False  # the worker has taken it up
    is_here: bool = True  # there is nothing to wait for

    @property
    def promises(self) -> list[Future]:
        return [self.done] if self.hand_over is None else [self.done, self.hand_over.done]


# What there is of a group's update that has not reached the parameters: none; one; an empty one,
# because no step of its window counted.
NONE, PENDING, EMPTY = 0, 1, 2
