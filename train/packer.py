"""Packs older checkpoints beside a run, one at a time, in a process that gives way to others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from train.elves.whole import remove_leftovers
from train.packed_checkpoints import is_packed_checkpoint


class Packer:
    """The process that packs, if there is one. For one thread, of the process that is first.

    Args:
        folder: Of the checkpoints.
        say: Shows a line to the user.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]):
        self._folder = folder
        self._say = say
        self._process: subprocess.Popen | None = None
        self._failed: set[int] = set()
        self.step: int | None = None  # of the checkpoint that is being packed

    def start(self, steps: list[int]) -> bool:
        """Begins with the newest of these checkpoints that is not packed, if nothing is under way.

        Returns:
            Whether something is under way.
        """
        if self._process is not None and self._process.poll() is None:
            return True
        self._end()
        left = [
            s
            for s in steps
            if s not in self._failed and not is_packed_checkpoint(self._folder / str(s))
        ]
        if not left:
            return False
        self.step = max(left)
        root = Path(__file__).parents[1]
        path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "train.pack_checkpoint", str(self._folder / str(self.step))],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,  # its end is that of the run
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the run
        )
        return True

    def finish(self, steps: list[int]) -> None:
        """Packs all of these that are not, and waits for it."""
        while self.start(steps):
            assert self._process is not None
            self._process.wait()

    def stop(self) -> None:
        """Gives up what is under way; the checkpoint is as it was. Safe twice."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = self.step = None
            remove_leftovers(self._folder)

    def _end(self) -> None:
        """Says so if the last process has failed."""
        if self._process is None:
            return
        assert self.step is not None
        _, error = self._process.communicate()
        if self._process.returncode:
            self._failed.add(self.step)
            reason = error.decode(errors="replace").strip().splitlines()[-1:] or ["no reason"]
            self._say(
                f"checkpoint {self.step} stays as large as it is: expected to pack it, got: "
                f"{reason[0]}"
            )
        self._process = self.step = None
