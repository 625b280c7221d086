"""Prepares a run before its folder exists: data, model, optimizer, compiled functions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from train.cli.command_line import to_toml
from train.cli.settings import (
    HostSettings,
    OutputSettings,
    Settings,
    SettingsError,
    StepSettings,
    TrainingSettings,
    steps_of,
)
from train.distributed import processes
from train.distributed.sharding import batch_parts, batch_sharding, committed, make_mesh
from train.huggingface.loading import Pretrained, read_folder, shapes_of
from train.log.meter import causes_of_infinity, check_finite
from train.log.trackers import check_reporter
from train.model.cross_entropy import PART
from train.model.decoder import DecoderConfig
from train.model.encoder import EncoderConfig
from train.run import models
from train.run.memory import check_memory
from train.run.optimizers import (
    describe_deepspeed_changes,
    finalize_settings,
    initial_state,
    make_optimizer,
    with_deepspeed,
)
from train.run.step import PER_EXAMPLE, make_train_step, make_validate
from train.tasks import Task
from train.tasks.batches import Batches, Sample
from train.tasks.chosen import make_task, make_test, with_best
from zenflow_jax import planning, streaming
from zenflow_jax.deepspeed import DeepSpeedOptions

# Too few steps to teach a model much.
FEW_STEPS = 50


class Sources(NamedTuple):
    original: StepSettings  # without the values of a DeepSpeed config
    settings: Settings
    deepspeed: DeepSpeedOptions | None
    mesh: Mesh | None
    origin: Pretrained | None  # the model's folder
    config: DecoderConfig | EncoderConfig
    texts: Mapping[str, str]  # files for the trained folder, read when the run begins
    task: Task
    samples: Mapping[str, Sample]  # the batches of each validation set
    test: Mapping[str, Sample]  # the batches of the test data, if any
    checksum: int  # of all data


class Job(NamedTuple):
    settings: Mapping[str, Any]  # final values, for the records
    training: TrainingSettings
    host: HostSettings
    output: OutputSettings
    tokens: int  # of a batch without padding
    mesh: Mesh | None
    task: Task
    texts: Mapping[str, str]
    batches: Batches
    model: models.Model
    train_step: Callable
    validate: Callable[..., dict[str, float]]  # from `make_validate`
    test: Callable[..., dict[str, float]] | None  # the same for the test data
    notes: tuple[str, ...]  # shown to the user
    causes_of_infinity: str


def read(
    settings: Settings, *, timeline: Path | None, force: bool, say: Callable[[str], None]
) -> Sources:
    """Reads and checks everything but weights; arguments and errors are those of `train`."""
    settings.check_task()
    check_reporter(settings.report_to)
    mesh = make_mesh(settings.mesh)
    settings, deepspeed = with_deepspeed(original := settings, batch_parts(mesh))
    if timeline and (settings.optimizer == "adamw" or settings.steps == 0):
        raise SettingsError(
            "`--timeline`: needs steps with host work (zenflow or offload), but the run has "
            f"{settings.optimizer} with steps {settings.steps}."
        )
    if settings.steps == 0:
        _check_evaluation(settings.run, settings.model, settings.output_dir)
    origin = None if settings.model is None else read_folder(settings.model)
    config = models.config_of(origin, settings)
    texts = models.template_files(settings.chat_template)
    if not force:
        parameters = sum(x.size for x in jax.tree.leaves(shapes_of(config, labels=1)))
        # A classifier has no logits over tokens.
        vocabulary = min(config.vocabulary, PART) if isinstance(config, DecoderConfig) else 0
        check_memory(parameters, vocabulary, mesh, settings)
    task = make_task(
        settings,
        origin,
        path=settings.data and Path(settings.data),
        sequence_length=settings.sequence_length,
        validation_share=settings.validation_share,
        seed=settings.seed,
        say=say,
    )
    task = with_best(task, settings.best)
    # Validations use micro-batches too, since these fit the device.
    parts, most = settings.micro_batches, settings.eval_batches
    sample = partial(
        Sample,
        batch_size=settings.batch_size // parts,
        seed=settings.seed,
        mesh=mesh,
        buckets=settings.length_buckets,
    )
    most = None if most is None else most * parts
    samples = {name: sample(source, batches=most) for name, source in task.validation.items()}
    tested, checksum = {}, task.checksum
    if settings.test_data is not None:
        options = {"sequence_length": settings.sequence_length, "say": say}
        test = make_test(settings, origin, task, **options)
        tested = {"test": sample(test.validation["validation"])}
        task = task._replace(notes=(*task.notes, *test.notes))
        checksum ^= test.checksum
    return Sources(
        original, settings, deepspeed, mesh, origin, config, texts, task, samples, tested, checksum
    )


def prepare(sources: Sources, check: Callable[[], None]) -> tuple[Job, Any]:
    """Makes model, compiled functions and optimizer state; `check` may end a validation."""
    settings, mesh, task = sources.settings, sources.mesh, sources.task
    batches = Batches(
        task.train,
        batch_size=settings.batch_size,
        seed=settings.seed,
        mesh=mesh,
        buckets=settings.length_buckets,
    )
    settings, few = _with_steps(settings, batches.per_epoch)
    settings, deepspeed = finalize_settings(settings, sources.deepspeed, batches.per_epoch)
    notes = describe_deepspeed_changes(sources.original, settings, deepspeed)
    notes = (*notes, *task.notes, *task.overview, *few)
    # A resumed run with more steps must have the same number of rounds.
    rounds = settings.warm_up_rounds
    settings = dataclasses.replace(settings, full_warm_up_share=None, full_warm_up_rounds=rounds)
    values = dataclasses.asdict(settings)
    processes.check_same(to_toml(values), sources.checksum)
    model = make_model(sources)
    tx = make_optimizer(settings, deepspeed, steps_per_epoch=batches.per_epoch)
    opt_state = committed(initial_state(tx, model.params), mesh)
    placement = mesh and jax.tree.map(lambda x: x.sharding, (model.params, opt_state))
    per_example = PER_EXAMPLE[task.kind]
    streams = settings.stream != "none"
    if streams and jax.default_backend() != "cpu":
        try:
            streaming.check_device()
        except NotImplementedError as error:  # this version of jax is too old
            raise SettingsError(str(error)) from error
    train_step = make_train_step(
        model.graphdef,
        tx,
        per_example,
        micro_batches=settings.micro_batches,
        stream=streams,
        placement=placement,
        on_gpu=planning.gpu_here() is not None,
    )

    def figures_on(samples: Mapping[str, Sample]) -> Callable[..., dict[str, float]]:
        return make_validate(model.graphdef, per_example, task, samples, check)

    job = Job(
        settings=values,
        training=settings,
        host=settings,
        output=settings,
        tokens=settings.batch_size * settings.sequence_length,
        mesh=mesh,
        task=task,
        texts=sources.texts,
        batches=batches,
        model=model,
        train_step=train_step,
        validate=figures_on(sources.samples),
        test=figures_on(sources.test) if sources.test else None,
        notes=notes,
        causes_of_infinity=causes_of_infinity(
            settings.model, settings.dtype, settings.learning_rate
        ),
    )
    return job, opt_state


def _with_steps(settings: Settings, per_epoch: int) -> tuple[Settings, list[str]]:
    """Returns the settings with their number of steps, and notes if these are few."""
    if settings.steps is not None:
        return settings, []
    settings = dataclasses.replace(settings, steps=steps_of(settings.epochs, per_epoch))
    if settings.steps >= FEW_STEPS:
        return settings, []
    epochs = math.ceil(2 * FEW_STEPS / per_epoch)
    remedy = f"pass --epochs {epochs} for {epochs * per_epoch}, or a smaller --batch-size"
    return settings, [f"only {settings.steps} steps: {remedy}"]


def make_model(sources: Sources) -> models.Model:
    settings, mesh, labels = sources.settings, sources.mesh, sources.task.labels
    sharding = mesh and batch_sharding(mesh, settings.batch_size, settings.micro_batches)
    build = models.builder(sources.config, settings, sharding=sharding, labels=len(labels))
    options = {"labels": labels, "seed": settings.seed}
    in_host_memory = settings.stream == "weights"
    return models.make(build, mesh, sources.origin, in_host_memory=in_host_memory, **options)


def evaluate(sources: Sources, say: Callable[[str], None]) -> None:
    """Shows the metrics of a validation, which must be finite. All processes must call it."""
    settings, task = sources.settings, sources.task
    samples = {**sources.samples, **sources.test}
    processes.check_same(to_toml(dataclasses.asdict(settings)), sources.checksum)
    for line in (*task.notes, *task.overview):
        say(line)
    model = make_model(sources)
    if drawn := models.describe_new_weights(model, task.labels):
        say(f"{drawn}. These figures are at chance level.")
    figures = make_validate(model.graphdef, PER_EXAMPLE[task.kind], task, samples)(model.params)
    counts = ", ".join(f"{sample.examples} examples of {name}" for name, sample in samples.items())
    say(f"{settings.model or 'a model that is not trained'} on {counts}:")
    for name, value in figures.items():
        per = f" nats per {task.target}" if name.rpartition("/")[2] == "loss" else ""
        say(f"{name} {value:.4f}{per}")
    causes = causes_of_infinity(settings.model, settings.dtype, settings.learning_rate)
    check_finite(figures, causes)
    processes.leave()


def _check_evaluation(run: str | None, model: str | None, output_dir: str) -> None:
    """Refuses an evaluation of an ambiguous model; a run's settings name both run and model."""
    trained = Path(output_dir) / str(run) / models.FOLDER
    if run is not None and (model is None or Path(model).resolve() != trained.resolve()):
        raise SettingsError(
            f"`steps`: 0 with the run {run} would only show metrics of "
            f"{model or 'an untrained model'}. For the model that the run has trained, pass "
            f"--model {trained}; for that model, pass --run None."
        )
