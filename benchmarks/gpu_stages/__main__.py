"""Runs one stage in this process; `on_gpu.py` starts these processes in turn.

    python -m benchmarks.gpu_stages benchmarks.gpu_stages.facts:run --name facts --folder F

The exit status is 1 if the stage failed, 3 if there is no GPU.
"""

import argparse
import faulthandler
import importlib
import sys
import time
import traceback
from pathlib import Path

from benchmarks.gpu_stages.notes import Notes, Stage, notes_path
from benchmarks.machine import NoGPU

#: Exit status of a stage that finds no GPU; the other stages would not find one either.
NO_GPU = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="module:function")
    parser.add_argument("--name", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    # A stage that hangs prints its threads' stacks before it is killed.
    faulthandler.enable()
    faulthandler.dump_traceback_later(args.seconds + 2)
    notes = Notes(notes_path(args.folder, args.name))
    until = time.monotonic() + args.seconds
    stage = Stage(args.name, args.folder, args.rehearse, until, notes)
    module, function = args.target.split(":")
    try:
        getattr(importlib.import_module(module), function)(stage)
    except NoGPU as error:
        notes.keep(failed=str(error))
        print(error, file=sys.stderr)
        sys.exit(NO_GPU)
    except Exception as error:  # noqa: BLE001 - the report includes any error
        traceback.print_exc()
        notes.keep(failed="".join(traceback.format_exception_only(error)).strip()[:2000])
        sys.exit(1)


if __name__ == "__main__":
    main()
