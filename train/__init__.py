"""Scripts that train models with zenflow_jax, and the models they train.

Each script is a module with a `main`, can be read from top to bottom, and uses the library's public
names. `plan/planning.py` and `checkpoints/compatibility.py` also read fields of the state's leaves,
and must change with them. The library never imports this package; `zenflow_jax/_commands.py` starts
its scripts as console commands.
"""

import sys
from pathlib import Path

#: The folder with the built-in configs, which users name without a path.
CONFIGS = Path(__file__).parents[1] / "configs"


class Failure(Exception):
    """A mistake that a user can fix; its message is shown without a traceback."""


def command_of(script: str) -> str:
    """Returns the command for a script, in the form that started this process."""
    installed = Path(sys.argv[0]).name.startswith("zenflow-")
    return f"zenflow-{script}" if installed else f"python -m train.{script}"
