"""What is lost if an engine ends or is interrupted."""

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future

_logger = logging.getLogger("zenflow_jax")

INTERRUPTED = (
    "The engine's last call was interrupted, so parameters, state and host no longer match. Resume "
    "from the last checkpoint."
)
_UPDATES_LOST = (
    "The engine's last updates never reached the parameters. Call `params, opt_state = "
    "engine.flush(params, opt_state)` after the last step, before the engine ends."
)


class Lifecycle:
    """Knows what is lost if an engine ends, from the calls that have completed.

    An `exchange` or `flush` begins a new moment when it completes. A save belongs to the moment of
    its call, and counts until it fails, because it may still be running when the engine ends.
    """

    def __init__(self, pending: Mapping[int, object]):
        self._pending = pending
        self.interrupted = False  # whether a call ended between parameters, state and host
        self.told = False  # whether the end was reported; only once
        self._flushed = True  # whether the last call was a `flush`; a new engine has lost nothing
        self.saves: list[Future] = []  # of this moment; a save that fails cancels its future

    @contextlib.contextmanager
    def change(self, *, flushes: bool = False) -> Iterator[None]:
        """Begins a new moment if the block completes; otherwise, the run has ended.

        The block includes the caller's `return`, because results that do not arrive are lost.
        """
        self.interrupted = True
        yield
        self._flushed, self.saves = flushes, []
        self.interrupted = False

    @property
    def lost(self) -> str | None:
        """Describes a loss of updates; None if the last call was a completed `flush`."""
        if self.interrupted:
            return INTERRUPTED
        return _UPDATES_LOST if self._pending and not self._flushed else None

    def warn(self, error: BaseException | None = None) -> None:
        """Logs the loss once, unless the training ends with `error` or an exception in progress."""
        saved = any(not written.cancelled() for written in self.saves)
        told, self.told = self.told, True
        if self.lost and not (told or saved or error or sys.exc_info()[0]):
            _logger.warning(self.lost)
