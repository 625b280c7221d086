"""A step's hyperparameters, and the step scalars that carry them to the host."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

#: The token of a step whose mail no engine has taken yet.
USED = -1
#: The token in the mail of a step with modified streamed gradients.
MISUSED = -2


class AdamScalars(NamedTuple):
    """A step's hyperparameters: Python numbers or float32 scalars, traced or not.

    `1 - b` is computed from a Python `b`: in float32, 1 - 0.999 has a relative error of 1e-5.
    """

    learning_rate: Any
    b1: Any
    b2: Any
    one_minus_b1: Any
    one_minus_b2: Any
    eps: Any
    weight_decay: Any

    def scaled(self, lr_scale: float) -> "AdamScalars":
        """Returns the hyperparameters of a leaf, in float32, so that both halves use one rate."""
        if lr_scale == 1:
            return self
        return self._replace(learning_rate=self.learning_rate * np.float32(lr_scale))


_FLOATS = len(AdamScalars._fields) + 1


class WindowStep(NamedTuple):
    """The hyperparameters of the single update that deferred channels get for a window."""

    scalars: AdamScalars
    advance: Any  # how many Adam steps it counts as
    # A single step's betas, which the bias corrections raise to the power of a channel's count.
    b1: Any
    b2: Any


def window_step(s: AdamScalars, counted: int, scaled: bool) -> WindowStep:
    """Returns the update of a window with `counted` gradients: as many steps, or one.

    If `scaled`, all these steps have the same moments, from the means of gradients and squares.
    """
    if not scaled:
        return WindowStep(s, 1, s.b1, s.b2)

    def power(b: float, one_minus_b: float) -> tuple[Any, Any]:
        if counted == 1:
            return b, one_minus_b
        # Uses `1 - b`, which is exact where `b` is rounded; for `b` = 0, the logarithm is -inf.
        with np.errstate(divide="ignore"):
            exponent = counted * np.log1p(-one_minus_b)
        return np.exp(exponent), -np.expm1(exponent)

    (b1, rest1), (b2, rest2) = power(s.b1, s.one_minus_b1), power(s.b2, s.one_minus_b2)
    rate = s.learning_rate * counted
    together = AdamScalars(rate, b1, b2, rest1, rest2, s.eps, s.weight_decay)
    return WindowStep(together, counted, s.b1, s.b2)


class StepFacts(NamedTuple):
    """The scalars that a step sends to the host, in NumPy or jax."""

    adam: AdamScalars
    factor: Any  # the clipping factor
    step: Any
    token: Any
    finite: Any  # whether the step counts: 1 or 0
    statistics: Any = None  # float32, for an `AutoWindow`: `window_statistics`


class StepScalars(NamedTuple):
    """A step's scalars in a few arrays, because each array costs a copy to host memory."""

    floats: Any  # float32 (8 + statistics,): AdamScalars, the clipping factor, statistics
    ints: Any  # int32 (3,): step, token, whether the gradient was finite

    @staticmethod
    def sizes(statistics: int) -> list[tuple[int, np.dtype]]:
        return [(_FLOATS + statistics, np.dtype(np.float32)), (3, np.dtype(np.int32))]

    @classmethod
    def pack(cls, facts: StepFacts) -> "StepScalars":
        floats = jnp.stack([jnp.asarray(x, jnp.float32) for x in (*facts.adam, facts.factor)])
        if facts.statistics is not None:
            floats = jnp.concatenate([floats, facts.statistics])
        ints = jnp.stack([facts.step, facts.token, facts.finite.astype(jnp.int32)])
        return cls(floats, ints)

    def unpack(self) -> StepFacts:
        floats = self.floats.ravel()
        *adam, factor = floats[:_FLOATS]
        return StepFacts(
            AdamScalars(*adam), factor, *self.ints.ravel(), statistics=floats[_FLOATS:]
        )
