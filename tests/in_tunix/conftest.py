"""Settings for tests with Tunix."""

from tests.other_libraries import pytest_configure as pytest_configure
