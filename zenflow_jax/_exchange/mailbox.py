"""The buffers for mail.

A step gets placeholder buffers for its mail in the state, and returns mail in new buffers, or in
the same buffers if it donates them. `send` gives the mail to the worker, which frees it; `refill`
puts placeholders back, usually the same buffers every time, because no step reads them. With
"after_step", a placeholder is one element per device; with "per_window", it is zeros for the next
sums.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from zenflow_jax._device.memory import zeros_like
from zenflow_jax._device.state import Leaves, ZenFlowState, cut, put
from zenflow_jax._exchange.checks import Tokens
from zenflow_jax._exchange.messages import Mail, Sums
from zenflow_jax._exchange.pinned import IN_FLIGHT
from zenflow_jax._exchange.worker import Worker
from zenflow_jax._spec.groups import group_specs
from zenflow_jax._spec.leaf import LeafSpec
from zenflow_jax._spec.scalars import StepScalars

# The maximum number of steps that Python may run ahead with "per_window". `send` itself enforces
# it, because a step's scalars may queue behind a window's sums.
_STEPS_AHEAD = 2


class Mailbox:
    """Sends mail from the caller's side. Must be used from one thread only."""

    def __init__(self, worker: Worker, state: ZenFlowState, tokens: Tokens):
        self._worker, self._tokens = worker, tokens
        self._sending = state.send_gradients
        self._placeholders = state.mail, state.step_scalars
        if self._sending.sums_on_device:
            specs = [leaf.spec for leaf in state.leaves]
            self._take_sums = [
                _sums_taker(state.mail, group_specs(specs, group))
                for group in range(state.schedule.groups)
            ]
            self._placeholders = (), state.step_scalars  # sums belong to the state alone
        # Whether each leaf still owns its placeholder. A step with a branch reads placeholders, and
        # may donate each array only once. If the first step donates nothing, similar leaves share
        # an array.
        self._unshared = self._sending.in_step
        # Mail not yet waited for. The order of completion differs between processes, but all must
        # wait at the same points (`Worker.check`).
        self._unread: deque[Mail | Sums] = deque()
        # With "per_window", two windows' step scalars and two sums.
        self._most = IN_FLIGHT.get(state.send_gradients, 2 * state.schedule.longest_window + 2)
        self._running: deque[StepScalars] = deque()  # scalars of steps that may be running
        self._last: Mail | None = None

    def send(self, state: ZenFlowState, step: int) -> None:
        """Hands the mail of `step` to the worker; waits while too many mails are unread."""
        while len(self._unread) >= self._most:
            self._take_back()
        # Call this before posting the mail: it releases the GIL, and after posting, the caller
        # would get the GIL back only when the worker's threads have visited every leaf.
        token = self._tokens.advance(step, state.token)
        if self._sending.sums_on_device:
            gradients = []
            self._running.append(state.step_scalars)
            if len(self._running) > _STEPS_AHEAD:
                jax.block_until_ready(self._running.popleft())
        else:
            gradients = [x for x in state.mail if x is not None]
        on_device = not self._sending.in_step
        self._last = Mail(step, token, gradients, state.step_scalars, on_device)
        self._post(self._last)

    def send_sums(self, state: ZenFlowState, group: int) -> ZenFlowState:
        """Sends a group's sums with "per_window"; returns the state with zeros in their place."""
        if not self._sending.sums_on_device:
            return state
        sums, rests = self._take_sums[group](state.mail)
        self._post(Sums(group, sums, self._last))
        return state._replace(mail=tuple(rests.get(i, x) for i, x in enumerate(state.mail)))

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
        if self._sending.sums_on_device:
            mail = state.mail
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
        self._running.clear()
        self._placeholders = (), StepScalars(None, None)

    def _post(self, mail: Mail | Sums) -> None:
        self._worker.post(mail)
        self._unread.append(mail)

    def _take_back(self) -> None:
        mail = self._unread[0]
        self._worker.wait(mail.done, mail.step_scalars if isinstance(mail, Mail) else ())
        self._unread.popleft()


def _sums_taker(mail: Sequence[Any], specs: Mapping[int, LeafSpec]) -> Any:
    """Returns a function that extracts a group's sums from a state's mail.

    The function returns the sums, and the leaves' arrays with zeros in their places, by leaf
    number; `specs` is also keyed by leaf number. Sums of whole leaves are not donated, so that a
    step from an old state raises a clear error instead of XLA's.
    """
    ranges = {i: spec for i, spec in specs.items() if spec.start is not None}
    # Zeros do not depend on an input, so on a mesh the compiler could place them anywhere. On one
    # device, they are committed if the program's unused argument is committed.
    shardings = {i: mail[i].sharding for i in specs}
    placed = {i: x if isinstance(x, NamedSharding) else None for i, x in shardings.items()}

    def split(range_arrays: dict[int, Any], whole: dict[int, Any]) -> tuple[dict, dict]:
        parts = {i: cut(x, ranges[i]) for i, x in range_arrays.items()}
        rests = {i: put(range_arrays[i], jnp.zeros_like(x), ranges[i]) for i, x in parts.items()}
        return parts, rests | {i: jnp.zeros_like(x) for i, x in whole.items()}

    out_shardings = ({i: placed[i] for i in ranges}, placed)
    program = jax.jit(split, out_shardings=out_shardings, donate_argnums=0, keep_unused=True)

    def take(mail: Sequence[Any]) -> tuple[list[jax.Array], dict[int, jax.Array]]:
        whole = {i: mail[i] for i in specs if i not in ranges}
        parts, rests = program({i: mail[i] for i in ranges}, whole)
        sums = whole | parts
        return [sums[i] for i in specs], rests

    return take
