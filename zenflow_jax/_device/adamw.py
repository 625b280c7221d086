"""One AdamW step on float32 arrays with a step count per channel.

The functions are pure and elementwise. `_host/adam.py` is the counterpart for NumPy arrays.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zenflow_jax._spec.scalars import AdamScalars


def adamw(
    p: Float[Array, "..."],
    g: Float[Array, "..."],
    mu: Float[Array, "..."],
    nu: Float[Array, "..."],
    steps: Int[Array, "..."],
    scalars: AdamScalars,
    *,
    decay: bool,
) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
    """Returns the change in masters `p` and the new moments, as `optax.adamw` computes them.

    All are float32. `steps` (int32) counts each channel's Adam steps, including this step.
    """
    mu = scalars.b1 * mu + scalars.one_minus_b1 * g
    nu = scalars.b2 * nu + scalars.one_minus_b2 * jnp.square(g)
    return change_of(p, mu, nu, steps, scalars, decay=decay), mu, nu


def change_of(
    p: Float[Array, "..."],
    mu: Float[Array, "..."],
    nu: Float[Array, "..."],
    steps: Int[Array, "..."],
    scalars: AdamScalars,
    *,
    decay: bool,
) -> Float[Array, "..."]:
    """Returns the change in `p`, given the moments after the step; arguments as for `adamw`."""
    t = steps.astype(jnp.float32)
    corrected = mu / (1 - scalars.b1**t), nu / (1 - scalars.b2**t)
    direction = corrected[0] / (jnp.sqrt(corrected[1]) + scalars.eps)
    if decay:
        direction = direction + scalars.weight_decay * p
    return -scalars.learning_rate * direction
