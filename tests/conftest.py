"""Settings that every test runs under.

Nothing here chooses a platform. A test that needs another set-up starts a process of its own.

Compiling is most of the work of these tests. So the compiler for CPUs does not optimize, here or in
the processes that tests start, but where `test_equality.py` compares with optax, and bits: its
steps are compiled as users have them. `XLA_FLAGS=--xla_backend_optimization_level=3 make test`
optimizes everything, and takes thrice as long.

Many tests compile the same programs: workers of pytest-xdist, and the processes that tests start.
So jax's compilation cache, in a folder that lives as long as the tests run, is shared by all of
them. What it gives is the machine code that the compiler gave, and jax goes through tracing,
lowering and its counts of compilations as without it.
"""

import atexit
import gc
import importlib.util
import os
import shutil
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

import jax
import jaxtyping
import pytest
from hypothesis import settings

from tests import processes

LIBRARY = Path(__file__).parents[1] / "zenflow_jax"

# They are run by `test_eight_devices.py`, in processes that have eight devices.
DEVICES = "--xla_force_host_platform_device_count=8"
collect_ignore = [] if DEVICES in os.environ.get("XLA_FLAGS", "") else ["eight_devices"]
# `make test-tunix` runs them, in an environment that has it.
if importlib.util.find_spec("tunix") is None:
    collect_ignore.append("in_tunix")

# XLA reads them when jax starts its first backend. That for GPUs has none but optimized code, so
# where it may be used, which is where a plugin of jax is installed, they stay away.
if "optimization_level" not in os.environ.get("XLA_FLAGS", "") and not entry_points(
    group="jax_plugins"
):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} {processes.QUICK_TO_COMPILE}".strip()
    )

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # else the process that started this one set it
    folder = tempfile.mkdtemp(prefix="zenflow_jax-compiled-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, value in {
        "jax_compilation_cache_dir": folder,
        # Small programs, too: there are thousands, and each costs more to compile than to read.
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)

# XLA is told of each instruction in which line of Python it began, and not of all the frames above:
# to write these into a program and to read them again was a fifth of the suite's time. No program
# depends on them, and the compilation cache does not look at them.
jax.config.update("jax_include_full_tracebacks_in_locations", False)
os.environ.setdefault("JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS", "0")

# An implicit promotion is how float32 arithmetic would turn into bfloat16 unseen, and an implicit
# rank promotion is how a vector of channels would be laid along the wrong axis.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples on every run; no deadline, because the first example of a shape compiles.
settings.register_profile("zenflow_jax", derandomize=True, deadline=None)
settings.load_profile("zenflow_jax")


@pytest.fixture
def promotion_as_users_have_it():
    """Neither optax nor jax's own `dot_product_attention` is clean under strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def as_scripts_run():
    """jax's own attention promotes, as other people's code does."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def no_picture(monkeypatch):
    """Runs of the script in this process do not draw their losses, a quarter of a short run."""
    monkeypatch.setattr("train.log.summary.write_picture", lambda *_, **__: None)


# The annotations of the library are checked in its examples and in these tests alone: checks take a
# third of a test's time.
CHECKED = (
    "test_engine.py",
    "test_engine_save.py",
    "test_groups.py",
    "test_leaves.py",
    "test_masters.py",
    "test_memory.py",
    "test_schedule.py",
    "test_transform.py",
)


def is_checked(item: pytest.Item) -> bool:
    if item.get_closest_marker("slow") is not None:
        return False
    return item.path.name in CHECKED or item.path.is_relative_to(LIBRARY)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if is_checked(item) and jaxtyping.config.jaxtyping_disable:
        jax.clear_caches()  # a program that was traced without checks is not traced again
    jaxtyping.config.update("jaxtyping_disable", not is_checked(item))


def pytest_collection_finish() -> None:
    # What is imported stays, and need not be looked through whenever tracing has made a million
    # objects; of which few are garbage that counting references leaves.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the slowest tests first, so that no worker waits for another at the end."""
    # The slowest have a timeout of their own.
    items.sort(key=lambda x: [x.get_closest_marker(name) is None for name in ("timeout", "slow")])
    items.sort(key=is_checked)  # checks are switched on once
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))
