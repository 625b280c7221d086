"""Compiles the programs of a boundary while the first step compiles: no later step waits for them.

jax compiles a program where it is called first, and Numba a loop. Both would be in the middle of a
run: where the first window closes, or where the warm-up ends. `ZENFLOW_JAX_COMPILE_AHEAD=0` in the
environment leaves it at that, for programs that make many engines and few steps with each.
"""

import os
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax


class Ahead:
    """One engine's programs, compiled on a thread of their own. For one calling thread."""

    def __init__(self) -> None:
        self._on = os.environ.get("ZENFLOW_JAX_COMPILE_AHEAD", "1") != "0"
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="zenflow-compile")
        self._compiled: dict[Hashable, Future] = {}

    def run(self, task: Callable[[], None]) -> None:
        """Runs something that makes other code ready; what it raises is raised by that code."""
        if self._on:
            self._pool.submit(task)

    def prepare(self, key: Hashable, program: Any, *arrays: Any, **static: Any) -> None:
        """Begins to compile a jitted program for trees of arrays like these, abstract ones too."""
        if self._on:
            alike = jax.tree.map(abstract, arrays)
            self._compiled[key] = self._pool.submit(_compile, program, alike, static)

    def call(self, key: Hashable, program: Any, *arrays: Any, **static: Any) -> Any:
        """What the program returns; of a prepared one, without compiling anything."""
        compiled = self._compiled.get(key)
        if compiled is not None and compiled.exception() is None:
            try:
                return compiled.result()(*arrays)
            except (TypeError, ValueError):
                # Other arrays than were expected: nothing has run, and `jit` takes any.
                del self._compiled[key]
        return program(*arrays, **static)

    def close(self) -> None:
        """Drops what is not compiled yet."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._compiled.clear()


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """An array's shape, dtype and sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _compile(program: Any, arrays: tuple[Any, ...], static: dict[str, Any]) -> Any:
    return program.lower(*arrays, **static).compile()
