"""Warnings and errors about steps that are skipped one after the other.

One skipped step is everyday life. But if a weight is NaN, or every batch has one, no step counts
any more: without a word such a run would go on to its end and leave the model as it was.
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
    """Warns of many skipped steps in a row, again at ten times as many, and refuses too many.

    Args:
        in_a_row: Steps skipped since the last one that counted.
        step: The last of them.
        limit: How many are too many; None for any number.

    Raises:
        FloatingPointError: If that many were skipped.
    """
    if limit is not None and in_a_row >= limit:
        raise FloatingPointError(
            f"expected a step with a finite gradient, got {in_a_row} in a row without "
            f"(`max_skipped` is {limit}), the last of them step {step}. {_WHAT_TO_DO}"
        )
    worth_a_word = _MANY
    while worth_a_word < in_a_row:
        worth_a_word *= 10
    if in_a_row == worth_a_word:
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
