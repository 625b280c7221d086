"""The order of a step's updates: during the backward pass, or after it.

A block's updates need its gradient and weights, which are on the device after its backward program,
and its state, which must come. jax's copies to the device wait for the programs that were
dispatched before them, because they may reuse the programs' memory. So state is fetched before the
program that hides the fetch, and updates follow that program.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zenflow_jax._checkpoint.saving import Snapshot
from zenflow_jax._device.memory import HOST
from zenflow_jax.layerwise._blocks import Block, Bundle
from zenflow_jax.layerwise._optimizer import Control
from zenflow_jax.layerwise._progress import Judge, Progress
from zenflow_jax.layerwise._transfers import InFlight, large_moved

#: The maximum number of layers whose programs or gradients are in flight.
AHEAD = 2


class Updates:
    """Updates the blocks of a step; subclasses decide when.

    A step calls `begin`, then for each block, from the last, `before_program` and `after_program`
    around its backward program, then `end`.
    """

    def __init__(self, blocks: Sequence[Block], judge: Judge, in_flight_bytes: int):
        self._blocks, self._judge = blocks, judge
        self._in_flight = InFlight(in_flight_bytes)
        self.snapshots: list[Snapshot] = []  # saves that may still be running
        self.bytes_to_host = self.bytes_to_device = 0  # on one device

    def _update(
        self, block: Block, bundle: Bundle, arrays: Any, gradient: Any, control: Control
    ) -> Control:
        """Updates a bundle, from its `flat` arrays on the device; returns the new control."""
        for snapshot in self.snapshots:
            if not snapshot.done:  # waits only if the save may not keep more old arrays
                snapshot.before_write(int(bundle.number), lambda: False)
        copies, report = block.update(bundle, arrays, gradient, control)
        self._in_flight.leave(bundle.nbytes, copies)
        self.bytes_to_host += bundle.nbytes
        return control._replace(report=report)


class DuringBackward(Updates):
    """Updates a block after the next block's backward program has been dispatched."""

    def begin(self, loss: jax.Array, progress: Progress) -> None:
        self._progress = progress
        self._control, self._so_far = self._judge.begin(loss)
        self._squares: dict[int, jax.Array] = {}
        # The block whose updates come next, its gradient, weights and clipping factor.
        self._waiting: tuple[Block, list[Any], list[Any], Any] | None = None
        self._early: deque[list[jax.Array]] = deque()  # state that was fetched ahead

    def before_program(self) -> None:
        if self._waiting is None:
            return
        block, size = self._waiting[0], 0
        for bundle in block.bundles:
            size += bundle.nbytes
            if not self._in_flight.fits_half(size):  # the other half may be leaving
                break
            self._early.append(self._fetch(block, bundle))

    def after_program(
        self, i: int, gradient: list[Any] | None, squares: Any, weights: list[Any]
    ) -> None:
        self._update_waiting()
        if gradient is None:
            return
        self._squares[i] = squares
        shares = self._progress.shares
        self._control, self._so_far = self._judge.project(
            self._control, self._so_far, shares, squares, np.int32(i)
        )
        self._waiting = self._blocks[i], gradient, weights, self._control.factor

    def end(self) -> tuple[Progress, jax.Array]:
        """Returns the new progress, and the step's verdict."""
        self.before_program()
        self._update_waiting()
        squares, self._squares = self._squares, {}
        return self._judge.conclude(self._progress, self._control, squares)

    def _update_waiting(self) -> None:
        if self._waiting is None:
            return
        block, gradient, weights, factor = self._waiting
        self._waiting = None
        for bundle in block.bundles:
            others = self._early.popleft() if self._early else self._fetch(block, bundle)
            # Emptying the lists frees the device's memory.
            arrays, g = [*_taken(weights, bundle), *others], _taken(gradient, bundle)
            control = self._control._replace(factor=factor)
            self._control = self._update(block, bundle, arrays, g, control)
            del others, arrays, g

    def _fetch(self, block: Block, bundle: Bundle) -> list[jax.Array]:
        """Starts to fetch the arrays that only an update reads."""
        self._in_flight.admit(bundle.nbytes)
        self.bytes_to_device += bundle.nbytes - bundle.weights_nbytes
        count = len(bundle.places)
        return large_moved(block.arrays(bundle)[count:], bundle.large[count:], "device")


class AfterBackward(Updates):
    """Updates all blocks when all gradients are known, in the order in which a step needs them."""

    def begin(self, loss: jax.Array, progress: Progress) -> None:
        del loss
        self._progress = progress
        self._mails: dict[int, tuple[list[Any], jax.Array]] = {}
        self._leaving: deque[list[jax.Array]] = deque()

    def before_program(self) -> None:
        pass

    def after_program(
        self, i: int, gradient: list[Any] | None, squares: Any, weights: list[Any]
    ) -> None:
        del weights
        if gradient is None:
            return
        while len(self._leaving) >= AHEAD:  # a slow bus would keep gradients on the device
            jax.block_until_ready(self._leaving.popleft())
        mail = large_moved(gradient, self._blocks[i].large, HOST)
        self.bytes_to_host += self._blocks[i].weights_nbytes
        self._leaving.append(mail)
        self._mails[i] = mail, squares

    def end(self) -> tuple[Progress, jax.Array]:
        control = self._judge.decide([squares for _, squares in self._mails.values()])
        self._leaving.clear()
        for i in sorted(self._mails):
            block, (mail, _) = self._blocks[i], self._mails.pop(i)
            for bundle in block.bundles:
                self._in_flight.admit(bundle.nbytes)
                self.bytes_to_device += bundle.nbytes + bundle.weights_nbytes
                sent, count = _taken(mail, bundle), len(bundle.places)
                large = [*bundle.large[:count], *bundle.large]  # the gradient is like the weights
                arrays = large_moved([*sent, *block.arrays(bundle)], large, "device")
                control = self._update(block, bundle, arrays[count:], arrays[:count], control)
        return self._judge.conclude(self._progress, control, {})


def _taken(arrays: list[Any], bundle: Bundle) -> list[jax.Array]:
    """Takes a bundle's arrays out of a block's list."""
    taken = [arrays[i] for i in bundle.places]
    for i in bundle.places:
        arrays[i] = None
    return taken
