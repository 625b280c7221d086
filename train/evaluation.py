"""The figures of a model as it is: `--steps 0` validates, and neither trains nor writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from jax.sharding import Mesh

from train import models, processes
from train.command_line import to_toml
from train.data import Sample
from train.pretrained import Pretrained
from train.sayings import causes_of_infinity
from train.settings import Settings, SettingsError
from train.skipping import NotFiniteError
from train.step import PER_EXAMPLE, make_validate
from train.tasks import Task


def check_alone(settings: Settings, timeline: Path | None) -> None:
    """Checks that nothing is asked for that only a training has.

    Raises:
        SettingsError: If it is not clear which model is meant, or a timeline is to be drawn.
    """
    if settings.run is not None:
        trained = Path(settings.output_dir) / settings.run / models.FOLDER
        # The settings of a run name it.
        if settings.model is None or Path(settings.model).resolve() != trained.resolve():
            raise SettingsError(
                f"`steps`: expected some for the run {settings.run}, got 0, which shows the "
                f"figures of {settings.model or 'a model that is not trained'}. For those of what "
                f"the run has trained pass --model {trained}; for those of that model pass "
                "--run None."
            )
    if timeline is not None:
        raise SettingsError(
            "`--timeline`: expected a training, got --steps 0, which has no steps to draw. Leave "
            "it out."
        )


def evaluate(
    settings: Settings,
    task: Task,
    mesh: Mesh | None,
    origin: Pretrained | None,
    samples: Mapping[str, Sample],
    say: Callable[[str], None],
) -> None:
    """Shows the figures of a validation. All processes must call it.

    Args:
        settings: Of the run that there is not.
        task: What is validated.
        mesh: The devices.
        origin: The folder of the model.
        samples: The batches of each set of validation data.
        say: Shows a line to the user.

    Raises:
        SettingsError: As `models.make`; or if the processes differ.
        ModelError: If the weights cannot be read.
        NotFiniteError: If a figure is not finite.
    """
    processes.check_same(to_toml(settings), task.checksum)
    for note in task.notes:
        say(note)
    model = models.make(settings, task, mesh, origin)
    if model.drawn:
        say(
            f"not in {settings.model}, so drawn at random: {', '.join(model.drawn)}. The figures "
            "are those of chance."
        )
    figures = make_validate(model.graphdef, PER_EXAMPLE[task.kind], task, samples)(model.params)
    counts = ", ".join(f"{sample.examples} examples of {name}" for name, sample in samples.items())
    say(f"{settings.model or 'a model that is not trained'} on {counts}:")
    for name, value in figures.items():
        per = f" nats per {task.target}" if name.rpartition("/")[2] == "loss" else ""
        say(f"{name} {value:.4f}{per}")
    bad = [name for name, value in figures.items() if not math.isfinite(value)]
    if bad:
        raise NotFiniteError(
            f"expected finite figures, got {bad[0]} {figures[bad[0]]}. "
            f"{causes_of_infinity(settings)}"
        )
    processes.leave()
