"""Warnings and errors about steps that are skipped one after the other.

If a weight is NaN, or every batch has one, no step counts any more: without a word such a run would
go on to its end and leave the model as it was.
"""

import logging

_logger = logging.getLogger("zenflow_jax")
# Skipped steps in a row that are worth a word.
_MANY = 3
_WHAT_TO_DO = (
    "Look for NaN or infinity in the weights, the batches and the loss; "
    '`jax.config.update("jax_debug_nans", True)` stops where the first NaN is made.'
)


def tell_of_skipped(in_a_row: int, step: int, limit: int | None) -> None:
    """Warns of many skipped steps in a row, up to `step`, and again at ten times as many.

    Raises:
        FloatingPointError: If `limit` of them were skipped.
    """
    if limit is not None and in_a_row >= limit:
        raise FloatingPointError(
            f"expected a step with a finite gradient, got {in_a_row} in a row without "
            f"(`max_skipped` is {limit}), the last of them step {step}. {_WHAT_TO_DO}"
        )
    if in_a_row in (_MANY * 10**power for power in range(9)):
        warn_of_skipped(in_a_row, step)


def warn_of_skipped(in_a_row: int, step: int) -> None:
    """Warns if many steps in a row were skipped."""
    if in_a_row >= _MANY:
        _logger.warning(
            "zenflow skipped the last %d steps, up to step %d: their gradients were not finite, so "
            "they changed nothing. %s To make it an error, pass `max_skipped` to `HostEngine`.",
            in_a_row,
            step,
            _WHAT_TO_DO,
        )
