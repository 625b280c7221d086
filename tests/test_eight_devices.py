"""Runs the tests of `eight_devices/`, which need as many, in processes that have them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment

FOLDER = Path(__file__).parent / "eight_devices"


# The largest first, which has the most to compile, so that nobody waits for it at the end.
FILES = sorted(FOLDER.glob("test_*.py"), key=lambda path: path.stat().st_size, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.name for path in FILES])
def test_on_eight_devices(name):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / name)],
        cwd=FOLDER.parents[1],
        env=environment(8),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-10_000:] + run.stderr[-2000:]
