"""The hyperparameters of a step."""

from typing import Any, NamedTuple


class AdamScalars(NamedTuple):
    """Hyperparameters that all leaves share: Python numbers or float32 scalars, traced or not.

    `1 - b` is computed while `b` is still a Python number, as in optax: in float32, 1 - 0.999 is
    off by 1e-5 of itself.
    """

    learning_rate: Any
    b1: Any
    b2: Any
    one_minus_b1: Any
    one_minus_b2: Any
    eps: Any
    weight_decay: Any
