"""Console commands, each of which runs a script in `train/` in its own process.

Scripts, `elves` and configs are not installed as packages: in a wheel they are in a folder of this
package, in a clone in the root. Only a command puts that folder on its path, before everything
else, so that a user's own `train.py` is not imported instead.
"""

import importlib
import sys
from functools import partial
from pathlib import Path

_HERE = Path(__file__).parent
#: The folder that contains the scripts: in the wheel, or the root of a clone.
_SCRIPTS = _HERE / "_scripts" if (_HERE / "_scripts").is_dir() else _HERE.parent


def plan() -> int:
    if len(sys.argv) > 1:  # the error without arguments must not mention this
        sys.argv.insert(2, "--plan")
    return _run("finetune")


def _run(script: str) -> int:
    sys.path.insert(0, str(_SCRIPTS))
    try:
        main = importlib.import_module(f"train.{script}").main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("train", "elves", "zenflow_jax"):
            raise
        sys.stderr.write(
            f"error: this command needs the module {error.name}, which is not installed. Install "
            'it: pip install "zenflow_jax[train]"\n'
        )
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("stopped by SIGINT\n")
        return 130
    return main()


finetune, generate, compress = (partial(_run, x) for x in ("finetune", "generate", "compress"))
