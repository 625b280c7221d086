"""Settings for tests with Keras, equinox and haliax."""

import os

from tests.other_libraries import pytest_configure as pytest_configure

os.environ["KERAS_BACKEND"] = "jax"
