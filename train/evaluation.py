"""The figures of a model as it is: `--steps 0` validates, and neither trains nor writes."""

from __future__ import annotations

import math
from collections.abc import Callable

from train import models, processes
from train.command_line import to_toml
from train.job import Sources
from train.skipping import NotFiniteError, causes_of_infinity
from train.step import PER_EXAMPLE, make_validate


def evaluate(sources: Sources, say: Callable[[str], None]) -> None:
    """Shows the figures of a validation, which must be finite. All processes must call this."""
    settings, task, samples = sources.settings, sources.task, sources.samples
    processes.check_same(to_toml(settings), task.checksum)
    for note in task.notes:
        say(note)
    model = models.make(settings, task, sources.mesh, sources.origin)
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
    for name, value in figures.items():
        if not math.isfinite(value):
            causes = causes_of_infinity(settings.model, settings.dtype, settings.learning_rate)
            raise NotFiniteError(f"expected finite figures, got {name} {value}. {causes}")
    processes.leave()
