"""Runs the tests of `eight_devices/`, which need as many, in a process that has them."""

import pytest

from tests.processes import output, start


# One process for all: they compile the same programs, and each would import all anew. Without the
# checks of types that pyproject.toml asks for: they take a third of the time, and every function is
# checked on one device.
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_needs_eight_devices_holds_on_eight():
    options = ("-q -p no:cacheprovider -o addopts=--strict-markers -o timeout=300").split()
    run = start("-m", "pytest", *options, "tests/eight_devices", devices=8)
    code, text = output(run, timeout_s=3500)
    assert code == 0, text[-10_000:]
