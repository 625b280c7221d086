"""Settings that every test runs under, and the rule for tests that need an accelerator.

Nothing here chooses a platform, sets XLA flags or keeps compiled programs: what a test sees is what
a user's process sees. A test that needs another set-up starts a process of its own.
"""

import os

import jax
import pytest
from hypothesis import settings

# They are run by `test_eight_devices.py`, in processes that have eight devices.
DEVICES = "--xla_force_host_platform_device_count=8"
collect_ignore = [] if DEVICES in os.environ.get("XLA_FLAGS", "") else ["eight_devices"]

# An implicit promotion is how float32 arithmetic would turn into bfloat16 unseen, and an implicit
# rank promotion is how a vector of channels would be laid along the wrong axis.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples on every run; no deadline, because the first example of a shape compiles.
settings.register_profile("zenflow_jax", derandomize=True, deadline=None)
settings.load_profile("zenflow_jax")


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Asked only when a marked test is about to run: asking starts jax's backends.
    if item.get_closest_marker("gpu") and all(d.platform == "cpu" for d in jax.devices()):
        pytest.skip(f"needs an accelerator; jax.devices() has only {jax.devices()}")
