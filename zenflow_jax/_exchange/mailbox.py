"""The buffers for mail, and the step tokens that prove that no mail was lost.

A step finds blank buffers for its mail in the state, and returns its mail in others, or in the same
ones if it was told to keep and donate them. `send` gives the mail to the worker, which frees it;
`refill` puts blank buffers in: as a rule the same every time, as no step reads them. With
"after_step", and with parameters in host memory, a blank buffer is one element per device, with
"per_window" zeros for the next sums.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from zenflow_jax._device.memory import in_host_memory, put_everywhere, read, zeros_like
from zenflow_jax._device.state import LeafState, ZenFlowState, cut, put
from zenflow_jax._exchange.messages import Mail, Sums
from zenflow_jax._exchange.pinned import IN_FLIGHT
from zenflow_jax._exchange.worker import Worker
from zenflow_jax._spec.groups import of_group
from zenflow_jax._spec.leaf import LeafSpec
from zenflow_jax._spec.scalars import USED, StepScalars

# With "per_window" a step's scalars may be behind the sums of a window, so `send` itself keeps
# Python at most so many steps ahead.
_AHEAD = 2
_POSITIVE = 0x7FFFFFFF


class Mailbox:
    """The caller's side of the mail. For one calling thread.

    `number` is the run's: another one for each engine, the same in all processes.
    """

    def __init__(self, worker: Worker, state: ZenFlowState, number: int):
        self._worker = worker
        self._last_token = state.token
        self._token = int(read(state.token))
        # Later tokens come from this: runs that go on from one checkpoint have different ones.
        self._number = number
        self._sending = state.send_gradients
        self._blank = state.mail, state.step_scalars
        if self._sending.in_step:
            # A state from a checkpoint may have them on the device.
            self._blank = jax.tree.map(in_host_memory, self._blank)
        if self._sending.sums_on_device:
            specs = [leaf.spec for leaf in state.leaves]
            self._take_sums = [
                _sums_taker(state.mail, of_group(specs, group))
                for group in range(state.schedule.groups)
            ]
            self._blank = (), state.step_scalars  # the state alone holds sums, which are freed
        # Whether each leaf has a blank array of its own still. A step with a branch reads blank
        # mail, and may donate each array once only; if the first donates none, like leaves share.
        self._unshared = self._sending.in_step
        # Not waited for yet. Which is done differs between processes, and all must wait at the
        # same points (`Worker.check`).
        self._unread: deque[Mail | Sums] = deque()
        # With "per_window", two windows' step scalars and two sums.
        self._most = IN_FLIGHT.get(state.send_gradients, 2 * state.schedule.longest_window + 2)
        self._running: deque[StepScalars] = deque()  # of steps that the device may still run
        self._last: Mail | None = None
        self._repeated = False  # whether the last state given has come again
        # Token, and its number, of the state that a flush has replaced since the last step.
        self._replaced: tuple[jax.Array, int] | None = None

    @property
    def token(self) -> int:
        return self._token

    def is_repeated(self, state: ZenFlowState) -> bool:
        """Whether it is the last state given, and comes for the first time since a step.

        Trainers that run their hooks again at the end pass it. So does a loop that goes on with
        what it had before its step: `check_new_step` refuses the step after it.
        """
        if self._repeated or self._last is None or state.token is not self._last_token:
            return False
        self._repeated = True
        return True

    def check_new_step(self, state: ZenFlowState) -> None:
        """Refuses a state that no step was made with since it was given, and a dropped step."""
        self._check_flushed(state)
        if state.token is self._last_token:
            raise RuntimeError(
                "expected the state of a new step, got the one that this engine returned last. "
                "Call `exchange` once after each step, with what the step returned."
            )
        if self._repeated:
            raise RuntimeError(
                "expected no step after an `exchange` of what the `exchange` before it had "
                "returned, got another step: the step between those two was dropped. Call "
                "`exchange` after each step, with what the step returned. Between a trainer's last "
                "hooks and a further training, call `flush`."
            )

    def check_between_steps(self, state: ZenFlowState, name: str) -> bool:
        """Refuses another state than the last one given; True if it is a copy of that.

        A step without an update makes a copy: a micro-batch of `optax.MultiSteps`. Waits for it.
        """
        self._check_flushed(state)
        self._repeated = False  # a flush ends a training
        if state.token is self._last_token:
            return False
        token = int(read(state.token))
        if token == self._token:
            return True
        got = (
            f"one whose step's mail has not been taken. Call `exchange` first, then `{name}`."
            if token == USED
            else f"one of another step or run. Call `{name}` with the one it returned."
        )
        raise RuntimeError(f"expected the state that the last `exchange` returned, got {got}")

    def _check_flushed(self, state: ZenFlowState) -> None:
        """Refuses the state that the last flush was called with, a copy, or a step made from it."""
        if self._replaced is None or state.token is self._last_token:
            return
        replaced, token = self._replaced
        if state.token is not replaced:
            sent = jax.tree.map(read, state.step_scalars._replace(statistics=None))
            if token not in (int(read(state.token)), int(sent.unpack().token)):
                return
        raise RuntimeError(
            "expected parameters and state that the last `flush` returned, got those that it was "
            "called with, or a step made from them: they lack the updates that it has brought. Go "
            "on with `params, opt_state = engine.flush(params, opt_state)`."
        )

    def send(self, state: ZenFlowState, step: int) -> None:
        """Hands the mail of `step` to the worker, waiting while too many are unread."""
        self._replaced = None
        while len(self._unread) >= self._most:
            self._take_back()
        token = self._token
        # Before the mail is given away: this lets go of Python's lock, and the caller would get it
        # back only when the worker's threads have looked at every leaf.
        self._make_token(self._number + step, state.token)
        if self._sending.sums_on_device:
            gradients = []
            self._running.append(state.step_scalars)
            if len(self._running) > _AHEAD:
                jax.block_until_ready(self._running.popleft())
        else:
            gradients = [x for x in state.mail if x is not None]
        on_device = not self._sending.in_step
        self._last = Mail(step, token, gradients, state.step_scalars, on_device)
        self._post(self._last)

    def send_sums(self, state: ZenFlowState, group: int) -> ZenFlowState:
        """Hands over a group's sums with "per_window"; the state with zeros in their place."""
        if not self._sending.sums_on_device:
            return state
        sums, rests = self._take_sums[group](state.mail)
        self._post(Sums(group, sums, self._last))
        return state._replace(mail=tuple(rests.get(i, x) for i, x in enumerate(state.mail)))

    def renew(self, state: ZenFlowState) -> ZenFlowState:
        """The state with a new token, after a flush: nobody can go on from the old one."""
        self._replaced = (self._last_token, self._token)
        self._make_token(self._token + 500_009, state.token)
        return state._replace(token=self._last_token)

    def refill(self, state: ZenFlowState, leaves: Sequence[LeafState]) -> ZenFlowState:
        """The state for the next step: `leaves`, buffers for its mail, and a token."""
        if any(x.is_deleted() for x in jax.tree.leaves(self._blank)):
            self._blank = jax.tree.map(zeros_like, self._blank)
        elif self._unshared:
            self._blank = _alike_once(self._blank)
        self._unshared = False
        mail, step_scalars = self._blank
        if self._sending.sums_on_device:
            mail = state.mail
        return state._replace(
            leaves=tuple(leaves), mail=mail, token=self._last_token, step_scalars=step_scalars
        )

    def drain(self) -> None:
        """Waits until all mail is read, so that any error in it is known."""
        while self._unread:
            self._take_back()

    def close(self) -> None:
        self._unread.clear()
        self._running.clear()
        self._blank = (), StepScalars(None, None)

    def _make_token(self, number: int, like: jax.Array) -> None:
        """The next state's token, made from a number and placed as `like` is."""
        self._token = number & _POSITIVE  # never USED, which is negative
        (self._last_token,) = put_everywhere([np.int32(self._token)], like.shape, like.sharding)

    def _post(self, mail: Mail | Sums) -> None:
        self._worker.post(mail)
        self._unread.append(mail)

    def _take_back(self) -> None:
        mail = self._unread[0]
        self._worker.wait(mail.done, mail.step_scalars if isinstance(mail, Mail) else ())
        self._unread.popleft()


def _alike_once(blank: Any) -> Any:
    """The buffers with one array for all that are alike: a model has many leaves of few shapes."""
    shared: dict[Any, jax.Array] = {}
    return jax.tree.map(lambda x: shared.setdefault((x.shape, x.dtype, x.sharding), x), blank)


def _sums_taker(mail: Sequence[Any], specs: Mapping[int, LeafSpec]) -> Any:
    """A function that takes a group's sums out of a state's mail.

    It returns the sums, and the leaves' arrays with zeros in their places, by number; `specs` are
    by number, too. Sums of whole leaves are not donated: a state that was exchanged is to be
    refused by name if it makes a step, and a donated array would end that step with an error of
    XLA's.
    """
    ranges = {i: spec for i, spec in specs.items() if spec.start is not None}
    # On a mesh the compiler would place zeros wherever it likes, as they depend on nothing. On one
    # device they are committed if the program's argument is, which zeros do not read.
    shardings = {i: mail[i].sharding for i in specs}
    placed = {i: x if isinstance(x, NamedSharding) else None for i, x in shardings.items()}

    def split(of_ranges: dict[int, Any], whole: dict[int, Any]) -> tuple[dict, dict]:
        parts = {i: cut(x, ranges[i]) for i, x in of_ranges.items()}
        rests = {i: put(of_ranges[i], jnp.zeros_like(x), ranges[i]) for i, x in parts.items()}
        return parts, rests | {i: jnp.zeros_like(x) for i, x in whole.items()}

    out_shardings = ({i: placed[i] for i in ranges}, placed)
    program = jax.jit(split, out_shardings=out_shardings, donate_argnums=0, keep_unused=True)

    def take(mail: Sequence[Any]) -> tuple[list[jax.Array], dict[int, jax.Array]]:
        whole = {i: mail[i] for i in specs if i not in ranges}
        parts, rests = program({i: mail[i] for i in ranges}, whole)
        sums = whole | parts
        return [sums[i] for i in specs], rests

    return take
