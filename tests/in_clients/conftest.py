"""Settings for tests with Keras, equinox, haliax and datasets."""

import os

from tests.other_libraries import pytest_configure as pytest_configure

os.environ["KERAS_BACKEND"] = "jax"
