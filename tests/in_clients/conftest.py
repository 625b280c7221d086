"""Settings of jax and pytest for tests with Keras, equinox and haliax."""

import os

import jax
import pytest

os.environ["KERAS_BACKEND"] = "jax"


def pytest_configure(config: pytest.Config) -> None:
    # These libraries use deprecated parts of jax, and promote dtypes.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore::UserWarning")
    config.addinivalue_line("filterwarnings", "ignore::ResourceWarning")
    config.addinivalue_line("filterwarnings", "ignore::pytest.PytestUnraisableExceptionWarning")
