"""The buffers for mail.

A step gets placeholder buffers for its mail in the state, and returns mail in new buffers, or in
the same buffers if it donates them. `send` gives the mail to the worker, which frees it; `refill`
puts placeholders back, usually the same buffers every time, because no step reads them. With
"after_step", a placeholder is one element per device.
"""

from collections import deque
from typing import Any

import jax

from zenflow_jax._device.memory import zeros_like
from zenflow_jax._device.state import Leaves, ZenFlowState
from zenflow_jax._exchange.messages import Mail
from zenflow_jax._exchange.pinned import IN_FLIGHT
from zenflow_jax._exchange.tokens import Tokens
from zenflow_jax._exchange.worker import Worker
from zenflow_jax._spec.scalars import StepScalars


class Mailbox:
    """Sends mail from the caller's side. Must be used from one thread only."""

    def __init__(self, worker: Worker, state: ZenFlowState, tokens: Tokens):
        self._worker, self._tokens = worker, tokens
        self._sending = state.send_gradients
        self._placeholders = state.mail, state.step_scalars
        # Whether each leaf still owns its placeholder. A step with a branch reads placeholders, and
        # may donate each array only once. If the first step donates nothing, similar leaves share
        # an array.
        self._unshared = self._sending.in_step
        # Mail not yet waited for. The order of completion differs between processes, but all must
        # wait at the same points (`Worker.check`).
        self._unread: deque[Mail] = deque()

    def send(self, state: ZenFlowState, step: int) -> None:
        """Hands the mail of `step` to the worker; waits while too many steps' mail is unread."""
        while len(self._unread) >= IN_FLIGHT[self._sending]:
            self._take_back()
        # Call this before posting the mail: it releases the GIL, and after posting, the caller
        # would get the GIL back only when the worker's threads have visited every leaf.
        token = self._tokens.advance(step, state.token)
        gradients = [x for x in state.mail if x is not None]
        mail = Mail(step, token, gradients, state.step_scalars, not self._sending.in_step)
        self._worker.post(mail)
        self._unread.append(mail)

    def refill(self, state: ZenFlowState, leaves: Leaves) -> ZenFlowState:
        """Returns the state for the next step: `leaves`, buffers for its mail, and a token."""
        if any(x.is_deleted() for x in jax.tree.leaves(self._placeholders)):
            self._placeholders = jax.tree.map(zeros_like, self._placeholders)
        elif self._unshared:
            # One array for all similar leaves: a model has many leaves but few shapes.
            shared: dict[Any, jax.Array] = {}
            self._placeholders = jax.tree.map(
                lambda x: shared.setdefault((x.shape, x.dtype, x.sharding), x), self._placeholders
            )
        self._unshared = False
        mail, step_scalars = self._placeholders
        return state._replace(
            leaves=state.leaves.replace(leaves),
            mail=mail,
            token=self._tokens.last,
            step_scalars=step_scalars,
        )

    def drain(self) -> None:
        """Waits until all mail is read, so that errors in it surface."""
        while self._unread:
            self._take_back()

    def close(self) -> None:
        self._unread.clear()
        self._placeholders = (), StepScalars(None, None)

    def _take_back(self) -> None:
        mail = self._unread[0]
        self._worker.wait(mail.done, mail.step_scalars)
        self._unread.popleft()
