"""Decides on the device which steps count, and by how much their gradients are clipped.

Python reads a step's verdict only after the next step, so the device never waits for it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from zenflow_jax._device.memory import put_everywhere

#: The names of the numbers that a run resumes with.
SAVED = "counted", "skipped", "shares"
#: The weight of older steps in the running mean of a block's share of the squared norm.
_MEMORY = 0.9


class Progress(NamedTuple):
    """Counts over all steps, and scalars of one step; they never leave the device."""

    counted: Any
    skipped: Any
    shares: Any  # float32: each block's usual share of a squared gradient norm
    factor: Any  # the clipping factor
    counts: Any  # bool: whether the step counts; otherwise updates change nothing
    # int32: 0; or 1 + the first leaf whose update is not finite; or -1 - the first block whose
    # gradient is not finite
    report: Any
    squares: Any  # float32: each block's sum of squares, as far as gradients are known


def new_progress(sizes: Sequence[int], saved: Mapping[str, Any], where: Sharding) -> Progress:
    """Returns a run's first progress, from its blocks' sizes or saved counts.

    It is on all devices of the sharding `where`.
    """
    if isinstance(where, NamedSharding):
        where = NamedSharding(where.mesh, PartitionSpec())
    shares = np.array(sizes, np.float32) / max(sum(sizes), 1)
    values = [
        *(np.array(saved.get(name, 0), np.int32) for name in SAVED[:2]),
        np.asarray(saved.get("shares", shares), np.float32),
        *(np.float32(1), np.bool_(True), np.int32(0), np.zeros_like(shares)),
    ]
    return Progress(*(put_everywhere(x, x.shape, where) for x in values))


def decisions(max_grad_norm: float | None, jit: Any, *, at_once: bool) -> tuple[Any, Any]:
    """Returns two programs for a step's decisions: after each block's gradient, and at the end.

    `at_once` is whether blocks are updated before other blocks' gradients are known.
    """

    @jit
    def note(progress: Progress, loss: Any, squares: Any, block: Any) -> Progress:
        """Returns the progress after a block's backward program; higher blocks came before."""
        finite, known = jnp.isfinite(squares), progress.squares.at[block].set(squares)
        counts, report = progress.counts & jnp.isfinite(loss), progress.report
        total, factor = jnp.sum(known), progress.factor
        if at_once:  # projects the norm from the earlier share of these blocks
            shares = progress.shares
            total /= jnp.maximum(jnp.sum(shares, where=jnp.arange(shares.size) >= block), 1e-6)
            report = jnp.where(counts & ~finite & (report == 0), -1 - block, report)
        else:
            counts &= jnp.isfinite(total)
        if max_grad_norm is not None:
            factor = max_grad_norm / jnp.maximum(jnp.sqrt(total), max_grad_norm)
        return progress._replace(factor=factor, counts=counts, report=report, squares=known)

    @jit
    def conclude(progress: Progress) -> tuple[Progress, Any]:
        """Returns the next step's first progress, and the verdict: (skipped, report)."""
        counts = progress.counts.astype(jnp.int32)
        new = progress.squares / jnp.sum(progress.squares)
        shares = jnp.where(
            progress.counts & jnp.all(jnp.isfinite(new)),
            _MEMORY * progress.shares + (1 - _MEMORY) * new,
            progress.shares,
        )
        skipped, zeros = progress.skipped + 1 - counts, jnp.zeros_like(shares)
        first = jnp.float32(1), jnp.bool_(True), jnp.int32(0), zeros
        following = Progress(progress.counted + counts, skipped, shares, *first)
        return following, jnp.stack([skipped, progress.report])

    return note, conclude
