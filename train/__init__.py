"""Scripts that train models with zenflow_jax, and the models they train.

Each script is a module with a `main`, is read from top to bottom, and uses the public names of the
library. `plan/planning.py` and `checkpoints/reading.py` also read fields of the state's leaves, and
change with them. Nothing in the library imports this package; `zenflow_jax/_commands.py` starts its
scripts as console commands.
"""

import sys
from pathlib import Path

#: The folder of the shipped configs, which can be named without a path.
CONFIGS = Path(__file__).parents[1] / "configs"


class Failure(Exception):
    """A mistake that a user can fix: its message is shown without a traceback."""


def command_of(script: str) -> str:
    """Returns the command that starts a script, installed or not as this process was."""
    installed = Path(sys.argv[0]).name.startswith("zenflow-")
    return f"zenflow-{script}" if installed else f"python -m train.{script}"
