"""A process that packs one checkpoint and gives way to everything else: `--compress-kept`.

    python -m train.pack_checkpoint FOLDER

It ends at once when its standard input does: when the run that has started it is gone.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from train.elves.errors import ElvesError
from train.packed_checkpoints import pack_in_place


def main() -> int:
    """The command. Returns its exit code: 0; 2 after what the message explains."""
    os.nice(19)
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    try:
        pack_in_place(Path(sys.argv[1]))
    except (ElvesError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _end_with_the_run() -> None:
    # Not by `sys.stdin`, whose lock Python wants at its end. The start that goes on with the run
    # puts in order what is left (`remove_leftovers`).
    while os.read(0, 1):
        pass
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main())
