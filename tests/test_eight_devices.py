"""Runs the tests in `eight_devices/` in a process with eight devices."""

import pytest

from tests.processes import output, start


# One process for all tests, because they compile the same programs, and each process would import
# everything again.
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_tests_for_eight_devices_pass():
    options = ("-q -p no:cacheprovider -o addopts=--strict-markers -o timeout=300").split()
    run = start("-m", "pytest", *options, "tests/eight_devices", devices=8)
    code, text = output(run, timeout_s=3500)
    assert code == 0, text[-10_000:]
