"""Raises, in words, when something other than zenflow has changed the parameters."""

from collections import deque
from collections.abc import Sequence

import numpy as np
from jaxtyping import Array

from zenflow_jax._device.leaves import some


class Doubts:
    """Counts of changed samples of some leaves, which device programs make; read late.

    All processes have the same counts, so the same call raises in each. For one thread.
    """

    def __init__(self) -> None:
        #: What is wrong, in words; empty until it is read.
        self.known = ""
        self._unread: deque[tuple[int, Sequence[str], Array]] = deque()

    def add(self, step: int, names: Sequence[str], counts: Array) -> None:
        """Takes counts, int32 `(leaves,)`, of the parameters after a step."""
        self._unread.append((step, names, counts))

    def check(self, until: int) -> None:
        """Reads the counts of the steps up to `until`; waits for them.

        Raises:
            RuntimeError: If any of them, or of those read before, is not zero.
        """
        while not self.known and self._unread and self._unread[0][0] <= until:
            step, names, counts = self._unread.popleft()
            found = np.asarray(counts)  # every device has them all
            if np.count_nonzero(found):
                changed = [name for name, count in zip(names, found, strict=True) if count]
                self.known = _words(step, changed)
        if self.known:
            raise RuntimeError(self.known)


def _words(step: int, names: Sequence[str]) -> str:
    return (
        f"expected parameters that nothing but zenflow changes, got other values of {some(names)} "
        f"after step {step}. On deferred channels its next update undoes such changes, and with "
        "them the run is not what its settings say. Give each step the parameters that the last "
        "`exchange` or `flush` returned, and apply updates by `optax.apply_updates`, as rounded to "
        "a leaf's dtype they are others. Let zenflow be the last of its chain: what "
        "acts on gradients belongs in front, a rate that something else decides "
        "(`optax.contrib.reduce_on_plateau`) into `learning_rate` by `optax.inject_hyperparams`, "
        "what is not to be trained out of it by `optax.partition`; keep averages of the weights "
        "(`optax.ema`, `optax.lookahead`) outside. For weights that are clipped, loaded or reset "
        "in mid-run call `flush`, change them, and go on with a new `tx.init(params)` and a new "
        "engine. This engine takes no more steps."
    )
