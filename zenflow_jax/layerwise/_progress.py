"""Decides on the device which steps count, and by how much their gradients are clipped.

Python reads a step's verdict only after the next step, so the device never waits for it.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zenflow_jax._device.memory import put_everywhere
from zenflow_jax.layerwise._optimizer import Control

#: The weight of older steps in the running mean of a block's share of the squared norm.
_MEMORY = 0.9


class Progress(NamedTuple):
    """Counts over all steps, and each block's usual share of a squared gradient norm."""

    counted: Any
    skipped: Any
    in_a_row: Any  # steps skipped since the last step that counted
    shares: Any  # float32, zero for frozen blocks


def new_progress(sizes: Sequence[int], saved: Mapping[str, Any], everywhere: Any) -> Progress:
    """Returns a run's first progress, on all devices, from its blocks' sizes or saved counts."""
    shares = np.array(sizes, np.float32) / max(sum(sizes), 1)
    values = [
        *(np.array(saved.get(name, 0), np.int32) for name in Progress._fields[:3]),
        np.asarray(saved.get("shares", shares), np.float32),
    ]
    return Progress(*(put_everywhere(x, x.shape, everywhere) for x in values))


class Judge:
    """The programs for a step's decisions; all arguments and results stay on the device."""

    def __init__(self, max_grad_norm: float | None, options: dict[str, Any] | None):
        jit: Any = partial(jax.jit, compiler_options=options)

        def factor_of(squares: Any) -> Any:
            if max_grad_norm is None:
                return jnp.float32(1)
            return jnp.minimum(1, max_grad_norm / jnp.maximum(jnp.sqrt(squares), max_grad_norm))

        @jit
        def begin(loss: Any) -> tuple[Control, tuple[Any, Any]]:
            """Returns the first control of a step with updates during its backward pass.

            The pair is the squares and the share of the blocks whose gradients are known.
            """
            control = Control(jnp.float32(1), jnp.isfinite(loss), jnp.int32(0))
            return control, (jnp.float32(0), jnp.float32(0))

        @jit
        def project(
            control: Control, known: tuple[Any, Any], shares: Any, squares: Any, block: Any
        ) -> tuple[Control, tuple[Any, Any]]:
            """Returns a block's control, from the known squares over their earlier share."""
            known = known[0] + squares, known[1] + shares[block]
            is_first = control.counts & ~jnp.isfinite(squares) & (control.report == 0)
            report = jnp.where(is_first, -1 - block, control.report)
            factor = factor_of(known[0] / jnp.maximum(known[1], 1e-6))
            return Control(factor, control.counts, report), known

        @jit
        def decide(all_squares: Sequence[Any]) -> Control:
            """Returns the exact control, for updates after the backward pass."""
            total = sum(all_squares, jnp.float32(0))
            return Control(factor_of(total), jnp.isfinite(total), jnp.int32(0))

        @jit
        def conclude(
            progress: Progress, control: Control, squares: Mapping[int, Any]
        ) -> tuple[Progress, Any]:
            """Ends a step; the verdict is (skipped, skipped in a row, report)."""
            counts = control.counts.astype(jnp.int32)
            in_a_row = (progress.in_a_row + 1) * (1 - counts)
            shares = progress.shares
            if squares:
                values = [squares.get(i, jnp.float32(0)) for i in range(shares.size)]
                new = jnp.stack(values) / sum(values)
                shares = jnp.where(
                    control.counts & jnp.all(jnp.isfinite(new)),
                    _MEMORY * shares + (1 - _MEMORY) * new,
                    shares,
                )
            skipped = progress.skipped + 1 - counts
            new_progress = Progress(progress.counted + counts, skipped, in_a_row, shares)
            return new_progress, jnp.stack([skipped, in_a_row, control.report])

        self.begin, self.project, self.decide, self.conclude = begin, project, decide, conclude
