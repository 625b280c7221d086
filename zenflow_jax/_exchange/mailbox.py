"""Who has which buffers for mail, and the step tokens that prove that none was lost.

A step finds buffers for its mail in the state and returns its mail in others, or in the same ones
where it was told to keep and donate them. `send` takes the mail out and gives it to the worker;
`refill` puts buffers in. As a rule those are the same blank ones every time: no step reads them,
jit drops arguments that are not read, and what is not used up can be given again. What was mailed
is freed by the worker when it has used it: freeing an array takes 30 us, which the caller has not.

Where the step leaves its gradients on the device, what is blank is one element per device. Where it
adds them up there, it is zeros for the sums of the next window.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from zenflow_jax._device.memory import in_host_memory, put_everywhere, read, zeros_like
from zenflow_jax._device.state import LeafState, ZenFlowState
from zenflow_jax._device.step_scalars import StepScalars
from zenflow_jax._exchange.messages import Mail, Sums
from zenflow_jax._exchange.worker import Worker
from zenflow_jax._host.state import MAILS_KEPT
from zenflow_jax._plan.rules import longest
from zenflow_jax._plan.sending import SendGradients

#: Mails that may be unread, by how they get to the host, which lets Python run ahead of the device.
#: Where gradients wait there for their copy, each that is unread takes device memory. Where they do
#: not leave, a step's scalars may be behind the sums of a window: `send` sees how far Python runs.
IN_FLIGHT = {SendGradients.DURING_STEP: 2, SendGradients.AFTER_STEP: 1}
AHEAD = 2
_POSITIVE = 0x7FFFFFFF


def buffers(state: ZenFlowState) -> int:
    """Mails that exist in host memory at most."""
    if state.send_gradients.sums_on_device:
        return 2  # the sums of a window that is updated, and of the next one
    # Those that belong to the window that is updated or to the open one; those that are unread;
    # and, where the step writes them, the one that it writes and what is blank in the state.
    kept = min(MAILS_KEPT, 2 * longest(state.schedule.window))
    return kept + IN_FLIGHT[state.send_gradients] + (2 if state.send_gradients.in_step else 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Buffers:
    """One step's worth."""

    mail: tuple[jax.Array | None, ...]
    step_scalars: StepScalars


class Mailbox:
    """The caller's side of the mail. For one calling thread.

    Args:
        worker: Reads the mail.
        state: The state before the first step.
        number: Of the run: another one for each engine, the same in all processes.
    """

    def __init__(self, worker: Worker, state: ZenFlowState, number: int):
        self._worker = worker
        self._given = state.token
        self._token = int(read(state.token))
        # Of the first step's token, or of the checkpoint's, nothing is left from the next one on:
        # runs that start from the same weights, or go on from the same checkpoint, are different.
        self._number = number
        self._sending = state.send_gradients
        self._blank = _Buffers(state.mail, state.step_scalars)
        if self._sending.in_step:
            # A state that was read from somewhere may have them on the device.
            self._blank = jax.tree.map(in_host_memory, self._blank)
        if self._sending.sums_on_device:
            self._make_zeros = _zeros_maker(state.mail)
            self._blank.mail = ()  # the state's alone, or they would not be freed
        # Until they have been waited for here. The worker knows which are done, but at what moment
        # differs between processes, and all of them must wait at the same points (`Worker.check`).
        self._unread: deque[Mail | Sums] = deque()
        # In two windows there are two sums.
        self._most = IN_FLIGHT.get(state.send_gradients, 2 * longest(state.schedule.window) + 2)
        self._running: deque[StepScalars] = deque()  # of the steps that the device may be at
        self._last: Mail | None = None
        # The token, and its number, of the state that a flush since the last step has replaced.
        self._replaced: tuple[jax.Array, int] | None = None

    @property
    def token(self) -> int:
        """The next step's token."""
        return self._token

    def holds(self, state: ZenFlowState) -> bool:
        """Whether this is the state last given: no step was made with it since."""
        return state.token is self._given

    def replaced(self, state: ZenFlowState) -> bool:
        """Whether this is the state that the last flush was called with, or a step made from it.

        Waits for the step, if there is one and a flush was made since the step before.
        """
        if self._replaced is None:
            return False
        given, token = self._replaced
        if state.token is given:
            return True
        if self.holds(state):
            return False
        sent = jax.tree.map(read, state.step_scalars._replace(statistics=None))
        return int(sent.unpack().token) == token

    def send(self, state: ZenFlowState, step: int) -> None:
        """Hands the mail of `step` to the worker, waiting while too many are unread."""
        self._replaced = None
        while len(self._unread) >= self._most:
            self._take_back()
        token = self._token
        # Before the mail is given away: this lets go of Python's lock, for which the caller would
        # then have to wait until the worker's threads have looked at every leaf.
        self._write_token(self._number + step, state.token)
        if self._sending.sums_on_device:
            gradients = []
            self._running.append(state.step_scalars)
            if len(self._running) > AHEAD:
                jax.block_until_ready(self._running.popleft())
        else:
            gradients = _gradients(state)
        on_device = not self._sending.in_step
        self._last = Mail(step, token, gradients, state.step_scalars, on_device)
        self._post(self._last)

    def send_sums(self, state: ZenFlowState) -> ZenFlowState:
        """Where the device adds up, hands the open window's sums over; the state without them."""
        if not self._sending.sums_on_device:
            return state
        zeros = self._make_zeros(state.mail)
        self._post(Sums(_gradients(state), self._last))
        return dataclasses.replace(state, mail=zeros)

    def renew(self, state: ZenFlowState) -> ZenFlowState:
        """The state with another token, after a flush.

        Who goes on from the one that was flushed, and from its parameters, has neither the updates
        that the flush has brought nor the gradients that it has used up.
        """
        self._replaced = (self._given, self._token)
        self._write_token(self._token + 500_009, state.token)
        return dataclasses.replace(state, token=self._given)

    def refill(self, state: ZenFlowState, leaves: Sequence[LeafState]) -> ZenFlowState:
        """The state for the next step: `leaves`, buffers for its mail, and a token."""
        if any(x.is_deleted() for x in jax.tree.leaves(self._blank)):
            self._blank = jax.tree.map(zeros_like, self._blank)
        mail = state.mail if self._sending.sums_on_device else self._blank.mail
        return dataclasses.replace(
            state,
            leaves=tuple(leaves),
            mail=mail,
            token=self._given,
            step_scalars=self._blank.step_scalars,
        )

    def drain(self) -> None:
        """Waits until all mail is read, so that whatever is wrong with it is known."""
        while self._unread:
            self._take_back()

    def close(self) -> None:
        """Drops the buffers."""
        self._unread.clear()
        self._running.clear()
        self._blank = _Buffers((), StepScalars(None, None))

    def _write_token(self, number: int, like: jax.Array) -> None:
        """The next state's token, made from a number and placed as `like` is."""
        self._token = number & _POSITIVE  # never USED, which is negative
        self._given = put_everywhere(np.int32(self._token), like)

    def _post(self, mail: Mail | Sums) -> None:
        self._worker.post(mail)
        self._unread.append(mail)

    def _take_back(self) -> None:
        mail = self._unread[0]
        self._worker.wait(mail.done, mail.step_scalars if isinstance(mail, Mail) else ())
        self._unread.popleft()


def _gradients(state: ZenFlowState) -> list[jax.Array]:
    """Of each offloaded leaf."""
    return [x for x in state.mail if x is not None]


def _zeros_maker(sums: Sequence[jax.Array | None]) -> Any:
    """A program that gives zeros like arrays of the shapes and placements of `sums`."""
    # On a mesh the compiler would place what depends on nothing wherever it likes; on one device
    # arrays are bound to it as those are that the program gets.
    placed = tuple(
        x.sharding if x is not None and isinstance(x.sharding, NamedSharding) else None
        for x in sums
    )
    return jax.jit(partial(jax.tree.map, jnp.zeros_like), out_shardings=placed, keep_unused=True)
