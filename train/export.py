"""Writes the weights of one checkpoint by themselves: `--export best DIR`, `--export 300 DIR`.

They are those that its validation has seen: without the updates that were on their way.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from train import models
from train.pretrained import read_folder
from train.report import read_summary
from train.run_description import description_of_model
from train.saved_checkpoints import CheckpointError, SavedCheckpoints
from train.settings import Settings, SettingsError
from train.tasks.chosen import labels_and_best
from train.whole import made_whole


def export(settings: Settings, which: str, target: Path, say: Callable[[str], None]) -> None:
    """Writes the weights of the checkpoint `which`, a step or "best", to a new or empty folder."""
    if settings.run is None:
        raise SettingsError("`--export`: expected the name of a run (--run), got none.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"`--export`: expected a new or an empty folder, got {target}.")
    target = target.absolute()  # as "." has no name
    folder = Path(settings.output_dir) / settings.run
    origin = None if settings.model is None else read_folder(Path(settings.model))
    labels, best = labels_and_best(settings.task)
    checkpoints = SavedCheckpoints(
        folder / "checkpoints",
        larger_is_better=best != "loss",
        describe=description_of_model(settings, origin and origin.config),
        say=say,
    )
    labels = labels or checkpoints.labels()
    # The end of the run, with all windows closed, which its checkpoint has open.
    summary = read_summary(folder)
    end = folder / (models.WEIGHTS if origin is None else models.FOLDER)
    rival, has_end = math.nan, False
    if summary is not None and summary.best_step in (None, summary.steps) and end.exists():
        has_end, rival = True, summary.validation_after.get(best, math.nan)
    step = checkpoints.find(which, rival=rival)
    if step is None:
        _copy(end, target)
        say(f"{target} has the model of {folder}, of step {summary.steps}, which did best")
        return
    build = models.builder(settings, None, origin, labels=len(labels))
    _, shapes = jax.eval_shape(lambda: models.split(build()))
    weights = checkpoints.weights(step, jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes))
    # The run's template, whatever the settings say now.
    copy = folder / models.CHAT_TEMPLATE
    texts = models.texts_of(str(copy) if copy.is_file() else settings.chat_template)
    models.write(target, origin, weights, labels=labels, texts=texts)
    said = f"{target} has the weights of checkpoint {step} in {folder}"
    if settings.optimizer != "adamw":
        said += ", without the updates that were on their way"
        if has_end and step == summary.steps:
            said += f"; {end} has them"
    say(said)


def _copy(model: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with made_whole(target, folder=True) as part:
            if model.is_dir():
                shutil.copytree(model, part, dirs_exist_ok=True)
            else:
                shutil.copyfile(model, part / model.name)
    except OSError as error:
        raise CheckpointError(f"expected to copy {model} to {target}, got: {error}.") from error
