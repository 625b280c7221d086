"""Whether calls are held to the annotations of the library, from one test to the next."""

import jax
import jaxtyping


def check_types(wanted: bool) -> None:
    """Has the annotations of the library checked from now on, or not."""
    if wanted and jaxtyping.config.jaxtyping_disable:
        jax.clear_caches()  # else what was traced unchecked would not be traced again
    jaxtyping.config.update("jaxtyping_disable", not wanted)
