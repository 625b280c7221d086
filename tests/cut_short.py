"""Runs of the training script as a kill leaves them, without a process to kill."""

import shutil
from pathlib import Path

from benchmarks.kill_test import steps_of


def cut_short(whole: Path, target: Path, *, after: int) -> Path:
    """A copy of a run that has ended, with what was there when it had saved that checkpoint.

    Its metrics go further, as those of a run that is killed between two saves do.

    Args:
        whole: The run's folder, with a checkpoint of that step.
        target: The folder to make.
        after: The step.

    Returns:
        `target`.
    """
    shutil.copytree(whole, target)
    saved = steps_of(target / "checkpoints")
    assert after in saved
    assert max(saved) > after
    for step in saved:
        if step > after:
            shutil.rmtree(target / "checkpoints" / str(step))
    (target / "summary.json").unlink()
    for model in target.glob("model*"):
        shutil.rmtree(model) if model.is_dir() else model.unlink()
    return target
