"""Which programs a thread compiles."""

import contextlib
import logging
import threading

import jax


class Compiled(logging.Handler):
    """The names of the programs that this thread has compiled, or found compiled on disk."""

    def __init__(self):
        super().__init__()
        self.names = []
        self._thread = threading.get_ident()

    def emit(self, record):
        message = record.getMessage()
        if message.startswith("Compiling ") and record.thread == self._thread:
            self.names.append(message.split()[1])


@contextlib.contextmanager
def compilations():
    handler, logger = Compiled(), logging.getLogger("jax")
    logger.addHandler(handler)
    jax.config.update("jax_log_compiles", True)
    propagates, logger.propagate = logger.propagate, False
    try:
        yield handler.names
    finally:
        jax.config.update("jax_log_compiles", False)
        logger.propagate = propagates
        logger.removeHandler(handler)
