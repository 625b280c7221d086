"""Runs the tests of `eight_devices/`, which need as many, in a process that has them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment

FOLDER = Path(__file__).parent / "eight_devices"


# One process for all: they compile the same programs, and each would import all anew. Without the
# checks of types that pyproject.toml asks for: they take a third of the time, and every function is
# checked on one device.
@pytest.mark.slow
def test_on_eight_devices():
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers"]
    settings = environment(8)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(FOLDER)],
        cwd=FOLDER.parents[1],
        env=settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-10_000:] + run.stderr[-2000:]
