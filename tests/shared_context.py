"""One context of MLIR for all programs that a thread lowers.

jax fills a new one for each: as much work as to lower a small program, and kept as long as the
program is, half of the suite's memory. No program depends on it.
"""

import threading

# Private in jax; checked on 0.10.2 and 0.11.2. `test_shared_context.py` sees whether jax uses it.
from jax._src.interpreters import mlir

_make = mlir.make_ir_context
_of_thread = threading.local()


def share_context() -> None:
    """From now on, in this process."""
    mlir.make_ir_context = _shared


def _shared():
    if not hasattr(_of_thread, "context"):
        _of_thread.context = _make()
    return _of_thread.context
