"""Counts compilations, and names compiled programs."""

import contextlib
import logging
import threading

import jax


def times_compiled(program):
    """Returns a jitted function's compilations; jax 0.10 to 0.12 have no public name for it."""
    return program._cache_size()


@contextlib.contextmanager
def compilations():
    """Yields the names of programs that this thread compiles, or finds in the cache."""
    names, thread = [], threading.get_ident()
    handler, logger = logging.Handler(), logging.getLogger("jax")

    def emit(record):
        words = record.getMessage().split()
        if words[:1] == ["Compiling"] and record.thread == thread:
            names.append(words[1])

    handler.emit = emit
    logger.addHandler(handler)
    jax.config.update("jax_log_compiles", True)
    propagates, logger.propagate = logger.propagate, False
    try:
        yield names
    finally:
        jax.config.update("jax_log_compiles", False)
        logger.propagate = propagates
        logger.removeHandler(handler)
