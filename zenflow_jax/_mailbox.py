"""Who has which buffers for mail, and the tickets that prove that none was lost.

A step writes its mail into buffers that ride in the state. `send` takes them out and gives them to
the worker; `refill` puts others in, read ones where there are any, so that pinned memory is
allocated a few times only and, where the user's step donates the state, written in place.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence

import jax
import numpy as np

from zenflow_jax._placement import host_zeros, mail_rank
from zenflow_jax._state import LeafState, Letter, ZenFlowState
from zenflow_jax._worker import Mail, Worker

#: Mails that may be unread, which bounds pinned memory and lets Python run ahead of the device.
IN_FLIGHT = 2
#: Mails that exist at most: unread ones, the buffers in the state, and what the step writes.
BUFFERS = IN_FLIGHT + 2


@dataclasses.dataclass
class _Buffers:
    """One step's worth, in pinned host memory."""

    gradients: list[jax.Array]
    letter: Letter


class Mailbox:
    """The caller's side of the mail. For one calling thread.

    Args:
        worker: Reads the mail.
        state: The state before the first step.
    """

    def __init__(self, worker: Worker, state: ZenFlowState):
        self._worker = worker
        self._rank = mail_rank([leaf.spec for leaf in state.leaves])
        self._ticket = self._run = int(state.ticket)  # a number of this run's own
        self._given = state.letter
        self._unread: deque[tuple[Mail, _Buffers]] = deque()
        self._read: list[_Buffers] = []

    def holds(self, state: ZenFlowState) -> bool:
        """Whether this is the state last given: no step was made with it since."""
        return state.letter.ints is self._given.ints

    def send(self, state: ZenFlowState, step: int) -> None:
        """Hands the mail of `step` to the worker, waiting while too many are unread."""
        while len(self._unread) >= IN_FLIGHT:
            self._take_back()
        buffers = _Buffers(
            [leaf.mail for leaf in state.leaves if leaf.mail is not None], state.letter
        )
        mail = Mail(step, self._ticket, buffers.gradients, buffers.letter)
        self._worker.post(mail)
        self._unread.append((mail, buffers))

    def refill(self, state: ZenFlowState, leaves: Sequence[LeafState], step: int) -> ZenFlowState:
        """The state for the step after `step`: `leaves`, buffers for its mail, and a ticket."""
        while self._unread and self._unread[0][0].done.done():
            self._take_back()
        buffers = self._read.pop() if self._read else self._allocate(state)
        # Where jit drops the buffers as unused arguments, which it does unless told otherwise, the
        # step's mail is in new ones: keeping every old one would let them pile up.
        self._read.clear()
        gradients = iter(buffers.gradients)
        self._given = buffers.letter
        self._ticket = (self._run + step) & 0x7FFFFFFF  # never USED, which is negative
        return dataclasses.replace(
            state,
            leaves=tuple(
                leaf if leaf.mail is None else dataclasses.replace(leaf, mail=next(gradients))
                for leaf in leaves
            ),
            letter=buffers.letter,
            ticket=jax.device_put(np.int32(self._ticket), state.ticket.sharding),
        )

    def drain(self) -> None:
        """Waits until all mail is read, so that whatever is wrong with it is known."""
        while self._unread:
            self._take_back()

    def _take_back(self) -> None:
        mail, buffers = self._unread[0]
        self._worker.wait(mail.done, buffers.letter)
        self._unread.popleft()
        self._read.append(buffers)

    def _allocate(self, state: ZenFlowState) -> _Buffers:
        return _Buffers(
            [
                host_zeros(leaf.spec.shape, leaf.spec.dtype, self._rank, leaf.scores)
                for leaf in state.leaves
                if leaf.mail is not None
            ],
            Letter(*(host_zeros(x.shape, x.dtype, self._rank, state.step) for x in state.letter)),
        )
