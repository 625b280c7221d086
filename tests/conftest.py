"""Settings for every test.

These settings do not choose a platform. A test with a different set-up starts a separate process.

Compiling takes most of these tests' time. So the compiler for CPUs does not optimize, here or in
the processes that tests start, except where `test_equality.py` compares with optax or compares
bits: its steps are compiled in the same way as for users. To optimize everything, which takes three
times as long, run `XLA_FLAGS=--xla_backend_optimization_level=3 make test`.

Workers of pytest-xdist and the processes that tests start compile the same programs. So all
processes share jax's compilation cache, in a temporary folder. It returns the compiler's machine
code, and jax traces, lowers and counts compilations as without it.
"""

import atexit
import functools
import gc
import importlib.util
import itertools
import os
import shutil
import tempfile
import threading
from importlib.metadata import entry_points

import jax
import pytest
from hypothesis import settings
from jax._src.interpreters import mlir

from tests import processes

# `test_eight_devices.py` runs them, in processes with eight devices.
DEVICES = "--xla_force_host_platform_device_count=8"
collect_ignore = [] if DEVICES in os.environ.get("XLA_FLAGS", "") else ["eight_devices"]
# `make test-clients` runs these, in an environment with Keras, equinox and haliax.
if importlib.util.find_spec("haliax") is None:
    collect_ignore.append("in_clients")
collect_ignore.append("make_fixtures.py")  # needs torch

# XLA reads these flags when jax starts its first backend. The GPU backend makes only optimized
# code, so the flags are not set where one of jax's plugins is installed.
if "optimization_level" not in os.environ.get("XLA_FLAGS", "") and not entry_points(
    group="jax_plugins"
):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} {processes.QUICK_TO_COMPILE}".strip()
    )

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # otherwise a parent process has set it
    folder = tempfile.mkdtemp(prefix="zenflow_jax-compiled-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, value in {
        "jax_compilation_cache_dir": folder,
        # Small programs, too: there are thousands, and reading is faster than compiling.
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)

# XLA gets only the innermost line of Python for each instruction: writing and reading all frames
# took a fifth of the suite's time. Neither programs nor the compilation cache depend on them.
jax.config.update("jax_include_full_tracebacks_in_locations", False)
os.environ.setdefault("JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS", "0")

# A thread lowers all programs in one MLIR context. jax makes a context for each program and loads
# all dialects into it, which took a tenth of the suite's time and half of its memory. Programs do
# not depend on the context. Checked on jax 0.10.2 to 0.12.0.1, which have no option for it.
context_of = functools.cache(lambda thread, make=mlir.make_ir_context: make())
mlir.make_ir_context = lambda: context_of(threading.get_ident())

# Implicit promotion could silently turn float32 arithmetic into bfloat16, and rank promotion could
# broadcast a vector of channels along the wrong axis.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples on every run; no deadline, because the first example of a shape compiles.
settings.register_profile("zenflow_jax", derandomize=True, deadline=None)
settings.load_profile("zenflow_jax")


@pytest.fixture
def as_scripts_run():
    """Allows all promotion, as in scripts: optax and jax's own attention promote."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def no_picture(monkeypatch):
    """Stops scripts in this process from drawing losses, a quarter of a short run's time."""
    monkeypatch.setattr("train.log.results.write_pictures", lambda *_, **__: None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if hasattr(getattr(item, "module", None), "gc"):
        gc.freeze()  # its collections scan only its own objects


def pytest_collection_finish() -> None:
    # Tracing makes millions of objects, of which few are cyclic garbage: collections took a
    # twentieth of the suite's time and saved little memory. Tests of garbage call `gc.collect`.
    gc.freeze()
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the slowest tests first, and gives each worker an equal part."""
    # The slowest tests have their own timeout.
    items.sort(key=lambda x: [x.get_closest_marker(name) is None for name in ("timeout", "slow")])
    # Each worker starts with an equal part of the list. A file's tests share compiled programs.
    worker = getattr(items[0].config, "workerinput", {}) if items else {}
    parts = [[] for _ in range(worker.get("workercount", 1))]
    for _, tests in itertools.groupby(items, key=lambda x: x.path):
        min(parts, key=len).extend(tests)
    items[:] = itertools.chain(*sorted(parts, key=len, reverse=True))
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))
