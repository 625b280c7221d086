"""Who has which buffers for mail, and the tickets that prove that none was lost.

A step finds buffers for its mail in the state and returns its mail in others, or in the same ones
where it was told to keep and donate them. `send` takes the mail out and gives it to the worker;
`refill` puts buffers in. As a rule those are the same blank ones every time: no step reads them,
jit drops arguments that are not read, and what is not used up can be given again. What was mailed
is freed by the worker once it is read: freeing an array takes 30 us, which the caller has not.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence

import jax
import numpy as np

from zenflow_jax._placement import put_everywhere, zeros_like
from zenflow_jax._state import LeafState, Letter, ZenFlowState
from zenflow_jax._worker import Mail, Worker

#: Mails that may be unread, which bounds pinned memory and lets Python run ahead of the device.
IN_FLIGHT = 2
#: Mails that exist at most: unread ones, the buffers in the state, and what the step writes.
BUFFERS = IN_FLIGHT + 2
_POSITIVE = 0x7FFFFFFF


@jax.tree_util.register_dataclass
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
        number: Of the engine, among those of this process.
    """

    def __init__(self, worker: Worker, state: ZenFlowState, number: int):
        self._worker = worker
        self._given = state.ticket
        self._ticket = int(state.ticket)
        # Runs that start from the same weights have the same first ticket, so the engine's number
        # takes part from the second on. It is the same on every process and in every repetition.
        self._run = self._ticket + 1_000_003 * number
        self._blank = _buffers_of(state)
        self._unread: deque[Mail] = deque()

    @property
    def numbers(self) -> tuple[int, int]:
        """What tickets are made from, and the next step's ticket."""
        return self._run & _POSITIVE, self._ticket

    def resume(self, run: int) -> None:
        """Makes the tickets that another mailbox with this number would have made."""
        self._run = run

    def holds(self, state: ZenFlowState) -> bool:
        """Whether this is the state last given: no step was made with it since."""
        return state.ticket is self._given

    def send(self, state: ZenFlowState, step: int) -> None:
        """Hands the mail of `step` to the worker, waiting while too many are unread."""
        while len(self._unread) >= IN_FLIGHT:
            self._take_back()
        buffers = _buffers_of(state)
        mail = Mail(step, self._ticket, buffers.gradients, buffers.letter)
        self._worker.post(mail)
        self._unread.append(mail)

    def refill(self, state: ZenFlowState, leaves: Sequence[LeafState], step: int) -> ZenFlowState:
        """The state for the step after `step`: `leaves`, buffers for its mail, and a ticket."""
        if any(x.is_deleted() for x in jax.tree.leaves(self._blank)):
            self._blank = jax.tree.map(zeros_like, self._blank)
        gradients = iter(self._blank.gradients)
        self._ticket = (self._run + step) & _POSITIVE  # never USED, which is negative
        self._given = put_everywhere(np.int32(self._ticket), state.ticket)
        return dataclasses.replace(
            state,
            leaves=tuple(
                leaf if leaf.mail is None else dataclasses.replace(leaf, mail=next(gradients))
                for leaf in leaves
            ),
            letter=self._blank.letter,
            ticket=self._given,
        )

    def drain(self) -> None:
        """Waits until all mail is read, so that whatever is wrong with it is known."""
        while self._unread:
            self._take_back()

    def close(self) -> None:
        """Drops the buffers."""
        self._unread.clear()
        self._blank = _Buffers([], Letter(None, None))

    def _take_back(self) -> None:
        mail = self._unread[0]
        self._worker.wait(mail.done, mail.letter)
        self._unread.popleft()


def _buffers_of(state: ZenFlowState) -> _Buffers:
    return _Buffers([x.mail for x in state.leaves if x.mail is not None], state.letter)
