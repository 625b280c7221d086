"""Scripts that train models with zenflow_jax, and the models they train.

Each script is a module with a `main`, is read from top to bottom, and uses the library through
its public names alone. Nothing in the library imports this package.
"""


class Failure(Exception):
    """What a user can remedy: the message is shown as it is, without a traceback."""
