import jax
import pytest


@pytest.fixture
def as_scripts_run():
    """jax's own attention promotes, as other people's code does."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
