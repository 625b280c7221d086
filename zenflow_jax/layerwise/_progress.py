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
    shares: Any  # float32


def new_progress(sizes: Sequence[int], saved: Mapping[str, Any], everywhere: Any) -> Progress:
    """Returns a run's first progress, on all devices, from its blocks' sizes or saved counts."""
    shares = np.array(sizes, np.float32) / max(sum(sizes), 1)
    values = [
        *(np.array(saved.get(name, 0), np.int32) for name in Progress._fields[:2]),
        np.asarray(saved.get("shares", shares), np.float32),
    ]
    return Progress(*(put_everywhere(x, x.shape, everywhere) for x in values))


class Judge:
    """The programs for a step's decisions; all arguments and results stay on the device.

    `at_once` is whether blocks are updated before other blocks' gradients are known.
    """

    def __init__(
        self, max_grad_norm: float | None, options: dict[str, Any] | None, *, at_once: bool
    ):
        jit: Any = partial(jax.jit, compiler_options=options)

        @jit
        def begin(loss: Any, shares: Any) -> Control:
            """Returns the first control of a step."""
            return Control(jnp.float32(1), jnp.isfinite(loss), jnp.int32(0), jnp.zeros_like(shares))

        @jit
        def note(control: Control, shares: Any, squares: Any, block: Any) -> Control:
            """Returns the control after a block's backward program; higher blocks came before."""
            factor, counts, report, known = control
            finite, known = jnp.isfinite(squares), known.at[block].set(squares)
            total = jnp.sum(known)
            if at_once:  # projects the norm from the earlier share of these blocks
                total /= jnp.maximum(jnp.sum(shares, where=jnp.arange(shares.size) >= block), 1e-6)
                report = jnp.where(counts & ~finite & (report == 0), -1 - block, report)
            else:
                counts &= jnp.isfinite(total)
            if max_grad_norm is not None:
                factor = max_grad_norm / jnp.maximum(jnp.sqrt(total), max_grad_norm)
            return Control(factor, counts, report, known)

        @jit
        def conclude(progress: Progress, control: Control) -> tuple[Progress, Any]:
            """Ends a step; the verdict is (skipped, report)."""
            counts = control.counts.astype(jnp.int32)
            new = control.squares / jnp.sum(control.squares)
            shares = jnp.where(
                control.counts & jnp.all(jnp.isfinite(new)),
                _MEMORY * progress.shares + (1 - _MEMORY) * new,
                progress.shares,
            )
            skipped = progress.skipped + 1 - counts
            new_progress = Progress(progress.counted + counts, skipped, shares)
            return new_progress, jnp.stack([skipped, control.report])

        self.begin, self.note, self.conclude = begin, note, conclude
