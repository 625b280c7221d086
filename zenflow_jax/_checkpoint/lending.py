"""Arrays that others may read for a while, without a copy, and whether anybody still has them."""

import gc
import time
import weakref

import numpy as np

# How long the end of a loan waits for threads that are about to let go: those of a save that has
# failed stop only then.
GRACE_S = 20.0


class _Memory:
    """An array's memory, read-only. It lives for as long as any array that is made of it."""

    def __init__(self, x: np.ndarray):
        self._x = x
        pointer, _ = x.__array_interface__["data"]
        self.__array_interface__ = {**x.__array_interface__, "data": (pointer, True)}


class Loan:
    """What an engine has lent. For one calling thread.

    jax arrays and NumPy views keep the object that their memory is of, so a weak reference to it
    says whether any are left (checked on jax 0.10.0 to 0.11.2 and NumPy 2.1 to 2.5).
    """

    def __init__(self):
        self._ended = False
        self._lent: list[weakref.ref[_Memory]] = []

    def lend(self, x: np.ndarray) -> np.ndarray:
        """The memory of `x`, read-only."""
        memory = _Memory(x)
        self._lent.append(weakref.ref(memory))
        return np.asarray(memory)

    def end(self) -> None:
        """Waits, not for long, until nobody has any of it."""
        self._ended = True
        until = time.monotonic() + GRACE_S
        while self._in_use() and time.monotonic() < until:
            # No event: one set by a weak reference's callback can deadlock with who waits for it.
            time.sleep(0.02)

    def check(self) -> None:
        """Raises unless the loan has ended and nobody has any of it."""
        if not self._ended:
            raise RuntimeError(
                "expected no call while the engine's arrays are lent, got one. Leave the `with "
                "engine.lend()` block first: the engine would change what is being read."
            )
        if self._in_use():
            raise RuntimeError(
                "expected the arrays that the engine has lent to be out of use, got "
                f"{len(self._lent)} that are not. Wait inside of the `with engine.lend()` block "
                "until what reads them is done (a save by `wait_until_finished`), and keep no "
                "NumPy views of them."
            )

    def _in_use(self) -> bool:
        if any(memory() is not None for memory in self._lent):
            gc.collect()  # what an exception has kept in a cycle
        self._lent = [memory for memory in self._lent if memory() is not None]
        return bool(self._lent)
